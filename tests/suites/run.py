"""Runs one suite, and a failed test of it once more, alone."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import threading
import time
import traceback
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
OPENENV_ABSENT = "make openenv-source"
"""Part of the reason for which tests are skipped without that source."""
FAILED_TESTS = 1
"""Exit status of pytest if tests failed and nothing else went wrong."""
TIMED_OUT = 124
"""Exit status of a command that took longer than its suite may."""
OUT_OF_TIME = 125
"""Exit status of a command that was ended, or not begun, because the run's time was up."""
NO_TIME = "the time of this run was up"
HANG_LINES = 600
"""Lines shown of the output of a suite that hung: the stacks of all its threads."""
STACKS_S = 5.0
"""Seconds in which a suite that hangs prints where each of its threads is."""
TEARDOWN_S = 60.0
"""Seconds in which an interrupted suite ends what its tests have started."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""A variable that suites do without: each of their processes would compile all that it imports, tests twice."""
REQUIRE_ALL = bool(os.environ.get("REQUIRE_ALL"))
"""Whether what this machine lacks is a failure: a test skipped for an unexpected reason, an engine that cannot run."""


@dataclass(kw_only=True)
class Result:
    """What became of a suite.

    Args:
        suite: The suite.
        status: ``failed``, ``passed``, ``not run`` or ``unchanged``.
        why: The reason if it was not run, or what to add to the status.
        key: Key of the suite; empty if it has none.
        seconds: Time that the suite took.
        passed: Number of tests that passed.
        failed: Node ids of tests that failed, each with its output. The name of a suite stands for a command.
        flaky: Node ids of tests that failed, and passed when they were run again.
        skipped: Reasons, each with the number of tests that were skipped for it.
        cpu_s: Test files, each with the processor time that its tests took.
    """

    suite: Suite
    status: str = "failed"
    why: str = ""
    key: str = ""
    seconds: float = 0.0
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    flaky: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    cpu_s: Counter[str] = field(default_factory=Counter)


class Processes:
    """The processes that run now, to end them with this one.

    Args:
        until: Time, as of ``time.monotonic``, at which commands that may be left unfinished are ended.
    """

    def __init__(self, until: float = math.inf) -> None:
        self._until = until
        self._live: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self.ended = False
        """Whether no more processes are started."""

    def left_s(self) -> float:
        """Return the seconds until commands that may be left unfinished are ended."""
        return self._until - time.monotonic()

    def call(
        self, command: list[str], log: Path, *, shown: bool, timeout_s: float, may_be_unfinished: bool = False
    ) -> int:
        """Run a command in a process group of its own, with its output in a file, and return its exit status.

        Args:
            command: Program and arguments.
            log: File that gets the output, behind what it has.
            shown: Whether the output goes to this process's output, too.
            timeout_s: Seconds after which the process group prints its stacks and is killed; the status is 124 then.
            may_be_unfinished: Whether the process group is interrupted at ``until``; the status is 125 then.
        """
        left_s = self._until - time.monotonic() if may_be_unfinished else math.inf
        if left_s <= 0:
            return OUT_OF_TIME
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            with self._lock:
                if self.ended:
                    return 128 + signal.SIGTERM
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={name: os.environ[name] for name in os.environ if name != NO_BYTECODE},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if shown else file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._live.add(process)
            late = threading.Event()

            def end() -> None:
                late.set()
                if left_s < timeout_s:
                    _signal(process, signal.SIGINT)
                else:
                    _signal(process, signal.SIGABRT)  # pytest's processes then print the stacks of their threads
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TEARDOWN_S if left_s < timeout_s else STACKS_S)
                _signal(process, signal.SIGKILL)

            timer = threading.Timer(min(timeout_s, left_s), end)
            timer.daemon = True
            timer.start()
            try:
                if process.stdout is not None:
                    while part := process.stdout.read1(65536):  # type: ignore[attr-defined]
                        file.write(part)
                        os.write(1, part)
                status = process.wait()
                if late.is_set():
                    timer.join()
                    if left_s < timeout_s:
                        return OUT_OF_TIME
                    file.write(f"did not end within {timeout_s:g} s\n".encode())
                    return TIMED_OUT
                return status
            finally:
                timer.cancel()
                with self._lock:
                    self._live.discard(process)

    def end(self) -> None:
        """End all processes and start no more: SIGTERM, and SIGKILL to what is left after a minute.

        It waits for a process that another thread is starting, so that thread must not be the caller's.
        """
        with self._lock:
            self.ended = True
            live = list(self._live)
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in live:
                _signal(process, sent)
            for _ in range(600):
                if all(process.poll() is not None for process in live):
                    break
                time.sleep(0.1)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def starts_engine(suite: Suite) -> bool:
    """Return whether an engine is started for a suite: it needs one, and the caller has named none."""
    return bool(suite.engine) and not os.environ.get("ERRATA_ENGINE")


def engine_directory(suite: Suite) -> Path:
    """Return the directory of the engine that is started for a suite."""
    return ROOT / f".cache/engine-{suite.engine}"


def engine_up(suite: Suite) -> list[str]:
    """Return the command that starts the engine for a suite, unless it runs."""
    return ["docker/engine.sh", "up", str(engine_directory(suite))]


