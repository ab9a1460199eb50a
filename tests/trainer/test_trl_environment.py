"""TRL's own trainer on our environments: real server, socket, tool loop, masks, rewards, loss and optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from scripted import Scripted, call, config
from transformers.utils import get_json_schema
from trl import GRPOTrainer

from errata_protocol.errors import InvalidRequest
from errata_server.process import ServerProcess
from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.episodes.tools import PlayedEnvironment, of_spec
from errata_trainer.recipes.trl import ParallelTools, environment_factory
from errata_trainer.tiny import tiny_model, tiny_tokenizer
from terminal_env import SPEC as TERMINAL
from tests.environments.shelf import SPEC, TOGETHER

pytestmark = pytest.mark.training

SHELF = of_spec(SPEC)
PROMPT = [{"role": "user", "content": "Find it. "}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer([call("read", path="green"), "the word is owl no file", str(SHELF.tools["read"].parameters)])


class ScriptedTrainer(Scripted, GRPOTrainer):  # type: ignore[misc]
    pass


class ParallelTrainer(Scripted, ParallelTools, GRPOTrainer):  # type: ignore[misc]
    pass


def made(cls: Any, tokenizer: Any, url: str, script: Any, path: Path, rows: Any = None, **changes: Any) -> Any:
    data = Dataset.from_list(rows or [{"prompt": PROMPT, "place": "red", "word": "owl"}])
    trainer = cls(
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        args=config(path, **changes),
        train_dataset=data,
        environment_factory=environment_factory(url, SHELF),
    )
    trainer.script = script
    return trainer


def test_the_student_is_told_of_the_tools_as_the_environment_publishes_them() -> None:
    told = environment_factory("http://127.0.0.1:9", "terminal")
    for name, tool in ((t["name"], t) for t in TERMINAL.tools):
        schema = get_json_schema(getattr(told, name))["function"]
        assert schema["name"] == name and schema["description"] == tool["description"]
        properties = tool["parameters"]["properties"]
        assert set(schema["parameters"]["properties"]) == set(properties)
        assert schema["parameters"].get("required", []) == tool["parameters"]["required"]
        for argument, said in schema["parameters"]["properties"].items():
            assert said["type"] == properties[argument]["type"]
            assert said["description"] == properties[argument]["description"]


def test_a_server_that_is_not_there_is_told_before_anything_is_generated() -> None:
    with pytest.raises(ConnectionError):
        environment_factory("http://127.0.0.1:9", SHELF)()


def test_another_environment_behind_the_url_is_told_by_name(server: ServerProcess) -> None:
    other = PlayedEnvironment("terminal", SHELF.tools)
    with pytest.raises(InvalidRequest, match=r"'shelf' there, not 'terminal'"):
        environment_factory(server.url, other)()
    with pytest.raises(InvalidRequest, match="no tool 'write'"):
        environment_factory(server.url, SHELF, tools=["write"])


SCRIPTS: dict[int, list[str]] = {
    0: [call("read", path="green"), call("read", path="red"), call("submit", word="owl"), "done"],
    1: [call("read", path="red") + call("submit", word="elk"), call("submit", word="owl"), "done"],
    2: [call("read", file="red"), call("open", path="red"), call("read", path=3), "I give up"],
    3: [call("read", path="blue"), call("submit", word="owl"), "done"],
}


def script(row: int, turn: int) -> str:
    return SCRIPTS[row][turn]


def test_rewards_and_transcripts_are_the_environments(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    trainer = made(ScriptedTrainer, tokenizer, server.url, script, tmp_path, log_completions=False)
    trainer.train()
    rewards = trainer._logs["rewards"]["ShelfEnvironment"]
    assert list(rewards) == [1.0, 0.0, 0.0, 1.0], "the third was graded by the closing tool"
    contents = [[m["content"] for m in messages if m["role"] == "tool"] for messages in trainer._logs["completion"]]
    assert contents[0] == ["no file green", "the word is owl", "right"]
    assert contents[1] == ["the word is owl", "wrong", "[the episode is over]"]
    assert contents[2] == [
        str({"error": "read() has no argument 'file': it takes path"}),
        str({"error": "Tool open not found."}),
        str({"error": "read(): path has to be of type string, got 3"}),
    ]
    played = [environment._runner.played for environment in trainer.environments]
    assert [[p.t for p in calls] for calls in played] == [[1, 2, 3], [1, 2, None], [None, None, 1], [1, 2]]
    assert [p.marker.error_kind if p.marker else None for p in played[0]] == ["path_not_found", None, None]
    assert [p.marker.error_kind if p.marker else None for p in played[2]] == [
        "invalid_arguments",
        "invalid_arguments",
        None,
    ]


def test_the_parallel_loop_makes_the_same_transcripts(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    found = []
    for cls in (ScriptedTrainer, ParallelTrainer):
        trainer = made(cls, tokenizer, server.url, script, tmp_path)
        trainer.train()
        found.append((list(trainer._logs["completion"]), dict(trainer._logs["rewards"]), trainer.state.log_history[0]))
    assert found[0][:2] == found[1][:2]
    timed = ("train_runtime", "step_time", "profiling")
    logged = [{k: v for k, v in log.items() if not k.startswith(timed)} for _, _, log in found]
    assert logged[0] == logged[1]


def test_tools_of_different_rollouts_run_side_by_side(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    def together(row: int, turn: int) -> str:
        return call("read", path="together") if turn == 0 else "done"

    trainer = made(
        ParallelTrainer, tokenizer, server.url, together, tmp_path,
        per_device_train_batch_size=TOGETHER, num_generations=TOGETHER,
    )  # fmt: skip
    trainer.train()  # one after the other they would wait for ever
    assert trainer.state.log_history[0]["tools/call_frequency"] == 1


def test_what_was_too_long_is_not_played_twice(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    def long(row: int, turn: int) -> str:
        return call("read", path="green" * 60 if (row, turn) == (1, 1) else "green") if turn < 4 else "done"

    played = []
    for cls in (ScriptedTrainer, ParallelTrainer):
        trainer = made(cls, tokenizer, server.url, long, tmp_path, max_completion_length=160)
        trainer.train()
        played.append([[p.arguments for p in e._runner.played if p.tool == "read"] for e in trainer.environments])
        kept = [sum(m["role"] == "tool" for m in messages) for messages in trainer._logs["completion"]]
        assert kept[1] < len(played[-1][1]), "its result was rolled back after the call was made"
    assert played[0] == played[1]


def test_a_row_that_is_no_task_is_told_with_what_to_do() -> None:
    class Refusing:
        def reset(self, **task: Any) -> Any:
            raise InvalidRequest("reset takes seed, task_id, not answer")

    made: Any = environment_factory("http://127.0.0.1:9", SHELF)
    environment = made.__new__(made)
    environment._runner, environment._begun = EpisodeRunner(SHELF, Refusing), None
    with pytest.raises(InvalidRequest, match=r"not answer; name the columns .*task_columns="):
        environment.reset(prompt=PROMPT, answer="owl")
