"""The server below its doors under one seed: real Sessions, recovery and journal codec; fake clock, disk, sandbox."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from errata_protocol.errors import ErrataError

from .simulated_load import simulate

SEEDS, BLOCKS = int(os.environ.get("ERRATA_SEEDS", "200")), 10
"""ERRATA_SEEDS=100000 for a night; `python -m tests.server.simulated_load SEED` shows the trace of a failing one."""

FOUND = ()
"""Seeds that failed once; they stay."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_acknowledged_step_is_there_once_wherever_the_server_goes_down(
    block: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "errata")  # an injected fault is no news
    crashed = acknowledged = 0
    for seed in [*range(block, SEEDS, BLOCKS), *FOUND]:
        try:
            trace = simulate(seed).trace
        except Exception as error:
            error.add_note(f"seed {seed}: python -m tests.server.simulated_load {seed}")
            raise
        crashed += sum("crash at step" in line for line in trace)
        acknowledged += sum(" t=" in line for line in trace)
    assert crashed >= SEEDS // BLOCKS // 2 and acknowledged >= 20 * SEEDS // BLOCKS, "the schedule tests something"


def test_a_disk_that_lies_about_syncs_is_found_out() -> None:
    """The control: with syncs that do nothing, the same load finds lost steps."""
    caught = 0
    for seed in range(20):
        try:
            simulate(seed, honours_sync=False)
        except (AssertionError, ErrataError):
            caught += 1
    assert caught >= 10


def test_the_same_seed_is_the_same_trace_in_every_process() -> None:
    """Another hash seed gives sets another order: nothing may hang on it."""
    command = [sys.executable, "-m", "tests.server.simulated_load", "11", "12"]
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
    here = simulate(11).trace
    assert here == simulate(11).trace and here + simulate(12).trace == there
    assert len(here) > 20 and simulate(12).trace != here


def test_hours_of_the_server_pass_in_no_time() -> None:
    ends = [float(simulate(seed).trace[-1].split()[1]) for seed in range(3)]
    assert max(ends) > 600  # in real time they would exceed pytest's limit
