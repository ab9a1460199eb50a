"""examples/mini_swe_agent.py on both environments: with a stand-in for mini-swe-agent, and with mini-swe-agent itself.

The agent itself is in a locked environment that ``make test-swe`` makes, as what it needs is not what we need.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import errata_client
import errata_environment
import errata_protocol
import terminal_env
from errata_server.process import ServerProcess
from swe_bench_lite_env.server.offered import bundled
from tests.hangs import HANGS_S

pytestmark = pytest.mark.sandbox

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mini_swe_agent.py"
PLAY = Path(__file__).parent / "play_mini_swe_agent.py"
AGENT = "mini-swe-agent-2.4.6"
PACKAGES = (errata_client, errata_environment, errata_protocol, terminal_env)
"""Packages of ours that the example imports."""
SOLUTION = Path(terminal_env.__file__).parent / "tasks" / "access-report" / "solution" / "solve.sh"
FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done"
INSTANCE = "errata-examples__pagelist-1"


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


class LimitsExceeded(Submitted):
    """As `minisweagent.exceptions.LimitsExceeded`."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("terminal", tmp_path_factory.mktemp("data")) as made:
        yield made


@pytest.fixture(scope="module")
def swe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    env = {"ERRATA_SWE_STORE": str(tmp_path_factory.mktemp("store")), "ERRATA_SWE_MAX_TURNS": "6"}
    with ServerProcess("swe_bench_lite", tmp_path_factory.mktemp("swe"), env=env) as made:
        yield made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The example's `main` with the stand-in's parts in the places of mini-swe-agent's."""
    parts = {
        "minisweagent": {},
        "minisweagent.agents": {},
        "minisweagent.agents.default": {"DefaultAgent": DefaultAgent},
        "minisweagent.config": {"get_config_from_spec": lambda _: {"agent": {}, "model": {}}},
        "minisweagent.exceptions": {"LimitsExceeded": LimitsExceeded, "Submitted": Submitted},
        "minisweagent.models": {"get_model": None},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    def played(
        url: str, commands: list[str], task: str = "access-report", environment: str = "terminal"
    ) -> tuple[float, Scripted]:
        model = Scripted(commands)
        namespace = runpy.run_path(str(EXAMPLE))
        namespace["main"].__globals__["get_model"] = lambda *_: model
        return namespace["main"]("scripted", task, url, environment), model

    return played


@pytest.fixture
def agent() -> Callable[..., dict[str, Any]]:
    """Plays the commands with mini-swe-agent itself, in a Python that has it and our client's dependencies."""
    python = ROOT / ".cache" / AGENT / "bin/python"
    assert python.exists(), f"{python} is missing: run `make test-swe`, which makes it"
    packages = {str(Path(str(module.__file__)).parents[1]) for module in PACKAGES}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "ERRATA_", "MSWEA_"))}
    env |= {"PYTHONPATH": os.pathsep.join(sorted(packages)), "MSWEA_SILENT_STARTUP": "1"}

    def played(url: str, commands: list[str], task: str, environment: str) -> dict[str, Any]:
        job = {"task": task, "url": url, "environment": environment, "commands": commands}
        done = subprocess.run(
            [str(python), str(PLAY), json.dumps(job)], capture_output=True, text=True, timeout=HANGS_S, env=env
        )
        assert done.returncode == 0, done.stderr[-2000:]
        played: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert f"mini-swe-agent-{played['version']}" == AGENT
        return played

    return played


def gold() -> str:
    """Return the command that repairs `INSTANCE`."""
    return f"git apply - <<'PATCH'\n{bundled()[0].find(INSTANCE).patch}PATCH"


def test_the_reference_solution_gets_its_reward_and_a_failing_command_is_an_output(
    server: ServerProcess, run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    reward, model = run(server.url, ["head -2 acces.log", SOLUTION.read_text(), FINISH])
    assert reward == 1.0
    assert model.outputs[0]["returncode"] == 1 and "acces.log" in model.outputs[0]["output"]
    assert model.outputs[0]["output"].endswith("[exit 1]"), "it reads agent_text"
    assert "path_not_found" in capsys.readouterr().out


def test_an_unsolved_task_has_its_score_and_not_one(server: ServerProcess, run: Callable[..., Any]) -> None:
    assert run(server.url, [FINISH])[0] < 1.0


def test_an_instance_is_repaired(swe_server: ServerProcess, run: Callable[..., Any]) -> None:
    reward, model = run(swe_server.url, ["pytest -q", gold(), FINISH], INSTANCE, "swe_bench_lite")
    assert reward == 1.0
    assert [out["returncode"] for out in model.outputs] == [0, 0]
    assert run(swe_server.url, [FINISH], INSTANCE, "swe_bench_lite")[0] == 0.0


def test_a_spent_budget_ends_the_run(swe_server: ServerProcess, run: Callable[..., Any]) -> None:
    """The server gives six turns."""
    reward, model = run(swe_server.url, ["true"] * 10, INSTANCE, "swe_bench_lite")
    assert reward == 0.0
    assert len(model.outputs) == 5


@pytest.mark.swe
def test_mini_swe_agent_itself_repairs_an_instance(
    swe_server: ServerProcess, agent: Callable[..., dict[str, Any]]
) -> None:
    played = agent(swe_server.url, ["ls no-such-file", gold(), FINISH], INSTANCE, "swe_bench_lite")
    assert played["reward"] == 1.0
    texts = [message["content"] for message in played["messages"]]
    assert bundled()[0].find(INSTANCE).problem_statement.strip() in texts[1]
    assert "<returncode>2</returncode>" in texts[3] and "No such file or directory\n[exit 2]" in texts[3]
    assert played["messages"][-1]["extra"]["exit_status"] == "Submitted"
    assert agent(swe_server.url, [FINISH], INSTANCE, "swe_bench_lite")["reward"] == 0.0


@pytest.mark.swe
def test_mini_swe_agent_itself_solves_a_terminal_task(
    server: ServerProcess, agent: Callable[..., dict[str, Any]]
) -> None:
    played = agent(server.url, [SOLUTION.read_text(), FINISH], "access-report", "terminal")
    assert played["reward"] == 1.0
    assert played["messages"][-1]["content"] == "done\n"


def test_a_failing_machine_ends_the_run_and_is_no_output(tmp_path: Path, run: Callable[..., Any]) -> None:
    with ServerProcess("terminal", tmp_path) as dying:

        class Killing(list[str]):
            def __iter__(self) -> Iterator[str]:
                yield "true"
                dying.kill()
                yield "echo never"

        with pytest.raises((TimeoutError, ConnectionError)), pytest.MonkeyPatch.context() as patched:
            patched.setattr("errata_environment.published.client.MESSAGE_TIMEOUT_S", 3.0)
            run(dying.url, Killing())
