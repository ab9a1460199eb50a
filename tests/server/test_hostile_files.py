"""Every command that reads a file or a directory, against every kind of file that is none of ours or means harm."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_ablation.plan import read_plan
from errata_protocol.errors import InvalidRequest, SandboxUnavailable
from errata_server.log import JsonLines
from errata_server.sandbox import registry

from ..hostile_files import make_socket, make_sparse
from .command_line import Command, Parameter, all_commands, assert_harmless, run

READ = {"path", "file", "file...", "dir", "plan.toml"}
ALSO_READ = {("image build", "directory"), ("image import", "directory"), ("conformance", "probe")}
"""Parameters that take a file, although their help does not say so."""

PROGRESS = ("is made again from the segments", ": copying ", "left out: given.jsonl row ")
"""What a command may say before the line that says why it ended."""
NOT_READ = {
    ("episodes export", "output"): "is written",
    ("journal export", "output"): "is written",
    ("journal salvage", "output"): "is written",
    ("image export", "output"): "is written",
    ("swe grade", "out"): "is written",
    ("init", "output_dir"): "is written",
    ("conformance", "junit"): "is written",
    ("bench", "json"): "is written",
    ("bench", "data_dir"): "is written",
    (
        "ablate",
        "plan",
    ): "is run for hours if it can be read; test_a_plan_that_is_none has the rest",
    ("ablate", "out"): "is written, and read again as what the same command wrote",
    ("base import", "directory"): "is written",
    ("base build", "directory"): "is written",
    ("base build", "system"): "is a whole system, which is moved",
    ("serve", "data_dir"): "is made where it is missing; test_a_directory_that_is_none_is_refused has the others",
    (
        "journal shard",
        "data_dir",
    ): "is made where it is missing; test_a_directory_that_is_none_is_refused has the others",
    ("doctor", "data_dir"): "is only looked at: its file system",
    ("swe prepare", "store"): "is made by the command",
    ("swe validate", "store"): "is made by the command",
    ("swe grade", "store"): "is made by the command",
    ("redteam", "store"): "is made by the command",
    ("swe recipe", "store"): "is made by the command",
    ("swe prepare", "mirror"): "is read by git",
    ("swe grade", "mirror"): "is read by git",
    ("redteam", "mirror"): "is read by git",
    ("swe recipe", "mirror"): "is read by git",
}
"""Parameters that look like files to read and are none."""

ROW = {"repo": "o/n", "instance_id": "o__n-1", "problem_statement": "p", "FAIL_TO_PASS": '["t"]'}
RECIPE = {"instance_id": "o__n-1", "source": {"kind": "git"}, "python": "3.9", "test_command": "pytest"}
OTHERS: dict[str, list[str]] = {
    "eid": ["ep_x"],
    "eids": ["ep_x"],
    "t": ["0"],
    "value": ["0.5"],
    "source": ["judge"],
    "target": ["tests.server.environments:CountEnvironment"],
    "environments": ["tests.server.environments:CountEnvironment"],
    "output": ["{tmp}/out"],
    "dataset": ["{good}/rows.jsonl"],
    "recipes": ["{good}/recipes.json"],
    "predictions": ["gold"],
    "shard": ["a" * 12],
}
"""Values of the other required parameters. A new command with another one fails here until it has a value."""

ALSO: dict[tuple[str, str], list[str]] = {
    ("probe", "data_dir"): ["--episode", "ep_x"],
    ("journal retention", "data_dir"): ["--keep-days", "1"],
    ("fleet drain", "data_dir"): ["--server"],
    ("swe recipe", "dataset"): ["--instance", "o__n-1"],
    ("swe recipe", "output"): ["--instance", "o__n-1"],
    ("conformance", "probe"): ["http://127.0.0.1:9"],
}
SUFFIXES = {"swe grade --dataset": (".jsonl", ".json", ".parquet"), "swe grade --recipes": (".jsonl", ".json")}
"""Ends of names that choose a file's format; the other commands read rows and recipes with the same functions."""

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b\u202e"


