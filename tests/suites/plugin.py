"""A pytest plugin that selects the tests of one suite, and writes what became of them.

The options are ``--suite`` and ``--outcomes``; ``pytest -p tests.suites.plugin`` loads it.

A test is of the suite whose name it carries as a mark. The mark ``sandbox`` also says what a test needs: it names the
suite of tests that have no other. Tests without a mark are the suite ``fast``.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.slowest_files import CPU_S

from .table import DEFAULT, ROOT, SANDBOX, marks

HANG_S = 60.0
"""Seconds after a test's timeout in which pytest-timeout has to have ended it."""
MOST_WRITTEN_EARLY = 100
"""Number of failed tests up to which each is written at once, with all before it."""
STDERR = os.dup(2)
"""Standard error as it is before pytest captures it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption("--suite", metavar="NAME", help="run the tests of this suite only (tests/suites/suites.toml)")
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="write what became of the tests, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes where ``--outcomes`` asks for it, but not in the processes of pytest-xdist."""
    file = config.getoption("--outcomes")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(file))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process, with the stacks of its threads, if a test hangs and pytest-timeout does not end it either.

    That plugin needs the interpreter's lock and open streams to end a test; faulthandler's thread needs neither.
    pytest-xdist then starts another process for the tests that are left.
    """
    mark = item.get_closest_marker("timeout")
    known = item.config.pluginmanager.hasplugin("timeout")
    timeout_s = float(mark.args[0] if mark and mark.args else (known and item.config.getini("timeout")) or 0)
    if timeout_s:
        faulthandler.dump_traceback_later(timeout_s + HANG_S, exit=True, file=STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Return what gives the tests to pytest-xdist's workers; None for its own, of another ``--dist``."""
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


class Scheduling(LoadFileScheduling):
    """``--dist=loadfile`` that outlives a worker which a test ends.

    pytest-xdist 3.8 gives that worker's files to the next one from the first on. One that is done has no test for it,
    so it waits, and the run with it. The test that ended the worker is run again, too, and ends one after the other.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker, and return the test that ended it, or None where it had done all of its tests."""
        files = self.assigned_work[node]
        ended_it = next((test for tests in files.values() for test, done in tests.items() if not done), None)
        if ended_it is not None:
            files[self._split_scope(ended_it)][ended_it] = True
        self.assigned_work[node] = {file: tests for file, tests in files.items() if not all(tests.values())}
        super().remove_node(node)
        return ended_it


@pytest.hookimpl(trylast=True)  # after directories have marked their tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of ``--suite``."""
    if name := config.getoption("--suite"):
        config.hook.pytest_deselected(items=select(items, name))


def suite_of(item: pytest.Item, paths: dict[str, tuple[str, ...]]) -> str:
    """Return the mark of a test's suite: its closest one, that of a function before that of its module.

    A test that lies where its suite collects none is of ``fast``, so that it is run somewhere.

    Args:
        item: The test.
        paths: Marks of suites, each with the paths in which its tests are collected.
    """
    names = [mark.name for mark in item.iter_markers() if mark.name in paths]
    name = next((name for name in names if name != SANDBOX), names[0] if names else DEFAULT)
    collected = any(item.path.is_relative_to(ROOT / path) for path in paths.get(name, ()))
    return name if collected else DEFAULT


def select(items: list[pytest.Item], name: str) -> list[pytest.Item]:
    """Remove the tests of other suites from a list, and return them."""
    paths = marks()
    removed = [item for item in items if suite_of(item, paths) != name.replace("-", "_")]
    dropped = set(map(id, removed))
    items[:] = [item for item in items if id(item) not in dropped]
    return removed


class Outcomes:
    """A pytest plugin that writes a file at the end of the run.

    Args:
        file: The file, JSON: ``passed`` (number of tests), ``failed`` (node id to output), ``skipped`` (reason to
            number of tests), ``cpu_s`` (test file to seconds of processor time).
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed: set[str] = set()
        self._failed: dict[str, str] = {}
        self._skipped: Counter[str] = Counter()
        self._cpu: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a report. With pytest-xdist the reports come from its workers."""
        file = report.nodeid.partition("::")[0]
        self._cpu[file] += dict(report.user_properties).get(CPU_S, 0.0)  # type: ignore[arg-type, call-overload]
        if report.failed:
            self._failed[report.nodeid] = "\n".join(_texts(report))
            self._passed.discard(report.nodeid)
            if len(self._failed) <= MOST_WRITTEN_EARLY:
                self._write()  # known also if the run does not come to its end
        elif report.skipped and not hasattr(report, "wasxfail"):
            self._skipped[_reason(report)] += 1
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that could not be imported as a failed test."""
        if report.failed:
            self._failed[report.nodeid] = "\n".join(_texts(report))

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._write()

    def _write(self) -> None:
        told = {
            "passed": len(self._passed),
            "failed": self._failed,
            "skipped": dict(self._skipped),
            "cpu_s": dict(self._cpu),
        }
        self._file.write_text(json.dumps(told), encoding="utf-8")


def _texts(report: Any) -> Iterator[str]:
    yield report.longreprtext
    for title, text in report.sections:
        yield f"--- {title}\n{text[-4000:]}"


def _reason(report: pytest.TestReport) -> str:
    told = report.longrepr
    text = told[2] if isinstance(told, tuple) else str(told)
    return text.removeprefix("Skipped: ")
