"""Runs a command beside busy loops and disk writers: ``python -m tests.stress.load -- COMMAND...``.

The load runs for as long as the command does, and its processes die with this one, however it ends. What they write has
no name in the file system, so nothing is left of it either.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_BLOCK_BYTES = 1024 * 1024
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMED_OUT = 124
"""Exit status when the command did not end within the limit, as timeout(1) has it."""
NOT_STARTED = 127
"""Exit status when the command could not be started, as a shell has it."""
_GRACE_S = 90.0
"""Time that a command gets between SIGTERM and SIGKILL."""


def busy_loop() -> NoReturn:
    """Keep one processor busy."""
    while True:
        pass


def disk_writer(directory: Path, size_bytes: int) -> NoReturn:
    """Write a file without a name block by block, syncing each, and start over when it has its full size."""
    block = os.urandom(_BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        while True:
            file.seek(0)
            file.truncate()
            for _ in range(max(1, size_bytes // _BLOCK_BYTES)):
                file.write(block)
                os.fsync(file.fileno())


class Load:
    """Processes that keep the machine busy, from ``with`` to its end.

    Args:
        work: What each of the processes does; none of them returns.
    """

    def __init__(self, work: Sequence[Callable[[], NoReturn]]) -> None:
        self._work = work
        self.pids: list[int] = []

    def __enter__(self) -> Load:
        parent = os.getpid()
        for work in self._work:
            pid = os.fork()
            if pid == 0:
                _run_forked(work, parent)
            self.pids.append(pid)
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)


def _run_forked(work: Callable[[], NoReturn], parent: int) -> NoReturn:
    try:
        for each in _FORWARDED:
            signal.signal(each, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it died before the call above
            work()
    except BaseException as error:
        print(f"the load ends: {error!r}", file=sys.stderr, flush=True)
    os._exit(1)


def run_beside(command: Sequence[str], most_s: float) -> int:
    """Run a command to its end, passing signals on to it and all it started in its process group.

    Args:
        command: Program and arguments.
        most_s: Seconds after which the command is ended.

    Returns:
        The exit status as a shell gives it: 128 and the signal's number after a signal; `TIMED_OUT` past the limit;
        `NOT_STARTED` when there is no such program.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # a signal that comes now is passed on, too
    try:
        running = subprocess.Popen(command, process_group=0, preexec_fn=lambda: _unblock(blocked))
    except OSError as error:
        print(f"{command[0]} could not be started: {error}", file=sys.stderr)
        return NOT_STARTED

    def forward(number: int, _: FrameType | None) -> None:
        _signal_group(running, number)

    for each in _FORWARDED:
        signal.signal(each, forward)
    _unblock(blocked)
    try:
        status = running.wait(most_s)
    except subprocess.TimeoutExpired:
        print(f"{command[0]} did not end within {most_s:g} s", file=sys.stderr)
        _signal_group(running, signal.SIGTERM)
        try:
            running.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _signal_group(running, signal.SIGKILL)
            running.wait()
        return TIMED_OUT
    return status if status >= 0 else 128 - status


def _unblock(mask: set[signal.Signals | int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _signal_group(running: subprocess.Popen[bytes], number: int) -> None:
    if running.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program of the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.load", description=__doc__)
    cores = os.cpu_count() or 1
    parser.add_argument("--busy", type=int, default=cores, help="busy loops (default: one for each core)")
    parser.add_argument("--writers", type=int, default=2, help="processes that write and sync (default: 2)")
    parser.add_argument("--file-mib", type=int, default=64, help="most that a writer holds, in MiB (default: 64)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where writers write")
    parser.add_argument("--minutes", type=float, default=60.0, help="the command is ended after these (default: 60)")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    chosen = parser.parse_args(arguments)

    def write() -> NoReturn:
        disk_writer(chosen.directory, chosen.file_mib * 1024 * 1024)

    with Load([busy_loop] * chosen.busy + [write] * chosen.writers):
        return run_beside(chosen.command, chosen.minutes * 60.0)


if __name__ == "__main__":
    sys.exit(main())
