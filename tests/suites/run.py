"""Runs one suite, and a failed test of it once more, alone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .table import ROOT, Suite

LOGS = ROOT / ".cache/ci"
ENVIRONMENTS = ".cache/venv/bin/python -I scripts/environments.py"
UNAVAILABLE = 69
"""Exit status of a command that cannot run on this machine, as in sysexits.h."""
OPENENV = "scripts/openenv_source.sh --where"
"""Succeeds where OpenEnv's source was exported for the tests."""
NO_TESTS = 5
"""Exit status of pytest if it collected no tests."""


@dataclass(kw_only=True)
class Result:
    """What became of a suite.

    Args:
        suite: The suite.
        status: ``passed``, ``failed``, ``not run`` or ``unchanged``.
        why: The reason if it was not run, or what to add to the status.
        key: Key of the suite; empty if it has none.
        seconds: Time that it took.
        passed: Number of tests that passed.
        failed: Node ids of tests that failed, each with its output. The name of a suite stands for a command.
        flaky: Node ids of tests that failed, and passed when they were run again.
        skipped: Reasons, each with the number of tests that were skipped for it.
        cpu_s: Test files, each with the processor time that its tests took.
    """

    suite: Suite
    status: str = "passed"
    why: str = ""
    key: str = ""
    seconds: float = 0.0
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    flaky: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    cpu_s: Counter[str] = field(default_factory=Counter)


class Processes:
    """The processes that run now, to end them with this one."""

    def __init__(self) -> None:
        self._live: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.RLock()  # a signal's handler takes it in the thread that may hold it
        self._ended = False

    def call(self, command: list[str], log: Path, *, shown: bool) -> int:
        """Run a command in a process group of its own, with its output in a file, and return its exit status.

        Args:
            command: Program and arguments.
            log: File that gets the output, behind what it has.
            shown: Whether the output goes to this process's output, too.
        """
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            with self._lock:
                if self._ended:
                    return 128 + signal.SIGTERM
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if shown else file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._live.add(process)
            try:
                if process.stdout is not None:
                    while part := process.stdout.read1(65536):  # type: ignore[attr-defined]
                        file.write(part)
                        os.write(1, part)
                return process.wait()
            finally:
                with self._lock:
                    self._live.discard(process)

    def end(self) -> None:
        """End all processes and start no more: SIGTERM, and SIGKILL to what is left after ten seconds."""
        with self._lock:
            self._ended = True
            live = list(self._live)
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in live:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
            for _ in range(100):
                if all(process.poll() is not None for process in live):
                    break
                time.sleep(0.1)


def pytest_command(suite: Suite, outcomes: Path, workers: int, tests: list[str] | None = None) -> list[str]:
    """Return the command that runs a suite's tests, or some of them."""
    engine = ["docker/engine.sh", "run", "--"] if suite.engine and not os.environ.get("ERRATA_ENGINE") else []
    command = [
        *engine,
        suite.python,
        "-m",
        "pytest",
        "-p",
        "tests.suites.plugin",
        f"--suite={suite.select or suite.name}",
    ]
    command += [f"--outcomes={outcomes}", "-rs", "-n", str(workers), "--dist=loadfile", "--no-loadscope-reorder"]
    return [*command, *suite.options, *(f"--ignore-glob={one}" for one in suite.ignore), *(tests or suite.tests)]


def run(suite: Suite, processes: Processes, workers: int, *, shown: bool) -> Result:
    """Run a suite.

    Args:
        suite: The suite.
        processes: What runs its commands.
        workers: Number of processes for its tests.
        shown: Whether its output is shown while it runs.

    Returns:
        What became of it, before any test is run again.
    """
    result = Result(suite=suite)
    log = LOGS / f"{suite.name}.log"
    log.unlink(missing_ok=True)
    outcomes = LOGS / f"{suite.name}.json"
    outcomes.unlink(missing_ok=True)
    began = time.monotonic()
    before = [f"{ENVIRONMENTS} {' '.join(suite.environments)}"] if suite.environments else []
    if suite.openenv and processes.call(["bash", "-c", OPENENV], log, shown=False):
        result.status, result.why = "not run", "OpenEnv's source is not here: make openenv-source FROM=DIR"
        return result
    for script in (*before, *suite.scripts):
        if processes.call(["bash", "-c", script], log, shown=shown):
            result.status, result.failed = "failed", {suite.name: _tail(log)}
            return result
    if suite.tests:
        status = processes.call(pytest_command(suite, outcomes, workers), log, shown=shown)
        _read(result, outcomes)
    else:
        status = processes.call([part.format(jobs=workers) for part in suite.command], log, shown=shown)
        result.passed = 1 - bool(status)
    result.seconds = time.monotonic() - began
    if status == UNAVAILABLE and not os.environ.get("REQUIRE_ALL"):
        result.status, result.why = "not run", _tail(log, 1).strip()
    elif status or (suite.tests and not outcomes.exists()):
        result.status = "failed"
        result.failed = result.failed or {suite.name: f"exit status {status}\n{_tail(log)}"}
    return result


def run_again(result: Result, processes: Processes) -> None:
    """Run each failed test of a suite once more, alone, and say in the result which of them passed.

    Nothing is repeated of a suite that is a command, or of one that could not collect its tests.
    """
    suite = result.suite
    if not suite.tests or any("::" not in test for test in result.failed):
        return
    for number, test in enumerate(list(result.failed)):
        outcomes = LOGS / f"{suite.name}-again-{number}.json"
        outcomes.unlink(missing_ok=True)
        command = pytest_command(suite, outcomes, 1, [test])
        status = processes.call(command, LOGS / f"{suite.name}-again.log", shown=False)
        again = Result(suite=suite)
        _read(again, outcomes)
        if status == 0 and again.passed:
            result.flaky.append(test)
            result.passed += 1
            (LOGS / f"{suite.name}-flaky-{number}.log").write_text(f"{test}\n{result.failed.pop(test)}\n", "utf-8")
    if not result.failed:
        result.status = "passed"


def _read(result: Result, outcomes: Path) -> None:
    if outcomes.exists():
        told: dict[str, Any] = json.loads(outcomes.read_text(encoding="utf-8"))
        result.passed, result.failed = told["passed"], told["failed"]
        result.skipped, result.cpu_s = Counter(told["skipped"]), Counter(told["cpu_s"])


def _tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
