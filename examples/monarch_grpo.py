"""Trains with the three channels on Monarch: trainer, generator, teachers and environment client are actors, on a CPU.

    errata serve terminal                                     # in another shell
    python examples/monarch_grpo.py http://127.0.0.1:8000     # in an environment with '.[monarch]' and transformers

A tiny policy learns a few turns by heart, a bad one among them, and then trains. Its teachers are scripted: two that
vote, in two processes, and itself with a hint, in a third. A judge scores each episode after it is over; the score goes
to the server, and from there to the trainer. docs/monarch.md says what happens when one of the processes is killed.
"""

import asyncio
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host

from errata_client import Episodes
from errata_trainer.assembly.batch import Transcripts
from errata_trainer.assembly.channel_set import channels_for, driver_for, reference_name
from errata_trainer.assembly.distillation import ITEMS
from errata_trainer.assembly.layouts import LAYOUT, PaddedRows
from errata_trainer.assembly.listed import LISTS
from errata_trainer.assembly.losses import ChannelLosses
from errata_trainer.assembly.preferences import OWN, PAIRS, rejected_here
from errata_trainer.assembly.teacher_pairs import TeacherPairs
from errata_trainer.channels.compose import DPO, SDPO
from errata_trainer.episodes.awaited import AwaitedRunner
from errata_trainer.episodes.conversation import ConversationLimits, Heard, StudentTurn, converse
from errata_trainer.episodes.labels import episode_labels
from errata_trainer.episodes.record import EpisodeRecord
from errata_trainer.episodes.recorded import RecordedEpisode
from errata_trainer.episodes.served import Connect, served_environment
from errata_trainer.episodes.tools import schema_of
from errata_trainer.recipes.monarch import DelayedRewards, LateScore, ReplayTeachers
from errata_trainer.recipes.monarch.distillation import SDPOTeacher
from errata_trainer.settings import ChannelSettings
from errata_trainer.teachers import Answer, Budget, FakeTeacher, Prompter, RawCall, TeacherPool
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer

PROMPT = [{"role": "user", "content": "Work on the task with your tools.\n"}]
LIMITS = ConversationLimits(turns=3, completion_tokens=400)


@dataclass(frozen=True)
class Script:
    """What is played: an environment, a task, and calls of its tools as name and arguments."""

    env: str
    task: dict
    bad: tuple
    good: tuple
    last: tuple


TERMINAL = Script(
    "terminal",
    {"task_id": "file-permissions"},
    bad=("run", {"command": "cd /workspace/sites && ls"}),
    good=("run", {"command": "cd site && ls"}),
    last=("submit", {}),
)


def call_text(call):
    """Return a turn that makes a call, as the tiny policy's chat template writes it."""
    return "<tool_call>" + json.dumps({"name": call[0], "arguments": call[1]}) + "</tool_call>"


def tokenizer_of(script):
    """Return the same tokenizer in every process."""
    return tiny_tokenizer([call_text(call) for call in (script.bad, script.good, script.last)], vocab_size=512)


class Votes:
    """Makes two teachers who agree on the good call, in any process."""

    def __init__(self, script):
        self.script = script

    def __call__(self):
        name, arguments = self.script.good
        answer = Answer(calls=(RawCall(name, json.dumps(arguments)),), finish_reason="tool_calls")
        return [FakeTeacher(answer, name=one) for one in ("first", "second")]


class Model:
    """Makes the policy, in any process."""

    def __init__(self, script):
        self.script = script

    def __call__(self):
        return tiny_model(tokenizer_of(self.script))


class Student:
    """One conversation of the policy. ``sample`` returns the tokens of a turn and their log-probabilities."""

    def __init__(self, tokenizer, tools, sample):
        self.tokenizer, self.tools, self.sample, self.ids = tokenizer, tools, sample, []

    def encoded(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def begin(self, messages):
        text = self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=False, add_generation_prompt=True
        )
        self.ids = self.encoded(text)
        return list(self.ids)

    async def turn(self, room):
        ids, logprobs = await self.sample(self.ids, min(room, 80))
        self.ids += ids
        text = self.tokenizer.decode(ids).removesuffix(END)
        message = {"role": "assistant", "content": text}
        found = re.fullmatch(r"<tool_call>(.*)</tool_call>", text, re.S)
        try:
            call = json.loads(found[1]) if found else None
        except ValueError:
            call = None  # the driver marks the turn as a malformed call
        if isinstance(call, dict):
            message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        return StudentTurn(ids, message, logprobs, cut=ids[-1] != self.tokenizer.eos_token_id)

    async def hear(self, messages):
        heard = "".join(f"<|im_start|>tool\n{one['content']}{END}\n" for one in messages)
        ids = self.encoded(f"\n{heard}<|im_start|>assistant\n")
        self.ids += ids
        return Heard(ids)


