"""The terminal behind real doors: Errata's server and client, and stock OpenEnv's server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from openenv.cli._validation import validate_running_environment
from openenv.core.env_server.http_server import create_app as stock_create_app

import terminal_env
from errata_environment import session_backend as own
from errata_protocol.errors import InvalidRequest
from errata_server.app import create_app
from errata_server.settings import Settings
from terminal_env import SPEC, TerminalAction, TerminalEnv, TerminalObservation, TerminalState, agent_text
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import load_tasks
from tests.client.loopback import served
from tests.hangs import HANGS_S

NAME = "access-report"


def application(data_dir: Path, sandbox: str) -> object:
    return create_app(
        TerminalEnvironment,
        TerminalAction,
        TerminalObservation,
        env_name="terminal",
        max_concurrent_envs=8,
        state_cls=TerminalState,
        settings=Settings(data_dir=data_dir, sandbox=sandbox),
        spec=SPEC,
    )


def test_a_session_over_errata_is_typed_counted_and_replayed(tmp_path: Path) -> None:
    with (
        served(application(tmp_path, "fake")) as url,
        TerminalEnv(base_url=url).sync() as terminal,
    ):
        assert {"run", "write_file", "read_file", "submit", "reset", "state_at"} <= set(dir(terminal))
        assert "timeout_s" in signature(terminal.run).parameters and "bash" in (terminal.run.__doc__ or "").lower()
        first = terminal.reset(seed=1, episode_id="mine")
        assert first.observation.instruction == "" and first.reward == 0.0
        made = terminal.write_file("note", "one\n")
        assert made.observation.error_kind is None
        shown = [agent_text(o.observation) for o in (terminal.run("cat note"), terminal.run("cat nothing"))]
        assert shown[0] == "one\n[exit 0]"
        state = terminal.state()
        assert (state.episode_id, state.step_count) == ("mine", 3)
        replayed = [json.loads(terminal.state_at(t).payload)["observation"] for t in (2, 3)]
        assert [agent_text(observation) for observation in replayed] == shown
        assert replayed[1]["error_kind"] == "path_not_found" and replayed[1]["error_site"]["t"] == 3
        child = terminal.fork(2)
        assert child.run("cat note").observation.stdout == "one\n"
        child.close()
        assert terminal.state().step_count == 3
        end = terminal.submit()
        assert (end.done, end.reward) == (True, 0.0)


def test_mistakes_over_errata_are_errors_with_a_code_and_the_session_lives(tmp_path: Path) -> None:
    with served(application(tmp_path, "fake")) as url, TerminalEnv(base_url=url).sync() as terminal:
        with pytest.raises(InvalidRequest, match=NAME):
            terminal.reset(task_id="no-such-task")
        terminal.reset()
        assert terminal.step(TerminalAction(tool="shout")).observation.error_kind == "tool_not_found"
        assert terminal.run("echo alive").observation.stdout == "alive\n"


@pytest.mark.sandbox
def test_a_task_is_solved_over_errata(tmp_path: Path) -> None:
    task = load_tasks().find(NAME)
    assert task
    with served(application(tmp_path, "namespace")) as url, TerminalEnv(base_url=url).sync() as terminal:
        assert terminal.reset(task_id=NAME).observation.instruction == task.instruction
        wrong = terminal.run("awk '{print $1' access.log")
        assert wrong.observation.error_kind == "syntax_error"
        solved = terminal.run((task.root / "solution" / "solve.sh").read_text())
        assert solved.observation.exit_code == 0
        end = terminal.submit()
        assert (end.reward, end.done) == (1.0, True)


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """Stock OpenEnv's server, where no Errata session is running."""
    monkeypatch.setenv("ERRATA_DATA_DIR", str(tmp_path))
    own._own_backend.cache_clear()
    app = stock_create_app(
        TerminalEnvironment,
        TerminalAction,
        TerminalObservation,
        env_name="terminal",
        max_concurrent_envs=4,
        state_cls=TerminalState,
    )
    with TestClient(app) as client:
        yield client
        client.portal.call(own._own_backend().close)
    own._own_backend.cache_clear()


@pytest.mark.sandbox
def test_stock_openenv_serves_it_unchanged(stock: TestClient) -> None:
    task = load_tasks().find(NAME)
    assert task
    with stock.websocket_connect("/ws") as socket:

        def ask(type_: str, **data: object) -> dict[str, dict[str, object]]:
            socket.send_json({"type": type_, "data": data} if type_ != "state" else {"type": type_})
            reply = socket.receive_json()
            assert reply["type"] != "error", reply
            return reply["data"]

        assert ask("reset", task_id=NAME, episode_id="e")["observation"]["instruction"] == task.instruction
        seen = ask("step", command="cat missing")
        assert seen["observation"]["error_kind"] == seen["metadata"]["error_kind"] == "path_not_found"
        ask("step", command=(task.root / "solution" / "solve.sh").read_text())
        assert ask("step", tool="submit")["reward"] == 1.0
        state = ask("state")
        assert (state["episode_id"], state["step_count"]) == ("e", 3)


def test_stock_openenvs_task_api_lists_the_tasks(stock: TestClient) -> None:
    assert {"name": "bundled", "type": "train"} in stock.get("/terminal/splits").json()
    count = stock.post("/terminal/num_tasks", json={"split": "bundled"}).json()["num_tasks"]
    listed = stock.post("/terminal/tasks", json={"split": "bundled"}).json()["tasks"]
    assert len(listed) == count and NAME in [task["id"] for task in listed]
    assert stock.post("/terminal/task", json={"split": "bundled", "index": 0}).json()["task"] == listed[0]
    assert stock.post("/terminal/task", json={"split": "bundled", "index": count}).status_code == 400
    assert stock.post("/terminal/tasks", json={"split": "nope"}).status_code == 400
    assert "errata_verify" not in json.dumps(listed)


def test_openenv_validates_the_package(tmp_path: Path) -> None:
    package = Path(str(terminal_env.__file__)).parent.resolve()
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "openenv.cli",
            "validate",
            package,
            "--level",
            "static",
            "--skip-build",
            "--output",
            report,
        ],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())["target"]


def test_a_running_server_passes_openenvs_checks(tmp_path: Path) -> None:
    with served(application(tmp_path, "fake")) as url:
        report = validate_running_environment(url)
    assert report["passed"], [criterion for criterion in report["criteria"] if not criterion["passed"]]
