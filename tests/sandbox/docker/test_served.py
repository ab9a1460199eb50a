"""The terminal environment on containers: tasks, grading, state(t), and what recovery there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_protocol.errors import NotSupported
from errata_server.app import create_app
from errata_server.settings import Settings
from tests.client.loopback import served

from .conftest import RunningBroker

pytestmark = pytest.mark.containers

terminal = pytest.importorskip("terminal_env")
NAME = "access-report"


@pytest.fixture(autouse=True)
def broker_of_the_server(broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SANDBOXD_SOCKET", str(broker.sockets["two"]))


def application(data_dir: Path, *, deterministic: bool = False) -> object:
    from terminal_env.server.environment import TerminalEnvironment

    return create_app(
        TerminalEnvironment,
        terminal.TerminalAction,
        terminal.TerminalObservation,
        env_name="terminal",
        max_concurrent_envs=8,
        state_cls=terminal.TerminalState,
        settings=Settings(data_dir=data_dir, sandbox="docker"),
        spec=terminal.SPEC,
        deterministic=deterministic,
    )


def test_a_task_is_solved_graded_and_replayed(tmp_path: Path) -> None:
    from terminal_env.server.tasks import load_tasks

    task = load_tasks().find(NAME)
    assert task
    with served(application(tmp_path)) as url, terminal.TerminalEnv(base_url=url).sync() as client:
        assert client.reset(task_id=NAME).observation.instruction == task.instruction
        assert client.run("cat nothing").observation.error_kind == "path_not_found"
        assert client.run((task.root / "solution" / "solve.sh").read_text()).observation.exit_code == 0
        assert b"path_not_found" in bytes(client.state_at(1).payload)
        end = client.submit()
        assert (end.reward, end.done) == (1.0, True)
        assert client.reset(task_id=NAME).observation.instruction == task.instruction
        assert client.submit().reward == 0.0


def test_no_step_is_a_commit_and_a_fork_without_determinism_is_refused(tmp_path: Path, broker: RunningBroker) -> None:
    with served(application(tmp_path)) as url, terminal.TerminalEnv(base_url=url).sync() as client:
        client.reset()
        for _ in range(3):
            client.run("date >> f")
        assert "commit" not in (broker.sockets["two"].parent / "broker.log").read_text().split("exec")[-1]
        with pytest.raises(NotSupported):
            client.fork(2)


def test_a_deterministic_session_forks_and_comes_back_by_re_execution(tmp_path: Path) -> None:
    with (
        served(application(tmp_path, deterministic=True)) as url,
        terminal.TerminalEnv(base_url=url).sync() as client,
    ):
        client.reset()
        client.run("echo one > f")
        client.run("echo two >> f")
        child = client.fork(1)
        assert child.run("cat f").observation.stdout == "one\n"
        child.close()
        assert client.run("cat f").observation.stdout == "one\ntwo\n"
