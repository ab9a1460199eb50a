"""What `openenv init` writes, untouched, trains with TRL: no package of it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from scripted import Scripted, call, config

from errata_client import Episodes
from errata_client.sync import run_blocking
from errata_protocol.errors import CapacityReached
from errata_server.process import ServerProcess
from errata_trainer.recipes.trl import ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.training


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `openenv init my_env` makes it."""
    made = tmp_path_factory.mktemp("init")
    command = [sys.executable, "-m", "openenv.cli", "init", "my_env", "--output-dir", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    return made / "my_env"


class Trainer(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    pass


SAID = [[call("step", message="hello"), "done"], ["I do nothing."], [call("step", text="hi"), "done"], ["Nor do I."]]


def trained(url: str, path: Path) -> Trainer:
    """Train for two steps; a student calls the tool once, another with a wrong argument, and two call nothing."""
    prompt = [{"role": "user", "content": "Say something long. "}]
    told = "Action for the My Env environment echoed_message My Env environment ready! message_length"
    tokenizer = tiny_tokenizer([*(turn for turns in SAID for turn in turns), told])
    trainer = Trainer(
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        args=config(path, max_steps=2, log_completions=True),
        train_dataset=Dataset.from_list([{"prompt": prompt}]),
        environment_factory=environment_factory(url, "my_env"),
    )
    trainer.script = lambda row, turn: SAID[row][turn]
    trainer.train()
    return trainer


def test_the_scaffold_trains_two_steps_as_it_is(scaffold: Path, tmp_path: Path) -> None:
    with ServerProcess(str(scaffold), tmp_path / "data", "--max-sessions", "8") as server:
        trainer = trained(server.url, tmp_path)
        assert [tool.__name__ for tool in trainer.tools] == ["step"]
        assert list(trainer._logs["rewards"]["MyEnvEnvironment"])[-4:] == [0.5, 0.0, 0.0, 0.0]
        advantages = list(trainer._logs["advantages"])[-4:]
        assert advantages[0] > 0 > advantages[1] == advantages[3], "who does nothing is in the group"
        eids = list(trainer._logs["extra"]["eid"])[-4:]
        detail: Any = run_blocking(Episodes(server.url).episode(eids[0]))
        assert (detail.environment, detail.reward, len(detail.turns)) == ("my_env", 0.5, 2)
        assert len(set(eids)) == 4 and trainer.state.global_step == 2


def test_a_scaffold_that_takes_one_session_says_which_option_is_missing(scaffold: Path, tmp_path: Path) -> None:
    told = pytest.raises(CapacityReached, match=r"rollout of my_env.*--max-sessions N")
    with ServerProcess(str(scaffold), tmp_path / "data") as server, told:
        trained(server.url, tmp_path)
