"""The command line: what it takes, and what it says when it cannot."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import ErrataError, JournalUnavailable, UnknownEpisode
from errata_server.app import create_fastapi_app
from errata_server.cli import commands, episodes
from errata_server.settings import Settings

from .environments import CountAction, CountEnvironment, CountObservation

RUNNER = CliRunner()
DEMO_ARGUMENTS: list[list[str]] = []


def play(arguments: list[str]) -> int:
    """Stand for a demo."""
    DEMO_ARGUMENTS.append(arguments)
    return 3


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([], []),
        (["terminal"], []),
        (["--data-dir", "x"], ["--data-dir", "x"]),
        (["terminal", "--data-dir", "x", "--json"], ["--data-dir", "x", "--json"]),
        (["--json"], ["--json"]),
    ],
)
def test_a_demo_gets_its_options_with_or_without_its_name(
    given: list[str], passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("terminal", f"{__name__}:play", "errata.demos")
    monkeypatch.setattr(commands, "entry_points", lambda group: [point])
    DEMO_ARGUMENTS.clear()
    assert RUNNER.invoke(commands.cli, ["demo", *given]).exit_code == 3
    assert [passed] == DEMO_ARGUMENTS


def test_an_unknown_demo_is_told_which_there_are() -> None:
    answer = RUNNER.invoke(commands.cli, ["demo", "no-such-demo"])
    assert answer.exit_code == 2 and "no-such-demo" in answer.output and "terminal" in answer.output


@pytest.fixture
def stranger() -> Iterator[str]:
    """URL of a server that is none of ours: it answers everything with 404 and JSON of its own."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"detail": "Not Found"}')

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def failure(*arguments: str) -> ErrataError:
    error = RUNNER.invoke(commands.cli, list(arguments)).exception
    assert isinstance(error, ErrataError), error
    return error


@pytest.mark.parametrize("eid", ["../x", "..", "a/b", "ep?x=1", "", "é"])
@pytest.mark.parametrize("command", [["replay"], ["episodes", "show"], ["episodes", "delete"]])
def test_a_text_that_is_no_eid_is_an_unknown_episode_and_no_address(
    command: list[str], eid: str, stranger: str
) -> None:
    error = failure(*command, "--url", stranger, "--", eid)
    assert isinstance(error, UnknownEpisode) and repr(eid) in error.message


def test_a_server_that_is_none_of_ours_is_named(stranger: str) -> None:
    error = failure("replay", "ep_x", "--url", stranger)
    assert isinstance(error, JournalUnavailable)
    assert f"{stranger}/episodes/ep_x: HTTP 404" in error.message


@dataclass
class Published:
    """Stands for an installed package's entry point."""

    spec: EnvironmentSpec

    def load(self) -> EnvironmentSpec:
        return self.spec


def test_what_the_agent_read_is_printed_as_text_or_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    from .conftest import connect

    spec = EnvironmentSpec(
        name="count",
        factory="tests.server.environments:CountEnvironment",
        action_cls=CountAction,
        observation_cls=CountObservation,
        agent_text=lambda observation: f"n is {observation['n']}",
        agent_text_version="7",
    )
    app = create_fastapi_app(
        CountEnvironment,
        CountAction,
        CountObservation,
        env_name="count",
        settings=Settings(data_dir=tmp_path),
        spec=spec,
    )
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset")["eid"]
        frame = socket.ask("step", {"n": 5})
    monkeypatch.setattr(episodes, "published", lambda: {"count": Published(spec)})
    replay = ["replay", eid, "1", "--agent-text", "--data-dir", str(tmp_path)]
    assert RUNNER.invoke(commands.cli, replay).output == "n is 5\n"
    told = json.loads(RUNNER.invoke(commands.cli, [*replay, "--json"]).output)
    assert told == {
        "eid": eid,
        "t": 1,
        "kind": "step",
        "digest": frame["digest"],
        "agent_text": "n is 5",
        "agent_text_version": "7",
    }
