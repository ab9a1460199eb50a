"""The conformance kit: complete, able to fail, and passed by Errata."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from openenv.validation.graders import GraderRegistry

from errata_conformance.cli import main
from errata_conformance.exact import elements, members
from errata_conformance.graders import EpisodeDeterminism, Replayability
from errata_conformance.report import as_json, as_junit, as_text
from errata_conformance.results import Outcome, Result, grouped
from errata_conformance.sample.wrong import DEFECTS
from errata_conformance.server_side.probe import Probe, guess
from errata_conformance.server_side.registry import CHECKS
from errata_conformance.server_side.run import prepared, run, selected, unchecked
from errata_conformance.server_side.target import Target
from errata_conformance.statements import statements
from errata_server.process import ServerProcess
from errata_server.runtime import shard_name
from tests.hangs import HANGS_S

from .conftest import RFCS, checked, sample

ROOT = Path(__file__).parents[2]
EXTRA = {"tokens": {"token": "one", "other_token": "two"}, "production": {"production": True}}
"""What the kit is given for an option of the sample server."""
FAST = ("span-in-bytes", "child-shares", "repeat-runs", "production-replays")
"""Wrong servers for the suite that runs all the time: one of each RFC, and one that needs an option.

`test_every_wrong_server` has all of them.
"""


def bad(results: list[Result]) -> list[str]:
    """Return what is broken."""
    return [f"{root.statement}: {root.check}: {root.detail}" for root, _ in grouped(results)]


def wrong_server(name: str) -> list[Result]:
    """Run the kit against a wrong server."""
    defect = DEFECTS[name]
    options: dict[str, Any] = {}
    for option in defect.options:
        options |= EXTRA.get(option, {})
    with sample(name, **defect.options) as url:
        return checked(url, **options)


# Completeness


def test_the_statements_are_those_of_the_rfcs() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "statements.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_statement_that_shows_has_a_check_and_a_wrong_server() -> None:
    assert unchecked() == []
    known = statements()
    shows = {one.id for one in known.values() if one.side == "server" and one.tag != "inspection"}
    assert {check.statement for check in CHECKS if not check.profiles} == shows
    assert {defect.statement for defect in DEFECTS.values()} == shows
    assert len(DEFECTS) >= 25
    assert all(one.reason for one in known.values() if one.tag == "inspection")


def test_the_readme_names_no_other_statement() -> None:
    text = (ROOT / "conformance" / "README.md").read_text()
    assert set(re.findall(r"R-\d{3}-\d+", text)) <= set(statements())


# The kit on servers


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"declared": False}, {}),
        ({"recovery": "none"}, {}),
        ({"tokens": ("one", "two")}, EXTRA["tokens"]),
        ({"production": True}, EXTRA["production"]),
        ({"shard": "tallyserver0"}, {}),
    ],
    ids=str,
)
def test_the_sample_server_passes_with_an_option(options: dict[str, Any], given: dict[str, Any]) -> None:
    with sample(**options) as url:
        assert bad(checked(url, **given)) == []


def test_the_sample_server_passes_floods_and_all_else() -> None:
    with sample() as url:
        results = checked(url, faults=True)
        assert bad(results) == []
        assert any(one.check.startswith("a storm") and one.outcome is Outcome.PASSED for one in results)


@pytest.mark.parametrize("name", FAST)
def test_a_wrong_server_is_caught_by_what_it_breaks(name: str) -> None:
    assert grouped(wrong_server(name))[0][0].statement == DEFECTS[name].statement


@pytest.mark.conformance
@pytest.mark.parametrize("name", sorted(set(DEFECTS) - {"stops-silently"}))
def test_every_wrong_server(name: str) -> None:
    results = wrong_server(name)
    found = [root.statement for root, _ in grouped(results)]
    assert found and found[0] == DEFECTS[name].statement, as_text(results)


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("mux-digest-zero", "R-016-46"),
        ("mux-without-digest", "R-016-46"),
        ("mux-read-digest-zero", "R-016-46"),
        ("mux-one-eid", "R-015-1"),
        ("key-twice", "R-016-5"),
        ("ack-deletes-all", "R-016-21"),
    ],
)
def test_what_no_check_of_its_own_looks_for_is_noticed_with_016_alone(name: str, statement: str) -> None:
    with sample(name) as url:
        results = checked(url, rfcs=("016",))
    assert statement in [root.statement for root, _ in grouped(results)], as_text(results)


class Process:
    """The sample server as a process of its own, with commands that stop, kill and start it."""

    def __init__(self, defect: str | None, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.pid_file = directory / "pid"
        more = f" --defect {defect}" if defect else ""
        server = f"{sys.executable} -m errata_conformance.sample --port {self.port}{more}"
        self.start = f"{server} >/dev/null 2>&1 & echo $! > {self.pid_file}"
        self.commands = {
            "stop": f"kill -TERM $(cat {self.pid_file})",
            "kill": f"kill -KILL $(cat {self.pid_file})",
            "start": f"while kill -0 $(cat {self.pid_file}) 2>/dev/null; do sleep 0.1; done; {self.start}",
        }

    @contextmanager
    def up(self) -> Iterator[Process]:
        subprocess.run(self.start, shell=True, check=True, timeout=HANGS_S)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            time.sleep(0.05)
        try:
            yield self
        finally:
            os.kill(int(self.pid_file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("defect", [None, "stops-silently"])
def test_a_server_that_stops_and_one_that_is_killed(defect: str | None, tmp_path: Path) -> None:
    process = Process(defect, tmp_path)
    with process.up():
        results = checked(process.url, faults=True, only=("R-016-38", "R-016-13"), **process.commands)
    found = [root.statement for root, _ in grouped(results)]
    assert found == ([] if defect is None else ["R-016-38"]), as_text(results)
    assert sum(one.outcome is Outcome.PASSED for one in results) == (3 if defect is None else 2), as_text(results)


# Errata


def tally(name: str) -> tuple[str, ...]:
    observation = "PlainObservation" if name == "PlainTally" else "TallyObservation"
    room = "tests.conformance.tally"
    return f"{room}:{name}", "--action", f"{room}:TallyAction", "--observation", f"{room}:{observation}"


@pytest.mark.kit
@pytest.mark.parametrize("is_named", [False, True], ids=["unnamed", "named"])
def test_errata_passes_in_a_directory_with_a_name_and_without(is_named: bool, tmp_path: Path) -> None:
    if is_named:
        shard_name.draw(tmp_path)
    with ServerProcess(tally("SnapshotTally")[0], tmp_path, *tally("SnapshotTally")[1:]) as server:
        results = checked(server.url)
    assert bad(results) == []
    found = {one.outcome for one in results if one.statement == "R-016-50"}
    assert found == {Outcome.PASSED if is_named else Outcome.NOT_SUPPORTED}


@pytest.mark.kit
@pytest.mark.parametrize(
    ("name", "more", "given"),
    [
        ("Tally", (), {}),
        ("SnapshotTally", (), {}),
        ("PlainTally", ("--detect", "stdout=text,exit_code=exit_code"), {}),
        ("Tally", ("--token", "one"), {"token": "one"}),
        ("Tally", ("--mode", "production"), EXTRA["production"]),
    ],
    ids=["reexecute", "snapshot", "wrapped", "token", "production"],
)
def test_errata_passes(name: str, more: tuple[str, ...], given: dict[str, Any], tmp_path: Path) -> None:
    with ServerProcess(tally(name)[0], tmp_path, *tally(name)[1:], *more) as server:
        results = checked(server.url, faults=True, **given)
    assert bad(results) == []
    outcomes = {one.outcome for one in results}
    assert outcomes <= {Outcome.PASSED, Outcome.NOT_TESTED, Outcome.NOT_APPLICABLE, Outcome.NOT_SUPPORTED}


@pytest.mark.kit
@pytest.mark.parametrize(
    ("name", "more", "given"),
    [("SnapshotTally", (), {}), ("Tally", ("--token", "one"), {"token": "one"})],
    ids=["snapshot", "token"],
)
def test_four_workers_pass(name: str, more: tuple[str, ...], given: dict[str, Any], tmp_path: Path) -> None:
    more = (*tally(name)[1:], "--workers", "4", *more)
    with ServerProcess(tally(name)[0], tmp_path, *more, start_s=120) as server:
        results = checked(server.url, faults=True, **given)
    assert bad(results) == []
    assert any(one.check.startswith("a storm") and one.outcome is Outcome.PASSED for one in results)


# Reports and the command


def report(*outcomes: tuple[str, Outcome, str | None]) -> list[Result]:
    return [Result(statement, "it holds", outcome, "why", by) for statement, outcome, by in outcomes]


def test_consequences_stand_under_what_is_broken() -> None:
    results = report(
        ("R-015-1", Outcome.BLOCKED, "R-015-6"),
        ("R-015-6", Outcome.FAILED, None),
        ("R-015-9", Outcome.PASSED, None),
        ("R-016-9", Outcome.BLOCKED, "R-016-7"),
    )
    found = [(root.statement, [one.statement for one in under]) for root, under in grouped(results)]
    assert found == [("R-015-6", ["R-015-1"]), ("R-016-7", ["R-016-9"])]
    text = as_text(results)
    assert text.index("BROKEN R-015-6") < text.index("consequence: R-015-1") < text.index("BROKEN R-016-7")
    assert json.loads(as_json(results, {"url": "x"}))["broken"][0]["consequences"] == ["R-015-1: it holds"]
    suite = ElementTree.fromstring(as_junit(results, "x"))
    assert (suite.get("failures"), suite.get("tests")) == ("3", "4")


def test_the_command_reports_and_exits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with sample() as url:
        assert main([url, "--rfc", "014", "--probe", "tally", "--junit", str(tmp_path / "x.xml")]) == 0
        assert "passed" in capsys.readouterr().out
        assert (tmp_path / "x.xml").read_text().startswith("<?xml")
        (tmp_path / "probe.json").write_text('{"step": [{"n": 2}, {"n": 3}]}')
        assert main([url, "--rfc", "015", "--probe", str(tmp_path / "probe.json"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["probe"] == "given" and found["counts"]["failed"] == 0 and found["counts"]["not tested"] > 0
    with sample("wrong-digest") as url:
        assert main([url, "--rfc", "015", "--only", "R-015-6"]) == 1
        assert "BROKEN R-015-6 (MUST)" in capsys.readouterr().out
    with sample("child-counts-on") as url:
        assert main([url, "--only", "R-015-22"]) == 0
        assert main([url, "--only", "R-015-22", "--strict"]) == 1
    assert main([url]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main([url, "--probe", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_pytest_plugin_has_a_test_for_each_check(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "def test_mine(conformance, request):\n"
        "    url = request.config.getoption('--conformance')\n"
        "    assert [one[:8] for one in conformance(url, 'tally', rfcs=('015',)).broken] == ['R-015-14']\n"
    )
    with sample("etag-without-quotes") as url:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--conformance", url]
        command += ["--conformance-rfc", "014", "015", "--rootdir", str(tmp_path), "test_mine.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert "1 failed" in done.stdout and "R-015-14" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 30  # type: ignore[index]


@pytest.mark.parametrize(("defect", "broken"), [(None, []), ("encoded-again", ["semantic.replayability"])])
def test_graders_of_openenv_validate(defect: str | None, broken: list[str]) -> None:
    registry = GraderRegistry()
    assert registry.load_entry_points() == 2
    exchanges = [{"type": "reset", "data": {}}, *({"type": "step", "data": {"n": n}} for n in (2, 3))]
    rows = [SimpleNamespace(operation=one["type"], request_json=json.dumps(one)) for one in exchanges]
    with sample(defect) as url:
        subject = SimpleNamespace(
            running=SimpleNamespace(base_url=url), runtime_evidence=SimpleNamespace(exchanges=rows)
        )
        graders = [registry.get(one) for one in ("runtime.episode_determinism", "semantic.replayability")]
        results = [grader.run(subject) for grader in graders]  # type: ignore[union-attr]
    assert [one.check_id for one in results if one.status.value == "fail"] == broken
    assert {one.status.value for one in results} == ({"pass", "fail"} if broken else {"pass"})
    random = SimpleNamespace(operation="step", request_json=json.dumps({"type": "step", "data": {"do": "random"}}))
    with sample() as url:
        subject = SimpleNamespace(
            running=SimpleNamespace(base_url=url), runtime_evidence=SimpleNamespace(exchanges=[rows[0], random])
        )
        assert EpisodeDeterminism().run(subject).status.value == "fail"
        assert Replayability().run(subject).status.value == "pass"


@pytest.mark.parametrize("grader", [EpisodeDeterminism(), Replayability()])
def test_a_grader_fails_a_server_that_does_not_answer(grader: EpisodeDeterminism | Replayability) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        running = SimpleNamespace(base_url=f"http://127.0.0.1:{unused.getsockname()[1]}")
        reset = SimpleNamespace(operation="reset", request_json=json.dumps({"type": "reset", "data": {}}))
        result = grader.run(SimpleNamespace(running=running, runtime_evidence=SimpleNamespace(exchanges=[reset])))
    assert result.status.value == "fail"
    assert running.base_url.removeprefix("http://127.0.0.1:") in result.evidence[0]


# Small parts


def test_a_probe_is_guessed_from_the_schema() -> None:
    assert guess({"properties": {"n": {}, "do": {}, "metadata": {}}})[0] == "tally"
    two = {"properties": {"x": {"type": "integer"}, "move": {"enum": ["a", "b"]}}, "required": ["x", "move"]}
    name, probe = guess(two)
    assert name == "guessed from /schema" and probe.step[0] == {"x": 0, "move": "a"} and probe.step[1]["x"] == 1


def test_a_probe_file_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"steps": []}')
    with pytest.raises(ValueError, match="a probe is an object with fields"):
        Probe.read(tmp_path / "p.json")


def test_texts_keep_their_bytes() -> None:
    text = '{"a" : 1.0 , "data":{"x":[1, 2],"y":"}"}}'
    assert members(text) == {"a": "1.0", "data": '{"x":[1, 2],"y":"}"}'}
    assert elements('[ {"a":1} , {"b":[2]} ]') == ['{"a":1}', '{"b":[2]}']


def test_checks_keep_their_order() -> None:
    with sample() as url:

        async def main() -> list[Result]:
            target = Target(url)
            await prepared(target)
            return await run(target, selected(RFCS, None, ("R-015-1", "R-014-1", "R-016-17")), jobs=3)

        assert [one.statement for one in asyncio.run(main())] == ["R-014-1", "R-015-1", "R-016-17"]
