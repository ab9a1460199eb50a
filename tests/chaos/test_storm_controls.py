"""A storm finds what a server loses, does twice or forgets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .storm import Plan, Storm
from .storm_checks import COUNTERS

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

CONTROL = {"sessions": 12, "sockets": 2, "at_once": 6, "seconds": 1.0, "kills": 1, "calmer": 0}


async def test_control_a_snapshot_that_is_behind_is_found_as_lost_steps(tmp_path: Path) -> None:
    report = await Storm(Plan(COUNTERS + "LateSnapshotCounter", **CONTROL), tmp_path / "data").run()
    assert report.lost and not report.twice, report


async def test_control_a_restore_that_acts_is_found_as_steps_that_acted_twice(tmp_path: Path) -> None:
    report = await Storm(Plan(COUNTERS + "TwiceCounter", **CONTROL), tmp_path / "data").run()
    assert report.twice and not report.lost, report


async def test_control_a_journal_that_goes_back_in_time_is_found_as_ended_sessions(tmp_path: Path) -> None:
    """As a disk that lies about syncs: what it forgot cannot be continued, and is told instead of done again."""
    data, older = tmp_path / "data", tmp_path / "older"
    kept: list[Path] = []

    def go_back() -> None:
        if kept:
            shutil.rmtree(data)
            shutil.copytree(older, data)
        else:
            shutil.copytree(data, older)
            kept.append(older)

    plan = Plan(COUNTERS + "TaggedCounter", **CONTROL | {"kills": 2, "seconds": 6.0})
    report = await Storm(plan, data, on_killed=go_back).run()
    assert report.ended["SESSION_LOST"] and not report.lost and not report.twice, report
