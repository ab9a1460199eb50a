"""Two boxes take turns on one directory under leases: what was acknowledged is there, once (decision 210)."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from errata_server.journal.leased import NOT_OURS, LeasedLog
from errata_server.journal.segments import SegmentLog
from errata_server.journal.writer import StoreFailed

from .simulated_boxes import POINTS, simulate

SEEDS, BLOCKS = int(os.environ.get("ERRATA_SEEDS", "200")) // 10, 4
"""`python -m tests.server.simulated_boxes SEED` shows what happened in a failing one."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_boxes_acknowledged_under_their_leases_is_there_once(block: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "errata")
    counts = Counter[str]()
    for seed in range(block, SEEDS, BLOCKS):
        try:
            counts += simulate(seed)
        except Exception as error:
            error.add_note(f"seed {seed}: python -m tests.server.simulated_boxes {seed}")
            raise
    seeds = SEEDS // BLOCKS
    assert counts["acknowledged"] > 50 * seeds and counts["taken over"] > 5 * seeds, counts
    assert min(counts[point] for point in POINTS) > 0, "an owner was stopped at each point"
    assert counts["found after its answer was lost"] > 0 and counts["written and ignored"] > 0, counts


def test_without_the_look_after_the_sync_acknowledged_deliveries_are_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same boxes, with a look before each write only."""
    caplog.set_level("CRITICAL", "errata")

    def append(log: LeasedLog, body: bytes) -> tuple[int, int]:
        if not log._is_ours():
            raise StoreFailed(NOT_OURS)
        return SegmentLog.append(log, body)

    monkeypatch.setattr(LeasedLog, "append", append)
    caught = 0
    for seed in range(12):
        try:
            simulate(seed)
        except AssertionError:
            caught += 1
    assert caught >= 4