class Generator(Actor):
    """Samples turns of the policy."""

    def __init__(self, script):
        torch.set_num_threads(1)  # the actors share the cores
        self.tokenizer, self.model = tokenizer_of(script), Model(script)()

    @endpoint
    async def load(self, weights):
        self.model.load_state_dict(weights, strict=False)  # the head is the embedding

    @endpoint
    async def sample(self, prompt, room):
        ids, logprobs, cache = list(prompt), [], None
        with torch.inference_mode():
            while len(logprobs) < room and (not logprobs or ids[-1] != self.tokenizer.eos_token_id):
                new = ids if cache is None else ids[-1:]
                out = self.model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
                cache, found = out.past_key_values, out.logits[0, -1].log_softmax(-1)
                ids.append(int(torch.multinomial(found.exp(), 1)))
                logprobs.append(float(found[ids[-1]]))
        return ids[len(prompt) :], logprobs


class EnvironmentClient(Actor):
    """Plays episodes on the server, many side by side."""

    def __init__(self, url, script):
        self.environment, self.connect = served_environment(url, script.env), Connect(url, (), 60.0, 2)
        self.tools = [schema_of(tool) for tool in self.environment.tools.values()]
        self.tokenizer, self.script = tokenizer_of(script), script

    @concurrent_endpoint
    async def play(self, generator, group):
        """Play an episode with the policy."""
        return await self.played(lambda ids, room: awaited(generator.sample.call_one(ids, room)), group)

    @concurrent_endpoint
    async def show(self, calls):
        """Play an episode with scripted calls."""
        turns = iter([self.tokenizer.encode(call_text(call) + END, add_special_tokens=False) for call in calls])

        async def sample(ids, room):
            turn = next(turns)
            return turn, [0.0] * len(turn)

        return await self.played(sample, "shown")

    async def played(self, sample, group):
        runner = AwaitedRunner(self.environment, self.connect.connected, call_s=60.0, episode_s=120.0)
        runner.labels = episode_labels(run="monarch", step=None, group=group)
        try:
            student = Student(self.tokenizer, self.tools, sample)
            said = await converse(student, runner, PROMPT, self.script.task, limits=LIMITS)
        finally:
            await runner.close()
        return said, runner.record.to_json()


class Judge(Actor):
    """Scores an episode when it is over: each failing turn costs a tenth."""

    @concurrent_endpoint
    async def score(self, record, port):
        failing = sum(call["marker"] is not None for call in record["played"])
        last = max([call["t"] for call in record["played"] if call["t"] is not None], default=0)
        port.send(LateScore(record["eid"], last, -0.1 * failing, "judge", f"judge:{record['eid']}"))


