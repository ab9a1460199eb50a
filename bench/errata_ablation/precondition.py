"""Measures whether hints help in the family `boxes`: the same policy plays with the hint before its turn, and without.

If the reward is no higher with the hint, channel 2 has nothing to teach and an ablation shows nothing about it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from trl.chat_template_utils import parse_response

from errata_protocol.errors import ServiceError
from errata_trainer.assembly.counterfactual import calls_of
from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.hints import FailedTurn, HintRenderer, TemplateHinter
from errata_trainer.rollouts.rollout import Call, Rollout, Turn

from .boxes import KEYS, Boxes
from .controlled import BoxesSubject
from .statistics import interval

THREADS = 8


@dataclass(frozen=True, slots=True)
class Precondition:
    """The taught policy's reward before any training.

    Attributes:
        plain: Mean reward without a hint.
        hinted: Mean reward with the hint about a wrong key before the turn.
        difference: The second minus the first.
        half: Half the width of the difference's 95 % interval, Student's t over tasks, paired.
        tasks: Number of tasks.
        samples: Episodes of each task, with and without a hint.
    """

    plain: float
    hinted: float
    difference: float
    half: float
    tasks: int
    samples: int


def precondition(subject: BoxesSubject, *, samples: int = 8, seed: int = 0) -> Precondition:
    """Measure the precondition in the real environment.

    Args:
        subject: Policy and tasks.
        samples: Episodes of each task, with and without a hint.
        seed: Seed of sampling and of the wrong keys.

    Raises:
        ServiceError: The machine lost an episode.
    """
    made = subject.trained(seed)
    factory, tokenizer, model = made["environment_factory"], subject.tokenizer, made["model"].eval()
    hinter, renderer = TemplateHinter(), HintRenderer(tokenizer, tool_name="run")
    runners = [factory()._runner for _ in range(THREADS)]
    chance = random.Random(seed)
    contexts: list[tuple[str, list[int]]] = []
    for row in subject.family.rows():
        task = {"task_id": row["task_id"]}
        message = {"role": "user", "content": runners[0].reset(task)}
        prompt = tokenizer.apply_chat_template(
            [message], tools=[_described("run")], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        header = list(renderer.header_ids)
        for _ in range(samples):
            hint = met(runners[0], task, wrong_key(subject.family, row["box"], chance), hinter)
            contexts.append((row["task_id"], prompt))
            told = prompt[: len(prompt) - len(header)] + list(renderer.hint_ids(hint, after="user")) + header
            contexts.append((row["task_id"], told))
    said = _sampled(model, tokenizer, [context for _, context in contexts], seed)
    rewards = _played(runners, [name for name, _ in contexts], tokenizer, [context for _, context in contexts], said)
    for runner in runners:
        runner.close()
    plain, hinted = [], []
    for name in dict.fromkeys(name for name, _ in contexts):
        own = [reward for (one, _), reward in zip(contexts, rewards, strict=True) if one == name]
        plain.append(sum(own[0::2]) / samples)
        hinted.append(sum(own[1::2]) / samples)
    found = interval([with_it - without for with_it, without in zip(hinted, plain, strict=True)])
    return Precondition(
        sum(plain) / len(plain), sum(hinted) / len(hinted), found.mean, found.half, found.count, samples
    )


def _described(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def wrong_key(family: Boxes, box: str, chance: random.Random) -> str:
    """Return a key that does not fit."""
    return chance.choice([key for key in KEYS[: family.keys] if key != family.answers[box]])


def met(runner: EpisodeRunner, task: dict[str, Any], key: str, hinter: TemplateHinter) -> str:
    """Run the command with a wrong key, and return the hint for the environment's marker."""
    runner.reset(task)
    runner.call("run", {"command": Boxes.command(key)})
    if runner.lost is not None:
        raise ServiceError(f"an episode was lost: {runner.lost}")
    made = runner.played[-1]
    call = Call(made.tool, made.arguments, made.t, made.marker)
    turn = Turn(0, 0, 0, (call,))
    hint = hinter.hint(
        FailedTurn(Rollout((), (), (), (turn,), environment="terminal", task=task), turn, call, made.observation)
    )
    if hint is None:
        raise ServiceError(f"the environment marked {made.arguments} with nothing that a template knows: {made.text!r}")
    return hint.text


def _sampled(model: Any, tokenizer: Any, contexts: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
    """Return one turn for each context, sampled at temperature 1."""
    said: list[list[int]] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for length in sorted({len(context) for context in contexts}):  # without padding
            rows = [list(context) for context in contexts if len(context) == length]
            ids = torch.tensor(rows)
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
                max_new_tokens=48, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
            said += [[one for one in row if one != tokenizer.pad_token_id] for row in made[:, length:].tolist()]
    order = sorted(range(len(contexts)), key=lambda n: len(contexts[n]))
    found: list[list[int]] = [[] for _ in contexts]
    for place, ids_said in zip(order, said, strict=True):
        found[place] = ids_said
    return found


def _played(
    runners: list[EpisodeRunner],
    tasks: Sequence[str],
    tokenizer: Any,
    contexts: Sequence[Sequence[int]],
    said: Sequence[Sequence[int]],
) -> list[float]:
    """Return the reward of each turn as the first and only one of an episode."""

    def play(runner: EpisodeRunner, places: Sequence[int]) -> list[tuple[int, float]]:
        found = []
        for place in places:
            runner.reset({"task_id": tasks[place]})
            reward = play_turn(runner, tokenizer, contexts[place], said[place])
            if reward is None:
                raise ServiceError(f"an episode was lost: {runner.lost}")
            found.append((place, reward))
        return found

    with ThreadPoolExecutor(len(runners), "errata-precondition") as threads:
        shares = [range(n, len(tasks), len(runners)) for n in range(len(runners))]
        rewards = dict(pair for share in threads.map(play, runners, shares) for pair in share)
    return [rewards[place] for place in range(len(tasks))]


def play_turn(runner: EpisodeRunner, tokenizer: Any, prefix: Sequence[int], ids: Sequence[int]) -> float | None:
    """Make the calls of a sampled turn in a running episode, end it, and return its reward; None if it was lost."""
    for name, arguments in calls_of(parse_response(tokenizer, list(ids), prefix=list(prefix))):
        if name in runner.environment.tools:
            try:
                runner.call(name, arguments)
            except TypeError:
                continue  # its marker is kept with the runner
    return runner.finish()
