"""The command line: what it takes, and what it says when it cannot."""

from __future__ import annotations

import io
import json
import platform
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import ErrataError, JournalUnavailable, UnknownEpisode
from errata_server.app import create_fastapi_app
from errata_server.cli import commands, data_dirs, episodes
from errata_server.cli.program_help import summary_of
from errata_server.output_guard import GuardedStream, guard_output
from errata_server.process import ServerProcess
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation

ROOT = Path(__file__).parents[2]
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


# -- programs and demos of other distributions -------------------------------------------------------------------------


def folder_of(package: str) -> Path:
    """The folder of a checkout whose distribution has a package."""
    (found,) = [path.parent for path in ROOT.glob("*/pyproject.toml") if (path.parent / package).is_dir()]
    return found


@pytest.mark.parametrize(
    ("name", "package"),
    [("ablate", "errata_ablation"), ("bench", "errata_bench"), ("conformance", "errata_conformance")],
)
def test_the_command_of_a_program_that_is_not_installed_says_what_to_install(name: str, package: str) -> None:
    distribution = commands.ELSEWHERE[name]
    commands._add_missing("absent", distribution)
    try:
        done = RUNNER.invoke(commands.cli, ["absent", "http://127.0.0.1:8000", "--json"])
    finally:
        commands.cli.registered_commands.pop()
    assert done.exit_code == 2
    assert done.stderr == (
        f"errata: absent is a program of another distribution: pip install {distribution.name}, or in a checkout "
        f"pip install ./{distribution.folder}\n"
    )
    folder = folder_of(package)
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    assert distribution == (project["name"], folder.name)
    assert name in project["entry-points"]["errata.programs"]


