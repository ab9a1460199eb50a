"""Teachers' votes become pairs in the student's own tokens, and pairs become a loss."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from scripted import Scripted, call, config
from trl import GRPOTrainer

from errata_client import Episodes
from errata_protocol.rollouts import ErrorMarker
from errata_server.process import ServerProcess
from errata_trainer import Call, Rollout, Turn
from errata_trainer.assembly.action_tokens import action_ids
from errata_trainer.assembly.batch import Transcripts
from errata_trainer.channels.pairs import StaleReference
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.trl import ChannelSettings, TeacherPairs, ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.teachers import Answer, Budget, FakeTeacher, Prompt, Prompter, RawCall, Spend, TeacherPool
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer
from tests.environments.shelf import SPEC

pytestmark = pytest.mark.training

SHELF = of_spec(SPEC)
RED = RawCall("read", '{"path": "red"}')


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer([call("read", path="green"), "the word is owl no file"])


class Trainer(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        plain = GRPOTrainer.compute_loss(self, model, inputs).detach()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.seen.append({"inputs": inputs, "plain": plain, "loss": loss.detach()})
        return loss


def pool(url: str, *teachers: FakeTeacher) -> TeacherPool:
    prompter = Prompter(tools=SPEC.tools, agent_text=SPEC.agent_text)
    return TeacherPool(teachers, prompter, episodes=Episodes(url), deadline_s=30.0)


def made_trainer(tokenizer: Any, url: str, path: Path, pairs: TeacherPairs, **changes: Any) -> Trainer:
    rows = [{"prompt": [{"role": "user", "content": "Find it. "}], "place": "red", "word": "owl"}] * 4
    settings, beta_replay = changes.pop("settings", None), changes.pop("beta_replay", 1.0)
    return Trainer(
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        args=config(path, **changes),
        train_dataset=Dataset.from_list(rows),
        environment_factory=environment_factory(url, SHELF),
        alpha_sdpo=0.0,
        beta_replay=beta_replay,
        pairs=pairs,
        settings=settings,
    )


def trained(tokenizer: Any, url: str, path: Path, pairs: TeacherPairs, script: Any, **changes: Any) -> Trainer:
    trainer = made_trainer(tokenizer, url, path, pairs, **changes)
    trainer.script = script
    trainer.train()
    return trainer


SCRIPTS = [
    [call("read", path="red"), call("read", path="green"), call("submit", word="owl"), "done"],
    [call("submit", word="owl"), "done"],
    [call("read", path="blue") + call("submit", word="elk"), "done"],
    [call("submit", word="elk"), "done"],
]


def script(row: int, turn: int) -> str:
    return SCRIPTS[row % 4][turn]


@pytest.mark.trl
def test_what_teachers_agree_on_is_chosen_at_the_students_own_state(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    teachers = [FakeTeacher(Answer(calls=(RED,)), name=name) for name in ("a", "b")]
    teachers.append(FakeTeacher(Answer(text="I give up"), name="c"))
    with pool(server.url, *teachers) as asked:
        pairs = TeacherPairs(asked, tmp_path / "pairs.jsonl", wait_s=60.0)
        trainer = trained(tokenizer, server.url, tmp_path, pairs, script)
    (seen,) = trainer.seen
    found = [pair for row in seen["inputs"]["dpo_pairs"] for pair in row]
    said = sorted((tokenizer.decode(p.rejected_ids), tokenizer.decode(p.chosen_ids)) for p in found)
    assert said == [
        (SCRIPTS[2][0] + END, call("read", path="red") + END),
        (SCRIPTS[0][1] + END, call("read", path="red") + END),
    ]
    for pair in found:
        context = tokenizer.decode(pair.context_ids)
        assert context.endswith("<|im_start|>assistant\n") and set(pair.votes) == {"a", "b", "c"}
        assert ("the word is owl" in context) is (pair.t == 1), "the state is the one before the failing call"
    assert float(seen["loss"] - seen["plain"]) == pytest.approx(0.6931, abs=1e-3)
    log = trainer.state.log_history[0]
    assert log["dpo/reused"] == 1.0, "GRPO's own pass has the states of what the students said"
    assert log["dpo/votes/consensus"] == 2.0 and log["dpo/pairs"] == 2.0 and log["dpo/buffer"] == 2.0


@pytest.mark.parametrize("weights", [{}, {"beta_replay": 0.0}], ids=["with pairs", "without pairs"])
def test_consensus_is_an_advantage_of_the_turns_tokens(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, weights: dict[str, float]
) -> None:
    seen = {}
    for weight in (0.0, 0.5):
        teachers = [FakeTeacher(Answer(calls=(RED,)), name=name) for name in ("a", "b")]
        with pool(server.url, *teachers) as asked:
            path = tmp_path / str(weight)
            path.mkdir()
            pairs = TeacherPairs(asked, path / "pairs.jsonl", wait_s=60.0)
            settings = ChannelSettings(prm_weight=weight)
            trainer = trained(tokenizer, server.url, path, pairs, script, settings=settings, **weights)
        (batch,) = trainer.seen
        seen[weight] = batch["inputs"]
    assert ("dpo_pairs" in seen[0.5]) is not bool(weights)
    plain, shaped = seen[0.0]["advantages"], seen[0.5]["advantages"]
    assert plain.dim() == 1 and shaped.shape == seen[0.5]["completion_ids"].shape
    # Rows may come in another order in each run: what was added is the same whatever the row.
    own = shaped.min(1).values - shaped.max(1).values
    assert sorted(own.abs().tolist()) == pytest.approx([0.0, 0.0, 0.5, 0.5]), "two turns failed, and all vote against"
    for row in range(4):
        changed = shaped[row] != shaped[row].max()
        said = tokenizer.decode(seen[0.5]["completion_ids"][row][changed])
        assert said in ("", call("read", path="green") + END, SCRIPTS[2][0] + END)
    log = trainer.state.log_history[0]
    assert log["prm/turns"] == 2.0 and log["prm/score"] == -1.0
    with pool(server.url, FakeTeacher(Answer(calls=(RED,)))) as asked, pytest.raises(ValueError, match="wait_s"):
        trained(
            tokenizer, server.url, tmp_path, TeacherPairs(asked, tmp_path / "x.jsonl"), script,
            settings=ChannelSettings(prm_weight=1.0),
        )  # fmt: skip


def test_teachers_read_what_the_student_read_and_their_votes_are_late_rewards(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    teachers = [FakeTeacher(Answer(calls=(RED,)), name=name) for name in ("a", "b")]
    with pool(server.url, *teachers) as asked:
        pairs = TeacherPairs(asked, tmp_path / "pairs.jsonl", wait_s=60.0)
        trainer = trained(tokenizer, server.url, tmp_path, pairs, script)
    eid = trainer.environments[0]._runner.eid
    prompts = [prompt for prompt in teachers[0].asked if "the word is owl" in json.dumps(prompt.messages)]
    assert len(prompts) == 1 and prompts[0].source == "agent_text"
    assert json.dumps(prompts[0].messages).count("One of red, green, blue") == 1, "the task is told once"
    assert "no file" not in json.dumps(prompts[0].messages), "the error itself comes after the state"
    rewards = environment_factory(server.url, SHELF)._connect()
    try:
        posted = [reward for reward in rewards.rewards(eid) if reward.source == "teachers"]
        assert [(reward.t, reward.value) for reward in posted] == [(1, -1.0)]
    finally:
        rewards.close()


def test_votes_that_are_late_train_a_later_batch_and_nobody_waits(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    def slow(prompt: Prompt) -> Answer:
        return Answer(calls=(RED,))

    teachers = [FakeTeacher(slow, name=name) for name in ("a", "b")]
    with pool(server.url, *teachers) as asked:
        pairs = TeacherPairs(asked, tmp_path / "pairs.jsonl", wait_s=0.0)
        first = trained(tokenizer, server.url, tmp_path, pairs, script)
        end = time.monotonic() + 60
        while not all(batch.done for batch, _ in pairs._waiting) and time.monotonic() < end:
            time.sleep(0.05)
        again = trained(tokenizer, server.url, tmp_path, pairs, script)
        pairs.close()
    assert len(first.seen[0]["inputs"]["dpo_pairs"]) == 4
    assert sum(map(len, again.seen[0]["inputs"]["dpo_pairs"])) >= 2
    kept = TeacherPairs(asked, tmp_path / "pairs.jsonl")
    kept.use(tokenizer, [tokenizer.eos_token_id], first._reference)
    drawn = kept.sample(8, lambda new: list(new))
    kept.close()
    assert drawn and all(pair.ref_chosen is not None for pair in drawn), "pairs outlive the trainer that made them"
    with pytest.raises(StaleReference):
        kept.use(tokenizer, [tokenizer.eos_token_id], "another model")


@pytest.mark.parametrize("template", [None, "qwen2_5_training.jinja", "qwen3_instruct_2507_training.jinja"])
def test_an_action_has_the_tokens_that_the_student_would_say(tokenizer: Any, template: str | None) -> None:
    import trl

    given = {}
    if template is not None:
        given["chat_template"] = (Path(trl.__file__).parent / "chat_templates" / template).read_text()
    functions = [{"type": "function", "function": {"name": "read", "arguments": {"path": 'a "b" ü'}}}]
    message = {"role": "assistant", "content": "", "tool_calls": functions}
    ids = action_ids(tokenizer, message, end_id=tokenizer.eos_token_id, **given)
    before = [{"role": "user", "content": "hello"}]
    context = tokenizer.apply_chat_template(
        before, add_generation_prompt=True, tokenize=True, return_dict=False, **given
    )
    whole = tokenizer.apply_chat_template([*before, message], tokenize=True, return_dict=False, **given)
    assert list(whole[: len(context) + len(ids)]) == [*context, *ids] and ids[-1] == tokenizer.eos_token_id


def test_a_policy_that_needs_scores_gets_them_or_is_refused(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    teachers = [FakeTeacher(Answer(calls=(RED,)), name=name) for name in ("a", "b")]
    with pool(server.url, *teachers) as asked:
        with pytest.raises(ValueError, match="value_gap needs scores"):
            TeacherPairs(asked, tmp_path / "no.jsonl", policy="value_gap")
        blind = TeacherPairs(asked, tmp_path / "blind.jsonl", policy="entropy")
        with pytest.raises(ValueError, match="log-probabilities"):
            trained(tokenizer, server.url, tmp_path, blind, script)
        blind.close()
        pairs = TeacherPairs(
            asked,
            tmp_path / "pairs.jsonl",
            policy="value_gap",
            wait_s=60.0,
            scores=lambda rollouts: [[1.0, *[None] * (len(one.turns) - 1)] for one in rollouts],
        )
        trainer = trained(tokenizer, server.url, tmp_path, pairs, script)
    assert sum(pairs.counts[reason] for reason in ("consensus", "agrees_with_student")) == 4, "each first turn"
    assert trainer.seen


def drawn(trainer: Trainer) -> list[list[Any]]:
    """Return the pairs of each micro-batch, by what is compared: episodes of another run have other ids."""
    return [
        [
            (pair.context_ids, pair.chosen_ids, pair.rejected_ids, pair.votes)
            for row in seen["inputs"]["dpo_pairs"]
            for pair in row
        ]
        for seen in trainer.seen
    ]


@pytest.mark.parametrize("capacity", [20, 1000])
def test_draws_of_a_resumed_run_are_those_of_an_uninterrupted_one(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, capacity: int
) -> None:
    """The killed run has added pairs after its last checkpoint; the buffer's file has them."""

    def run(name: str, buffer: str, *, steps: int, resume: Path | None = None) -> Trainer:
        teachers = [FakeTeacher(lambda prompt: Answer(calls=(RED,)), name=each) for each in ("a", "b")]
        with pool(server.url, *teachers) as asked:
            pairs = TeacherPairs(asked, tmp_path / buffer, wait_s=30.0, policy="all", capacity=capacity, seed=4)
            trainer = made_trainer(
                tokenizer, server.url, tmp_path / name, pairs, max_steps=steps, save_strategy="steps", save_steps=2,
                settings=ChannelSettings(pairs_per_batch=2), learning_rate=1e-2, lr_scheduler_type="constant",
            )  # fmt: skip
            trainer.script = lambda row, turn: script(row + trainer.state.global_step, turn)
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            pairs.close()
        return trainer

    whole = run("whole", "whole.jsonl", steps=6)
    killed = run("killed", "killed.jsonl", steps=5)
    assert drawn(killed) == drawn(whole)[:5]
    again = run("again", "killed.jsonl", steps=6, resume=tmp_path / "killed" / "checkpoint-2")
    assert drawn(again) == drawn(whole)[2:]
    assert len({str(each) for each in drawn(whole)[2:]}) > 1, "or any draw is as good as another"
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)
    elsewhere = run("elsewhere", "new.jsonl", steps=6, resume=tmp_path / "killed" / "checkpoint-2")
    assert drawn(elsewhere) == drawn(whole)[2:], "the checkpoint has the pairs, on another machine too"


