"""examples/mini_swe_agent.py on a server, with a stand-in for mini-swe-agent and, where it is installed, with it."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import terminal_env
from errata_server.process import ServerProcess

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mini_swe_agent.py"
SOLUTION = Path(terminal_env.__file__).parent / "tasks" / "access-report" / "solution" / "solve.sh"
FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done"


class Submitted(Exception):
    """As `minisweagent.exceptions.Submitted`: ends the run with its messages."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = messages
        super().__init__()


class DefaultAgent:
    """The loop of `minisweagent.agents.default.DefaultAgent` 2.4: query, execute each action, until an exit message."""

    def __init__(self, model: Any, env: Any, **config: Any) -> None:
        self.model, self.env, self.config = model, env, config
        self.messages: list[dict[str, Any]] = []

    def run(self, task: str = "", **_: Any) -> dict[str, Any]:
        assert self.env.get_template_vars()["system"] == "Linux" and self.env.serialize()["info"]["errata"]["eid"]
        self.messages = [{"role": "user", "content": task}]
        while True:
            message = self.model.query(self.messages)
            try:
                outputs = [self.env.execute(action) for action in message["extra"]["actions"]]
                self.messages += self.model.format_observation_messages(message, outputs)
            except Submitted as end:
                self.messages += end.messages
                return dict(self.messages[-1]["extra"])


class Scripted:
    """A model of mini-swe-agent's interface that answers with commands in order."""

    def __init__(self, commands: list[str]) -> None:
        self.config: Any = None
        self.commands = iter(commands)
        self.outputs: list[dict[str, Any]] = []

    def query(self, messages: list[dict[str, str]], **_: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "extra": {"actions": [{"command": next(self.commands)}]}}

    def format_message(self, **message: Any) -> dict[str, Any]:
        return message

    def format_observation_messages(self, _: Any, outputs: list[dict[str, Any]], *__: Any) -> list[dict[str, Any]]:
        self.outputs += outputs
        return [{"role": "user", "content": out["output"]} for out in outputs]

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("terminal", tmp_path_factory.mktemp("data")) as made:
        yield made


@pytest.fixture(params=["stand-in", "installed"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The example's `main` with a scripted model in the place of `get_model`'s."""
    if request.param == "installed":
        if importlib.util.find_spec("minisweagent") is None:
            pytest.skip("mini-swe-agent is not installed: the stand-in plays its loop")
        monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    else:
        parts = {
            "minisweagent": {},
            "minisweagent.agents": {},
            "minisweagent.agents.default": {"DefaultAgent": DefaultAgent},
            "minisweagent.config": {"get_config_from_spec": lambda _: {"agent": {}, "model": {}}},
            "minisweagent.exceptions": {"Submitted": Submitted},
            "minisweagent.models": {"get_model": None},
        }
        for name, content in parts.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)

    def played(url: str, commands: list[str]) -> tuple[float, Scripted]:
        model = Scripted(commands)
        namespace = runpy.run_path(str(EXAMPLE))
        namespace["main"].__globals__["get_model"] = lambda *_: model
        return namespace["main"]("scripted", "access-report", url), model

    return played


def test_the_reference_solution_gets_its_reward_and_a_failing_command_is_an_output(
    server: ServerProcess, run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    reward, model = run(server.url, ["head -2 acces.log", SOLUTION.read_text(), FINISH])
    assert reward == 1.0
    assert model.outputs[0]["returncode"] == 1 and "acces.log" in model.outputs[0]["output"]
    assert "path_not_found" in capsys.readouterr().out


def test_an_unsolved_task_has_its_score_and_not_one(server: ServerProcess, run: Callable[..., Any]) -> None:
    assert run(server.url, [FINISH])[0] < 1.0


def test_a_failing_machine_ends_the_run_and_is_no_output(tmp_path: Path, run: Callable[..., Any]) -> None:
    with ServerProcess("terminal", tmp_path) as dying:

        class Killing(list[str]):
            def __iter__(self) -> Iterator[str]:
                yield "true"
                dying.kill()
                yield "echo never"

        with pytest.raises((TimeoutError, ConnectionError)), pytest.MonkeyPatch.context() as patched:
            patched.setattr("terminal_env.client.MESSAGE_TIMEOUT_S", 3.0)
            run(dying.url, Killing())
