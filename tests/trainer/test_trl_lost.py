"""What the machine does wrong never becomes a reward, an advantage or a gradient."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from scripted import Scripted, call, config

from errata_client import Episodes
from errata_protocol.episode_lists import EpisodeFilter
from errata_protocol.errors import ServiceError
from errata_protocol.replay import EpisodeSummary
from errata_server.process import ServerProcess
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.trl import ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.recipes.trl.trainer import LOST_BATCHES
from errata_trainer.tiny import tiny_model, tiny_tokenizer
from tests.environments.shelf import SPEC

pytestmark = pytest.mark.training

SHELF = of_spec(SPEC)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer([call("read", path="green"), "the word is owl no file"])


class Trainer(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    """Keeps its batches."""

    batch: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.batch = super()._generate_and_score_completions(inputs)
        return self.batch


def made(tokenizer: Any, url: str, script: Any, path: Path, **changes: Any) -> Trainer:
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "Find it. "}], "place": "red", "word": "owl"}])
    reward_funcs = changes.pop("reward_funcs", None)
    model = tiny_model(tokenizer)
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    model.config._name_or_path = str(path / "model")  # where TRL loads the reference from
    trainer = Trainer(
        model=model,
        processing_class=tokenizer,
        args=config(path, **changes),
        train_dataset=data,
        environment_factory=environment_factory(url, SHELF, message_timeout_s=20.0),
        reward_funcs=reward_funcs,
    )
    trainer.script = script
    return trainer


RIGHT = [call("submit", word="owl"), "done"]
WRONG = [call("submit", word="elk"), "done"]
BROKEN = [call("read", path="broken"), "hm", "hm"]


def told(*rows: list[str]) -> Any:
    return lambda row, turn: rows[row % len(rows)][turn]


def test_a_lost_episode_has_no_reward_no_advantage_and_no_token(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    def lengths(completions: Any, **_: Any) -> list[float]:
        return [100.0 * len(messages) for messages in completions]

    trainer = made(tokenizer, server.url, told(RIGHT, WRONG, BROKEN, WRONG), tmp_path, reward_funcs=lengths, beta=0.1)
    trainer.train()
    advantages = trainer._logs["advantages"]
    assert advantages[2] == 0.0 and advantages[0] > 0 > advantages[1] == advantages[3]
    batch = trainer.batch
    tokens = (batch["completion_mask"] * batch["tool_mask"]).sum(1)
    # Rows are shuffled afterwards, not here.
    assert tokens[2] == 0 and (tokens[[0, 1, 3]] > 0).all()
    assert batch["num_items_in_batch"] == tokens.sum()
    log = trainer.state.log_history[0]
    assert log["episodes/lost"] == 0.25 and log["reward"] == pytest.approx((301.0 + 300.0 + 300.0) / 3)


@pytest.mark.parametrize("left_in", [False, True])
def test_a_lost_episode_moves_nothing(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_in: bool
) -> None:
    trainer = made(tokenizer, server.url, told(BROKEN), tmp_path, beta=0.1, weight_decay=0.0)
    if left_in:
        monkeypatch.setattr(trainer, "_leave_out_lost", lambda batch, runners: None)
    with torch.no_grad():
        for parameter in trainer.model.parameters():  # away from the reference, or its KL term has no gradient
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    same = all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert same is not left_in, "by its KL term it would move the policy"


def test_a_server_that_stays_away_ends_the_training_and_is_named(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = made(tokenizer, server.url, told(BROKEN), tmp_path, max_steps=10)
    with pytest.raises(ServiceError, match=r"3 batches in a row was lost.*shelf fell"):
        trainer.train()


def test_the_end_of_the_training_quotes_the_last_of_the_lost_episodes() -> None:
    runners: Any = [SimpleNamespace(lost="SessionLost: first"), SimpleNamespace(lost="SessionLost: last")]
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)}, _lost_batches=LOST_BATCHES - 1
    )
    with pytest.raises(ServiceError, match="the last one by SessionLost: last:"):
        ThreeChannelGRPOTrainer._leave_out_lost(trainer, {}, runners)


def test_training_goes_on_over_a_server_that_was_killed_and_started_again(tokenizer: Any, tmp_path: Path) -> None:
    served = ServerProcess("tests.environments.shelf:SPEC", tmp_path / "data")
    killed = []

    def script(row: int, turn: int) -> str:
        if turn == 1 and row == 0 and not killed:
            served.kill()
            killed.append(ServerProcess("tests.environments.shelf:SPEC", tmp_path / "data", "--port", port))
        return [call("read", path="green"), call("read", path="red"), call("submit", word="owl"), "done"][turn]

    port = served.url.rsplit(":", 1)[1]
    try:
        trainer = made(tokenizer, served.url, script, tmp_path, max_steps=2)
        trainer.train()
        assert killed, "it was killed between the first and the second step of the first batch"
        assert [log["reward"] for log in trainer.state.log_history if "reward" in log] == [1.0, 1.0]
        assert [log["episodes/lost"] for log in trainer.state.log_history if "reward" in log] == [0.0, 0.0]
        assert [[p.t for p in e._runner.played] for e in trainer.environments] == [[1, 2, 3]] * 4
    finally:
        for server in (served, *killed):
            server.stop()


@pytest.mark.parametrize("threads", [1, 8])
def test_the_episodes_of_a_run_are_labelled_by_run_step_and_prompt(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, threads: int
) -> None:
    trainer = made(tokenizer, server.url, told(RIGHT, WRONG), tmp_path, run_name=f"run-{threads}")
    trainer.tool_threads = threads
    trainer.train()
    listed = asyncio.run(labelled(server.url, f"run-{threads}"))
    assert {one.step for one in listed} == set(range(trainer.state.global_step))
    groups = Counter(one.group for one in listed)
    assert set(groups.values()) == {trainer.num_generations}
    assert len(groups) * trainer.num_generations == len(listed)
    assert all((one.group or "").startswith(f"{one.step}-train-") for one in listed)


async def labelled(url: str, run: str) -> list[EpisodeSummary]:
    async with Episodes(url) as episodes:
        return (await episodes.episodes(limit=500, wanted=EpisodeFilter(run=run))).episodes