def start_engine(suite: Suite, processes: Processes) -> None:
    """Start the engine for a suite. Where it cannot run, the suite itself says why when it asks again."""
    processes.call(engine_up(suite), LOGS / f"engine-{suite.engine}.log", shown=False, timeout_s=suite.timeout_s)


def stop_engine(suite: Suite) -> None:
    """Stop the engine that was started for a suite, and remove what it has built."""
    with (LOGS / f"engine-{suite.engine}.log").open("ab") as log:
        command = ["docker/engine.sh", "down", str(engine_directory(suite))]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)


def own_network() -> tuple[str, ...]:
    """Return what runs the command behind it in a network with loopback alone; nothing without the right."""
    up = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    can = subprocess.run([*up, "true"], capture_output=True, check=False).returncode == 0
    return up if can else ()


def pytest_command(suite: Suite, outcomes: Path, workers: int, tests: list[str] | None = None) -> list[str]:
    """Return the command that runs a suite's tests, or some of them."""
    address = f"unix://{engine_directory(suite)}/sock"
    command = [
        *(("env", f"DOCKER_HOST={address}", f"ERRATA_ENGINE={address}") if starts_engine(suite) else ()),
        *(own_network() if suite.own_network else ()),
        suite.python,
        "-m",
        "pytest",
        "-p",
        "tests.suites.plugin",
        f"--suite={suite.select or suite.name}",
    ]
    command += [f"--outcomes={outcomes}", "-rs", "-n", str(workers), "--dist=loadfile", "--no-loadscope-reorder"]
    return [*command, *suite.options, *(f"--ignore-glob={one}" for one in suite.ignore), *(tests or suite.tests)]


def run(result: Result, processes: Processes, workers: int, *, shown: bool) -> None:
    """Run a suite, and say in its result what became of it before any test is run again.

    Args:
        result: The suite's result.
        processes: What runs the suite's commands.
        workers: Number of processes for the suite's tests.
        shown: Whether the suite's output is shown while it runs.
    """
    began = time.monotonic()
    try:
        _run(result, processes, workers, shown=shown)
    except Exception:  # of the machine, such as a full disk: it has to be a failure, not a thread that ends
        result.failed = {result.suite.name: traceback.format_exc()}
    result.seconds = time.monotonic() - began
    if result.failed:
        result.status = "failed"


def _run(result: Result, processes: Processes, workers: int, *, shown: bool) -> None:
    suite = result.suite
    log = LOGS / f"{suite.name}.log"
    log.unlink(missing_ok=True)
    outcomes = LOGS / f"{suite.name}.json"
    outcomes.unlink(missing_ok=True)

    def call(command: list[str], *, shown: bool) -> int:
        late = suite.may_wait
        return processes.call(command, log, shown=shown, timeout_s=suite.timeout_s, may_be_unfinished=late)

    if suite.openenv and call(["bash", "-c", OPENENV], shown=False) == UNAVAILABLE:
        result.status, result.why = "not run", "OpenEnv's source is not here: make openenv-source FROM=DIR"
        return
    before = [f"{ENVIRONMENTS} {' '.join(suite.environments)}"] if suite.environments else []
    for script in (*before, *suite.scripts):
        if status := call(["bash", "-c", script], shown=shown):
            if status == OUT_OF_TIME:
                result.status, result.why = "not run", NO_TIME
            else:
                result.failed = {suite.name: _tail(log)}
            return
    status = call(engine_up(suite), shown=shown) if starts_engine(suite) else 0
    if not status and suite.tests:
        status = call(pytest_command(suite, outcomes, workers), shown=shown)
        _read(result, outcomes)
    elif not status:
        status = call([part.format(jobs=workers) for part in suite.command], shown=shown)
        result.passed = 1 - bool(status)
    if status == OUT_OF_TIME:
        result.status, result.why = "not run", NO_TIME
    elif status == UNAVAILABLE and not REQUIRE_ALL:
        result.status, result.why = "not run", _tail(log, 1).strip()
    elif status not in (0, FAILED_TESTS) or bool(status) != bool(result.failed) or not (result.passed or result.failed):
        shown_lines = HANG_LINES if status == TIMED_OUT else 60
        result.failed[suite.name] = f"exit status {status}\n{_tail(log, shown_lines)}"
    else:
        result.status = "passed"
        if REQUIRE_ALL and (reasons := unexpected(result)):
            result.failed[f"{suite.name}: skipped"] = "\n".join(reasons)


def unexpected(result: Result) -> list[str]:
    """Return the reasons for which tests were skipped that the suite's ``skips`` do not allow."""
    allowed = (*result.suite.skips, OPENENV_ABSENT)
    return [reason for reason in result.skipped if not any(re.search(one, reason) for one in allowed)]


def run_again(result: Result, processes: Processes) -> None:
    """Run each failed test of a suite once more, alone, and say in the result which of them passed.

    Nothing is repeated of a suite that is a command, or that failed in another way than by tests.
    """
    suite = result.suite
    if any("::" not in test for test in result.failed):
        return
    for number, test in enumerate(list(result.failed)):
        outcomes = LOGS / f"{suite.name}-again-{number}.json"
        outcomes.unlink(missing_ok=True)
        log = LOGS / f"{suite.name}-again.log"
        status = processes.call(pytest_command(suite, outcomes, 1, [test]), log, shown=False, timeout_s=suite.timeout_s)
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
