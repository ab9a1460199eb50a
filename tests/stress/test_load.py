"""The load runs while its command does, works, and ends with it: counted in processes and in what they did."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .load import NOT_STARTED, TIMED_OUT

ROOT = Path(__file__).parents[2]

# Prints the load's processes, 3 busy loops and then 2 writers, once each has worked since the command began.
WATCHES = """
import os, sys, time
def busy(pid): return int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[11])
def written(pid): return int(open(f"/proc/{pid}/io").read().split("wchar: ")[1].split()[0])
load = os.getppid()
pids = [int(pid) for pid in open(f"/proc/{load}/task/{load}/children").read().split()]
pids = sorted(pid for pid in pids if pid != os.getpid())
counters = [(busy, pid) for pid in pids[:3]] + [(written, pid) for pid in pids[3:]]
before = [count(pid) for count, pid in counters]
while not all(count(pid) > 0 and count(pid) > least for (count, pid), least in zip(counters, before)):
    time.sleep(0.01)
print(*pids, flush=True)
"""


def beside(command: str, *options: str) -> subprocess.Popen[str]:
    arguments = ["--busy", "3", "--writers", "2", "--file-mib", "2", *options, "--", sys.executable, "-c", command]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stress.load", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def pids_of(line: str) -> list[int]:
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 5
    return pids


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", 137), ("os.kill(os.getpid(), 15)", 143)],
)
def test_the_load_works_while_its_command_runs_and_ends_with_it(tmp_path: Path, end: str, status: int) -> None:
    load = beside(WATCHES + end, "--directory", str(tmp_path))
    out, _ = load.communicate()
    assert load.returncode == status
    assert alive(pids_of(out)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_command_and_the_load(tmp_path: Path, number: signal.Signals) -> None:
    with beside(WATCHES + "signal = __import__('signal'); signal.pause()", "--directory", str(tmp_path)) as load:
        assert load.stdout is not None
        pids = pids_of(load.stdout.readline())
        assert alive(pids) == pids
        load.send_signal(number)
        assert load.wait() == 128 + number
    assert alive(pids) == []
    assert list(tmp_path.iterdir()) == []


def test_the_load_ends_when_it_is_killed_itself(tmp_path: Path) -> None:
    with beside(WATCHES + "sys.stdin.read()", "--directory", str(tmp_path)) as load:
        assert load.stdout is not None
        running = [os.pidfd_open(pid) for pid in pids_of(load.stdout.readline())]
        load.kill()
        for each in running:  # readable when the process has ended
            select.select([each], [], [])
            os.close(each)
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_does_not_end_is_ended_at_the_limit() -> None:
    load = beside("import signal; signal.pause()", "--minutes", "0.001")
    _, told = load.communicate()
    assert load.returncode == TIMED_OUT and "did not end within 0.06 s" in told


def test_a_command_that_is_not_there_is_named_and_the_load_ends() -> None:
    command = [sys.executable, "-m", "tests.stress.load", "--busy", "1", "--writers", "0", "--", "./no-such-program"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == NOT_STARTED and "./no-such-program could not be started" in done.stderr


def test_a_command_leads_a_process_group_that_the_load_is_not_in() -> None:
    load = beside("import os; print(os.getpid() == os.getpgrp() != os.getpgid(os.getppid()))")
    assert load.communicate()[0] == "True\n"