def test_questions_in_flight_are_asked_again_after_a_resume(tokenizer: Any, tmp_path: Path) -> None:
    hold = threading.Event()

    def slow(prompt: Prompt) -> Answer:
        hold.wait(60)
        return Answer(calls=(RED,))

    def source(*teachers: FakeTeacher, budget: Budget) -> TeacherPairs:
        made = TeacherPool(teachers, Prompter(tools=SPEC.tools, agent_text=SPEC.agent_text), budget=budget)
        pairs = TeacherPairs(made, tmp_path / "pairs.jsonl", wait_s=30.0)
        pairs.use(tokenizer, [tokenizer.eos_token_id], "test")
        return pairs

    turn = Turn(0, 0, 3, (Call("read", {"path": "blue"}, 1, ErrorMarker(error_kind="x", severity="error")),))
    rollout = Rollout((1, 2), (3, 4, tokenizer.eos_token_id), (1, 1, 1), (turn,))
    transcripts = Transcripts(
        [[{"role": "user", "content": "Find it."}]], [[1, 2]], [[3, 4, 5]], [[1, 1, 1]],
        [[{"role": "assistant", "content": "", "tool_calls": []}]], None,
    )  # fmt: skip
    teachers = [FakeTeacher(slow, name=name) for name in ("a", "b")]
    first = source(*teachers, budget=Budget(usd=10.0))
    first.pool.budget.resume(Spend(2.5, 40))
    first.observe([rollout], [None], transcripts)
    state = json.loads(json.dumps(first.state_dict()))
    first.save_files(tmp_path)
    first.pool.close()
    first.close()
    hold.set()
    second = source(*(FakeTeacher(slow, name=name) for name in ("a", "b")), budget=Budget(usd=10.0))
    second.load_state_dict(state)
    second.load_files(tmp_path)
    assert second.pool.budget.spent == Spend(2.5, 40), "the limit is that of the whole run"
    pairs = second.sample(4, lambda new: [replace(p, ref_chosen=0.0, ref_rejected=0.0, reference="test") for p in new])
    second.pool.close()
    second.close()
    assert len(pairs) == 1 and pairs[0].votes.keys() == {"a", "b"}