class Trainer(Actor):
    """Trains the policy. What waits for other actors runs in a thread, since their answers need this one's loop."""

    def __init__(self, url, script, directory):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.url, self.script, self.directory = url, script, directory
        self.tokenizer, self.model = tokenizer_of(script), Model(script)()

    @endpoint
    async def start(self):
        """Start the teachers, and return the port of late scores."""
        return await asyncio.to_thread(self._start)

    def _start(self):
        self.environment = served_environment(self.url, self.script.env)
        self.connect = Connect(self.url, (), 60.0, 2)
        tools = list(self.environment.tools.values())
        described = [{"name": one.name, "description": one.description, "parameters": one.parameters} for one in tools]
        self.replay = ReplayTeachers(Votes(self.script), actors=2, deadline_s=60.0)
        self.pool = TeacherPool(
            self.replay.teachers,
            Prompter(described, self.environment.agent_text),
            budget=Budget(tokens=100_000, processes=1),
            episodes=Episodes(self.url),
        )
        pairs = TeacherPairs(self.pool, Path(self.directory) / "pairs.jsonl", wait_s=60.0)
        settings = ChannelSettings(teacher="live", top_k=32, tail=True)
        self.channels = channels_for(settings, student=self.model, pairs=pairs)
        self.teacher = SDPOTeacher(Model(self.script), self.channels, rate=0.05)
        self.reference = reference_name("policy when asked", self.model.config, self.tokenizer)
        self.driver = driver_for(
            settings,
            tokenizer=self.tokenizer,
            end_ids=[self.tokenizer.eos_token_id],
            tools=[schema_of(tool) for tool in tools],
            pairs=pairs,
            reference=self.reference,
        )
        self.losses = ChannelLosses(
            self.channels.distillation, self.channels.preferences, self.driver.metrics, processes=1, pad_id=0
        )
        self.rewards = DelayedRewards(self.url)
        return self.rewards.port

    @endpoint
    async def weights(self):
        return {name: one.detach() for name, one in self.model.named_parameters()}

    @endpoint
    async def learn(self, shown, steps):
        """Learn the shown conversations by heart, and have the teacher of channel 2 begin there."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.0)
        ids, sampled, _ = self.padded([said for said, _ in shown])
        for _ in range(steps):
            loss = -(self.logprobs(self.model(input_ids=ids).logits, ids) * sampled).sum() / sampled.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)
        await asyncio.to_thread(self.teacher.update, self.model)
        return float(loss.detach())

    @endpoint
    async def step(self, played):
        return await asyncio.to_thread(self._step, [one for one in played if one[0].reward is not None])

    def _step(self, played):
        """Make a step on the episodes that were not lost, and return what it was made of."""
        said = [one for one, _ in played]
        episodes = [
            RecordedEpisode(EpisodeRecord.from_json(record, self.environment), self.connect) for _, record in played
        ]
        transcripts = Transcripts(
            [one.prompt for one in said],
            [one.prompt_ids for one in said],
            [one.completion_ids for one in said],
            [one.mask for one in said],
            [one.messages for one in said],
            [one.logprobs for one in said],
        )
        rollouts = self.driver.rollouts(transcripts, episodes)
        self.driver.ask(rollouts, episodes, transcripts)  # the teachers of channel 3 vote meanwhile
        items, lists = self.teacher.lists(self.driver.items(rollouts, episodes, sample=lambda contexts: []))
        late = self.rewards.collect([one.eid for one in rollouts], source="judge", deadline_s=60.0)
        pairs = self.driver.pairs(
            4, rollouts, lambda new: self.channels.referred(new, self.reference, self.model) if new else []
        )
        ids, sampled, _ = self.padded(said)
        inputs = {
            LAYOUT: PaddedRows(),
            ITEMS: items,
            LISTS: lists,
            PAIRS: pairs,
            OWN: [rejected_here(of_row, one, trained=True) for of_row, one in zip(pairs, rollouts, strict=True)],
        }
        counts = {
            SDPO: torch.tensor(float(sum(len(item.target_ids) for row in items for item in row))),
            DPO: torch.tensor(float(sum(map(len, pairs)))),
        }
        with self.losses.capturing(self.model, inputs, alpha=0.1, beta=0.05) as states:
            logits = self.model(input_ids=ids).logits
        grpo = -(self.advantages(rollouts, late)[:, None] * self.logprobs(logits, ids) * sampled).sum() / sampled.sum()
        loss, parts, _ = self.losses.total(grpo, self.model, self.model, inputs, states, counts, alpha=0.1, beta=0.05)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.teacher.update(self.model)
        scored = [value for value in late.values() if value is not None]
        return {
            "rollouts": len(rollouts),
            "reward": sum(one.reward for one in rollouts) / len(rollouts),
            "late scores": len(scored),
            "sites": sum(map(len, items)),
            "pairs": sum(map(len, pairs)),
            **{name: float(value) for name, value in parts.items()},
        }

    @endpoint
    async def finish(self):
        """Stop the teachers, and return their counts."""

        def stop():
            found = self.pool.metrics() | self.replay.metrics() | self.teacher.metrics() | self.rewards.metrics()
            self.pool.close()
            for one in (self.replay, self.teacher, self.rewards):
                one.close()
            return found

        return await asyncio.to_thread(stop)

    @staticmethod
    def advantages(rollouts, late):
        """Return reward and late score minus the mean; 0 for an episode whose score did not come."""
        values = torch.tensor(
            [float("nan") if late[one.eid] is None else one.reward + late[one.eid] for one in rollouts]
        )
        return (values - values.nanmean()).nan_to_num()

    @staticmethod
    def padded(said):
        """Return token ids ``[B, T]``, padded on the right, and 1.0 for each token after the first that was sampled."""
        rows = [one.prompt_ids + one.completion_ids for one in said]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        masks = [[0] * len(one.prompt_ids) + one.mask for one in said]
        return ids, torch.tensor([mask[1:] + [0] * (width - len(mask)) for mask in masks]).float(), rows

    @staticmethod
    def logprobs(logits, ids):
        """Return the log-probability of each token after the first, ``[B, T - 1]``."""
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


async def awaited(future):
    """Return the result of one of Monarch's futures."""
    return await future


async def train(url, script=TERMINAL, *, steps=3, group=6, shown=150):
    """Train for a few steps, print each, and return what all were made of and the teachers' counts."""
    host = this_host()
    with tempfile.TemporaryDirectory() as directory:
        trainer = host.spawn_procs({"one": 1}, name="trainer").spawn("trainer", Trainer, url, script, directory)
        generator = host.spawn_procs({"one": 1}, name="generator").spawn("generator", Generator, script)
        players = host.spawn_procs({"one": 1}, name="players")
        client, judge = players.spawn("client", EnvironmentClient, url, script), players.spawn("judge", Judge)
        port = await trainer.start.call_one()
        ways = [(script.bad, script.good, script.last), (script.good, script.last)]
        learnt = [await client.show.call_one(calls) for calls in ways]
        print(f"the policy has learnt to speak: {await trainer.learn.call_one(learnt, shown):.3f} nats a token")
        made = []
        for step in range(steps):
            await generator.load.call_one(await trainer.weights.call_one())
            plays = [awaited(client.play.call_one(generator, f"group-{step}")) for _ in range(group)]
            played = await asyncio.gather(*plays)
            for said, record in played:
                if said.reward is not None:
                    judge.score.broadcast(record, port)
            made.append(await trainer.step.call_one(played))
            print(step, {name: round(value, 4) for name, value in made[-1].items()}, flush=True)
        counts = await trainer.finish.call_one()
        print({name: value for name, value in counts.items() if value})
    return made, counts


def main(arguments):
    """Train on the server at a URL."""
    asyncio.run(train(*arguments))


if __name__ == "__main__":
    if "--help" in sys.argv or len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
