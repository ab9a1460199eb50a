"""The whole way on one machine: a bug in a repository, a failing turn, its marker and hint, a fork, votes, one step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, call, config

from errata_client import Episodes
from errata_trainer.assembly.counterfactual import CounterfactualCheck
from errata_trainer.recipes.trl import (
    ChannelSettings,
    TeacherPairs,
    ThreeChannelGRPOTrainer,
    dataset,
    environment_factory,
)
from errata_trainer.teachers import FakeTeacher, Prompter, TeacherPool, says
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer
from swe_bench_lite_env import SPEC
from swe_bench_lite_env.server import offered
from tests.envs.swe.served import serving
from tests.envs.swe.sessions import NAME, instance

pytestmark = pytest.mark.sandbox

WRONG = call("run", command="cat src/no_such_module.py")
RIGHT = call("run", command="ls")
STARTS = {"better": [RIGHT, call("submit"), "done"], "worse": [WRONG, call("submit"), "done"]}


class Trainer(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    """Says what the scripts say; behind a hint it looks before it reads."""

    hinted = 0

    def _generate_single_turn(self, contexts: Any, *given: Any, **named: Any) -> Any:
        if self.transcripts is None:
            return super()._generate_single_turn(contexts, *given, **named)
        self.hinted += len(contexts)  # the rollouts are over: the check samples the failing turns again
        tokens = self.processing_class.encode(RIGHT + END, add_special_tokens=False)
        return [tokens for _ in contexts], None


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "store"))
    with serving(tmp_path / "data") as (url, _):
        yield url
    offered._offered.cache_clear()


def test_a_failing_turn_on_a_real_repository_trains_all_three_channels(url: str, tmp_path: Path) -> None:
    rows = dataset(url, "swe_bench_lite", split="bundled").filter(lambda row: row["instance_id"] == NAME)
    rows = rows.select([0] * 4)
    repaired = [call("apply_patch", patch=instance().patch), call("submit"), "done"]
    scripts = [STARTS["worse"], repaired, STARTS["better"], STARTS["worse"]]
    tokenizer = tiny_tokenizer([WRONG, RIGHT, rows[0]["prompt"][0]["content"], instance().patch])
    check = CounterfactualCheck("always", episodes=Episodes(url))
    teachers = [FakeTeacher(says("run", command="ls"), name=name) for name in ("a", "b")]
    teachers.append(FakeTeacher(says("search", pattern="orphans"), name="c"))
    prompter = Prompter(tools=SPEC.tools, agent_text=SPEC.agent_text)
    with TeacherPool(teachers, prompter, episodes=Episodes(url), deadline_s=60.0) as pool:
        pairs = TeacherPairs(pool, tmp_path / "pairs.jsonl", wait_s=60.0)
        trainer = Trainer(
            model=tiny_model(tokenizer),
            processing_class=tokenizer,
            args=config(tmp_path / "out", max_completion_length=4096),
            train_dataset=rows,
            environment_factory=environment_factory(url, "swe_bench_lite"),
            check=check,
            pairs=pairs,
            settings=ChannelSettings(gradient_norms=True),
        )
        trainer.script = lambda row, turn: scripts[row % 4][turn]
        before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log["episodes/lost"] == 0.0 and log["reward"] == pytest.approx(0.25), "one of four repaired it"
    assert log["sdpo/sites"] == 0.5 and "sdpo/divergence/fs.missing" in log, "the marker's key"
    assert trainer.hinted == 2 and check.not_posted == 0 and check.counts == {("fs.missing", "error_gone"): 2}, (
        "asked in forks"
    )
    assert log["dpo/votes/consensus"] == 2.0 and log["dpo/pairs"] == 2.0
    # Posted behind the batch, so perhaps after its log; the pool ends after its posts.
    assert pool.metrics()["teachers/posted"] == 2, "votes are late rewards of their states"
    states = [message for prompt in teachers[0].asked for message in prompt.messages]
    assert any(instance().problem_statement.strip()[:40] in str(message) for message in states), "state(0)'s own text"
    for channel in ("grpo", "sdpo_kl", "trace_replay_dpo"):
        assert log[f"gradient_norm/{channel}"] > 0.0, channel
    total = log["loss/grpo"] + 0.1 * log["loss/sdpo_kl"] + 0.05 * log["loss/trace_replay_dpo"]
    assert log["loss"] == pytest.approx(total, abs=1e-4)
    assert any(not torch.equal(before[name], weight) for name, weight in trainer.model.named_parameters())