def test_a_demo_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: [])
    done = RUNNER.invoke(commands.cli, ["demo", "learning", "--json"])
    assert done.exit_code == 2
    assert done.stderr == (
        "errata: demo learning is a program of another distribution: pip install openenv-errata-bench, or in a "
        "checkout pip install ./bench\n"
    )
    project = tomllib.loads((folder_of("errata_ablation") / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["errata.demos"].keys() == commands.DEMOS_ELSEWHERE.keys()


def test_programs_that_format_their_output_get_the_streams_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def program(arguments: list[str]) -> int:
        seen.append([isinstance(stream, GuardedStream) for stream in (sys.stdout, sys.stderr)])
        return 0

    monkeypatch.setitem(globals(), "play", program)
    for name in ("bench", "swe"):
        commands._add_program(EntryPoint(name, f"{__name__}:play", "errata.programs"))
        found = commands.cli.registered_commands.pop().callback
        assert found is not None
        with monkeypatch.context() as streams:
            for stream in ("stdout", "stderr"):
                streams.setattr(sys, stream, io.StringIO())
            guard_output()
            with pytest.raises(typer.Exit):
                found([])
    assert seen == [[False, False], [True, True]]


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
    assert f"{stranger}/episodes/ep_x/bundle: HTTP 404" in error.message


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
    monkeypatch.setattr(episodes, "published", dict)
    assert "'count' is not installed here" in str(RUNNER.invoke(commands.cli, replay).exception)


def test_where_an_environment_publishes_no_text_the_agent_read_the_observation(tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    from .conftest import connect

    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, settings=Settings(data_dir=tmp_path))
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset")["eid"]
        socket.ask("step", {"n": 5})
    replay = ["replay", eid, "1", "--agent-text", "--data-dir", str(tmp_path)]
    assert json.loads(RUNNER.invoke(commands.cli, replay).output)["n"] == 5


# -- help, versions and where journals lie -----------------------------------------------------------------------------


def groups() -> list[list[str]]:
    return [[], *([name] for name in ("episodes", "episode", "journal", "base"))]


@pytest.mark.parametrize("group", groups(), ids=" ".join)
def test_no_summary_of_a_command_is_cut(group: list[str]) -> None:
    told = RUNNER.invoke(commands.cli, [*group, "--help"], terminal_width=80).output
    listed = told.split("Commands:\n", 1)[1].splitlines()
    assert len(listed) >= 3
    for line in listed:
        assert not line.endswith("...") and len(line) <= 80, line


def test_help_begins_with_serve_and_names_every_command() -> None:
    told = RUNNER.invoke(commands.cli, ["--help"], terminal_width=80).output
    names = [line.split()[0] for line in told.split("Commands:\n", 1)[1].splitlines()]
    assert names[0] == "serve" and names[-1] == "version"
    assert set(names) >= {*commands.ORDER, "version"}


def test_versions_have_their_names() -> None:
    assert RUNNER.invoke(commands.cli, ["--version"]).output == f"errata {version('openenv-errata')}\n"
    told = json.loads(RUNNER.invoke(commands.cli, ["version", "--json"]).output)
    assert told["errata"] == version("openenv-errata") and told["openenv"] == version("openenv")
    assert told["python"] == platform.python_version()
    plain = RUNNER.invoke(commands.cli, ["version"]).output
    assert plain.splitlines()[0].split() == ["errata", version("openenv-errata")]


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ERRATA_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "errata"


def with_episode(directory: Path) -> str:
    """Keep one episode in a data directory; return its eid."""
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, settings=Settings(data_dir=directory))
    with TestClient(app) as client, connect(client) as socket:
        return str(socket.ask("reset", {})["eid"])


def test_the_default_data_directory_is_named_after_the_targets(data_home: Path, tmp_path: Path) -> None:
    env = tmp_path / "my_env"
    env.mkdir()
    assert data_dirs.of_targets(["terminal"]) == data_home / "terminal"
    assert data_dirs.of_targets([str(env)]) == data_home / "my_env"
    assert data_dirs.of_targets(["pkg.module:Class"]) == data_home / "pkg.module.Class"
    both = data_dirs.of_targets(["terminal", str(env)])
    assert both == data_dirs.of_targets([str(env), "terminal"]) == data_home / "my_env+terminal"
    assert data_dirs.of_targets(["journal"]) == data_home / "journal_"  # `errata/journal` is an earlier version's
    assert len(data_dirs.of_targets([f"a{n}" * 20 for n in range(9)]).name) <= data_dirs.MAX_NAME
    assert data_dirs.of_targets(["../.."]).parent == data_home


def test_a_configured_data_directory_is_taken_as_it_is(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_DATA_DIR", "/somewhere")
    assert data_dirs.of_targets(["terminal"]) == Path("/somewhere")


def test_reading_finds_the_only_journal_and_the_one_with_the_episode(data_home: Path) -> None:
    assert "no journal in" in failure("episodes", "--json").message
    first = with_episode(data_home / "one")
    listed = RUNNER.invoke(commands.cli, ["episodes", "--json"])
    assert [e["eid"] for e in json.loads(listed.output)["episodes"]] == [first]
    second = with_episode(data_home / "two")
    for eid in (first, second):
        shown = RUNNER.invoke(commands.cli, ["replay", eid, "0", "--json"])
        assert json.loads(shown.output)["eid"] == eid
    unclear = failure("journal", "retention", "--keep-days", "1").message
    assert "there are 2 journals" in unclear
    assert str(data_home / "one") in unclear and str(data_home / "two") in unclear
    assert isinstance(failure("replay", "ep_of_nobody"), UnknownEpisode)


def test_a_journal_in_the_earlier_default_directory_is_still_read(data_home: Path) -> None:
    eid = with_episode(data_home)
    assert json.loads(RUNNER.invoke(commands.cli, ["episodes", "show", eid, "--json"]).output)["eid"] == eid
    other = with_episode(data_home / "two")
    for known in (eid, other):
        assert RUNNER.invoke(commands.cli, ["episodes", "show", known, "--json"]).exit_code == 0
    assert data_dirs.left_behind(data_home / "terminal") == data_home
    assert data_dirs.left_behind(data_home / "two") is None  # has begun its own before


def test_deleting_an_episode_takes_the_journal_that_has_it(data_home: Path) -> None:
    kept, gone = with_episode(data_home / "one"), with_episode(data_home / "two")
    answer = RUNNER.invoke(commands.cli, ["episodes", "delete", gone, "--json"])
    assert list(json.loads(answer.output)) == [gone]
    assert RUNNER.invoke(commands.cli, ["episodes", "show", kept]).exit_code == 0
    assert isinstance(failure("episodes", "show", gone), UnknownEpisode)


def test_log_lines_are_json_where_that_is_asked_for(tmp_path: Path) -> None:
    """What they are without is in `test_restart`."""
    options = ("--log-format", "json", "--log-level", "debug")
    with ServerProcess("tests.server.environments:CountEnvironment", tmp_path, *options) as server:
        assert server.stop() == 0
    (logged,) = [line for line in server.log if "Application startup complete" in line]
    assert json.loads(logged)["logger"] == "uvicorn.error"


def test_every_command_says_what_it_does() -> None:
    told = RUNNER.invoke(commands.cli, ["--help"], terminal_width=80).output.split("Commands:\n", 1)[1]
    summaries = {line.split()[0]: line.split(maxsplit=1)[1] for line in told.splitlines()}
    own = [summary for summary in summaries.values() if not summary.startswith("Not installed: pip install ")]
    assert len(set(own)) == len(own)  # one distribution may bring several commands
    for name, summary in summaries.items():
        assert "A program" not in summary and "``" not in summary and summary.endswith("."), (name, summary)
    assert "episode" not in summaries  # one name; the earlier one still works
    listed = RUNNER.invoke(commands.cli, ["episodes", "--help"]).output
    for name in ("export", "verify", "serve"):
        assert f"  {name} " in listed
        assert RUNNER.invoke(commands.cli, ["episode", name, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("module", "summary"),
    [
        ("one.cli", "Count broken rules."),
        ("one", "Runs one."),
        ("one.none", "Runs one.none."),
        ("none.cli", "Runs none.cli."),
        ("one.folder", "Whole, on two lines."),
        ("one.silent", "Runs one.silent."),
    ],
)
def test_a_program_is_described_by_its_module_without_importing_it(
    module: str, summary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "one"
    (package / "folder").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "cli.py").write_text(
        '"""``errata one``: count broken rules. Then more."""\nraise RuntimeError("imported")'
    )
    (package / "folder" / "__init__.py").write_text('"""Whole,\n    on two lines.\n\nMore."""')
    (package / "silent.py").write_text("main = None")
    monkeypatch.syspath_prepend(tmp_path)
    assert summary_of(EntryPoint("one", f"{module}:main", "errata.programs")) == summary


@pytest.mark.parametrize(
    ("words", "offered"),
    [("errata epi", ["episodes"]), ("errata episodes ex", ["export"]), ("errata replay --fu", ["--full"])],
)
def test_the_shell_completes_commands_and_options(words: str, offered: list[str]) -> None:
    asked = {"_ERRATA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    assert RUNNER.invoke(commands.cli, [], prog_name="errata", env=asked).output.split() == offered
