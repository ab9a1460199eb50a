"""TRL's trainer plays at a server of several workers, of which one is killed in the middle of a batch."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from datasets import Dataset
from scripted import Scripted, call, config

from errata_protocol.shards import shard_of
from errata_server.process import ServerProcess
from errata_server.runtime.shard_dirs import shards
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.trl import ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.tiny import tiny_model, tiny_tokenizer
from tests.environments.shelf import SPEC
from tests.server.worker_processes import worker_of

pytestmark = pytest.mark.training

WORKERS, GROUPS, SIZE, STEPS = 2, 2, 4, 2
TURNS = [call("read", path="green"), call("read", path="red"), call("submit", word="owl"), "done"]


class Trainer(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    pass


def test_a_killed_worker_costs_a_batch_nothing_and_groups_are_at_one_worker(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer([*TURNS, "the word is owl no file"])
    data = tmp_path / "data"
    killed: list[str] = []
    with ServerProcess("tests.environments.shelf:SPEC", data, "--workers", str(WORKERS), start_s=120) as server:
        row = {"prompt": [{"role": "user", "content": "Find it. "}], "place": "red", "word": "owl"}

        def script(row: int, turn: int) -> str:
            if turn == 1 and row == 0 and not killed:
                killed.append(str(shard_of(str(trainer.environments[0]._runner.eid))))
                names = [(one / "shard").read_text().strip() for one in shards(data, WORKERS)]
                os.kill(worker_of(shards(data, WORKERS)[names.index(killed[0])]), signal.SIGKILL)
            return TURNS[turn]

        trainer = Trainer(
            model=tiny_model(tokenizer),
            processing_class=tokenizer,
            args=config(tmp_path, max_steps=STEPS, num_generations=SIZE, per_device_train_batch_size=GROUPS * SIZE),
            train_dataset=Dataset.from_list([row] * GROUPS * STEPS),
            environment_factory=environment_factory(server.url, of_spec(SPEC)),
        )
        trainer.script = script
        trainer.train()
        assert killed, "it was killed between the first and the second step of the first batch"
        logged: list[dict[str, Any]] = [log for log in trainer.state.log_history if "reward" in log]
        assert [(log["reward"], log["episodes/lost"]) for log in logged] == [(1.0, 0.0)] * STEPS
        runners = [environment._runner for environment in trainer.environments]
        assert [[played.t for played in runner.played] for runner in runners] == [[1, 2, 3]] * GROUPS * SIZE
        answer = httpx.get(f"{server.url}/episodes", params={"limit": 100}, timeout=60).json()
        listed = [one for one in answer["episodes"] if one["group"]]
        assert Counter(one["deliveries"] for one in listed) == {4: GROUPS * SIZE * STEPS}, "none is lost or doubled"
        groups = Counter((one["group"], shard_of(one["eid"])) for one in listed)
        assert list(groups.values()) == [SIZE] * GROUPS * STEPS, groups
        assert "ended with status -9" in "".join(server.log)