def _holding(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        (path / name).parent.mkdir(parents=True)
        make(path / name)

    return made


def _content(content: bytes | str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


HEADER = b'{"record":"bundle","format":"errata-bundle","version":1,"created":1,"server":"x","episodes":[]}\n'

HOSTILE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "fifo": os.mkfifo,
    "socket": make_socket,
    "directory": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "loop": lambda path: path.symlink_to(path.name),
    "sparse": make_sparse,
    "empty": _content(b""),
    "zeros": _content(bytes(100_000)),
    "not utf-8": _content(b'{"a": "\xff"}\n' * 10),
    "utf-16": _content('{"a": 1}\n'.encode("utf-16")),
    "escapes": _content(ESCAPES),
    "text": _content(json.dumps(ESCAPES)),
    "null": _content("null"),
    "number": _content("1e999"),
    "long number": _content("9" * 5000),
    "nan": _content("[NaN]"),
    "deep": _content("[" * 200_000),
    "deep objects": _content('{"a":' * 100_000 + "1" + "}" * 100_000),
    "list of numbers": _content("[1, 2]"),
    "list of texts": _content(json.dumps([ESCAPES, ESCAPES])),
    "list of lists": _content("[[[]]]"),
    "parquet": _content(b"PAR1" + bytes(range(256)) * 4 + b"\xff\xff\xff\x7fPAR1"),
    "gzip": _content(b"\x1f\x8b\x08\x00" + bytes(100)),
    "bundle of garbage": _content(HEADER + ESCAPES.encode() + b"\n" + b"[" * 100_000 + b"\n"),
    "bundle of escapes": _content(
        HEADER
        + json.dumps(
            {
                **{"record": "delivery", "eid": ESCAPES, "kind": "reset", "payload": "{}", "t": 0, "created": 1},
                "digest": "sha256:" + "0" * 64,
            }
        ).encode()
        + b"\n"
    ),
    "bundle of numbers": _content(
        HEADER + b'{"record":"reward","eid":"x","t":1e999,"value":1e999,"source":"x","reward_id":"x","created":1e999}\n'
    ),
    "bundle of another version": _content(HEADER.replace(b'"version":1', b'"version":1e999')),
    "journal that is a fifo": _holding("journal", os.mkfifo),
    "journal of an earlier version": _holding("journal.db", _content(b"SQLite format 3\x00")),
    "journal of garbage": _holding("journal/00000001.seg", _content(b"\xff" * 5000)),
    "journal of a fifo": _holding("journal/index.db", os.mkfifo),
    "task of a fifo": _holding("task/task.toml", os.mkfifo),
    "task of escapes": _holding(f"{ESCAPES}/task.toml", _content("a" * 5)),
    "Dockerfile that is a fifo": _holding("Dockerfile", os.mkfifo),
    "task.toml of depth": _holding("task.toml", _content("a = " + "[" * 100_000)),
    "base.json of depth": _holding("base.json", _content("[" * 100_000)),
    "manifest of depth": _holding("openenv.yaml", _content("a: " + "[" * 5_000)),
    "manifest that is a fifo": _holding("openenv.yaml", os.mkfifo),
}


DIRECTORIES = {"missing", "fifo", "socket", "directory", "device", "loop", "sparse", "zeros"} | {
    what for what in HOSTILE if what.startswith(("journal", "manifest"))
}
"""Those that differ for a command which takes a directory."""


def reads_file(command: Command, parameter: Parameter) -> bool:
    """Return whether a parameter names a file or a directory that is read."""
    key = (str(command), parameter.name)
    return key not in NOT_READ and (key in ALSO_READ or bool(READ & set(parameter.takes.split())))


CALLS = {
    f"{command} {parameter.flag or parameter.name}": (command, parameter)
    for command in all_commands()
    for parameter in command.parameters
    if reads_file(command, parameter)
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good")
    (directory / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    (directory / "recipes.json").write_text(json.dumps([RECIPE]))
    return directory


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No sandbox, no journal and no store of this machine, and no play of actions that can be read."""

    def create(*_: object) -> None:
        raise SandboxUnavailable("there is none in this test")

    monkeypatch.setattr("errata_server.probe.probe", create)
    monkeypatch.setattr(registry, "create", create)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path / "home" / "store"))
    monkeypatch.setenv("ERRATA_BASE_DIR", str(tmp_path / "home" / "bases"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/socket")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("ERRATA_DATA_DIR", raising=False)
    return iter([None])


def called(call: str, path: Path, good: Path, directory: Path) -> list[str]:
    command, parameter = CALLS[call]
    words = [*command.words]
    for one in command.parameters:
        if one.required and one != parameter:
            words += [*([one.flag] if one.flag else []), *OTHERS[one.name]]
    words += [*ALSO.get((str(command), parameter.name), []), *parameter.given(str(path))]
    return [word.replace("{tmp}", str(directory)).replace("{good}", str(good)) for word in words]


def test_the_commands_that_read_a_file_are_found() -> None:
    assert {str(command) for command, _ in CALLS.values()} >= {
        *("episodes verify", "episodes serve", "probe", "replay", "journal verify", "journal salvage", "tasks check"),
        *("swe prepare", "swe validate", "swe grade", "swe recipe", "image build", "audit"),
    }
    known = {(str(command), one.name) for command in all_commands() for one in command.parameters}
    assert known >= set(NOT_READ) | ALSO_READ, "a parameter that is listed and is not there any more"


@pytest.mark.parametrize("call", CALLS)
def test_a_file_that_is_none_of_ours_is_refused(call: str, good: Path, tmp_path: Path) -> None:
    for what, make in HOSTILE.items():
        if CALLS[call][1].name == "data_dir" and what not in DIRECTORIES:
            continue
        for suffix in SUFFIXES.get(call, (".jsonl",) if call.startswith("swe") else ("",)):
            directory = tmp_path / f"{what}{suffix}".replace(" ", "-")
            directory.mkdir()
            path = directory / f"given{suffix}"
            make(path)
            ended = run(*called(call, path, good, directory))
            try:
                assert_harmless(ended)
                assert ended.status in (1, 2), ended
                *before, last = ended.stderr.splitlines() or [ended.stdout.strip()]
                assert last and len(ended.stderr) < 10_000, "it says why"
                assert [line for line in before if not any(said in line for said in PROGRESS)] == []
            except AssertionError as error:
                raise AssertionError(f"{call} with {what}{suffix}: {error}") from error


@pytest.mark.parametrize("what", ["fifo", "socket", "device", "loop", "missing"])
def test_a_base_tree_that_is_no_file_is_refused_without_waiting(what: str, tmp_path: Path) -> None:
    HOSTILE[what](tmp_path / "given")
    ended = run("base", "import", str(tmp_path / "given"), "--directory", str(tmp_path / "bases"))
    assert_harmless(ended)
    assert ended.status == 1 and ended.stderr.splitlines()[-1].startswith("errata: ")


@pytest.mark.parametrize("what", HOSTILE)
def test_a_plan_that_is_none_is_refused(what: str, tmp_path: Path) -> None:
    HOSTILE[what](tmp_path / "given")
    if what == "empty":
        read_plan(tmp_path / "given")  # the controlled family, as without a plan
    else:
        with pytest.raises(InvalidRequest):
            read_plan(tmp_path / "given")


@pytest.mark.parametrize("what", ["fifo", "socket", "device", "loop", "empty", "journal that is a fifo"])
def test_a_directory_that_is_none_is_refused(what: str, tmp_path: Path) -> None:
    given = tmp_path / "given"
    HOSTILE[what](given)
    commands = [("serve", "tests.server.environments:CountEnvironment", "--data-dir", str(given), "--port", "0")]
    if what != "journal that is a fifo":  # of the journal nothing is read
        commands.append(("journal", "shard", str(given)))
    for command in commands:
        ended = run(*command)
        assert_harmless(ended)
        assert ended.status in (1, 2) and ended.stderr.count("\n") == 1, ended


@pytest.mark.parametrize("what", ["fifo", "socket", "device", "loop", "directory", "sparse", "zeros"])
def test_a_name_of_a_directory_that_is_none_is_refused(what: str, tmp_path: Path) -> None:
    HOSTILE[what](tmp_path / "shard")
    ended = run("journal", "shard", str(tmp_path))
    assert_harmless(ended)
    assert ended.status in (1, 2) and ended.stderr.count("\n") == 1, ended


@pytest.mark.parametrize("command", [("serve",), ("probe",)])
def test_what_is_no_environment_is_refused(command: tuple[str], tmp_path: Path) -> None:
    for number, (what, make) in enumerate(HOSTILE.items()):
        directory = tmp_path / str(number)
        directory.mkdir()
        make(directory / "given")
        ended = run(*command, str(directory / "given"))
        assert_harmless(ended)
        assert ended.status in (1, 2) and ended.stderr.count("\n") <= 2, f"{what}: {ended}"


def test_a_line_of_the_log_stays_json_and_acts_on_no_terminal() -> None:
    record = logging.LogRecord("errata", logging.INFO, "x", 1, "a\x9b\u202e\x1b[2J\n\ud800é", (), None)
    line = JsonLines().format(record)
    assert line.isprintable() and json.loads(line)["message"] == record.msg
