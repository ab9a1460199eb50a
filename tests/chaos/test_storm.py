"""Everything fails at once, and nothing acknowledged is lost, acts twice or stays away (PROTOCOL E3)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from .small_disk import small_disk
from .storm import Plan, Report, Storm

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

COUNTERS = "tests.chaos.environments:"
SEED = {"seed": int(os.environ["ERRATA_CHAOS_SEED"])} if "ERRATA_CHAOS_SEED" in os.environ else {}


def check(report: Report) -> None:
    print(report.as_json())
    assert report.broken == {}, report
    full = ("No space left", "disk is full", "kept for the journal")
    told = [line for line in report.log if not any(words in line for words in full)]
    assert told == [], "an operator is told of a full disk, and of nothing else"
    assert report.least_steps > 0 and report.compared > 0 and report.resumes > report.plan.sessions


@pytest.mark.sandbox
async def test_counters_in_sandboxes_equal_what_was_acknowledged(tmp_path: Path) -> None:
    plan = Plan("terminal", sessions=60, at_once=24, seconds=40.0, kills=3, **SEED)
    with small_disk(tmp_path / "own", 2048) as disk:
        check(await Storm(plan, disk.place / "data", disk).run())


@pytest.mark.storm
async def test_counters_in_memory_equal_what_was_acknowledged(tmp_path: Path) -> None:
    plan = Plan(COUNTERS + "TaggedCounter", sessions=400, at_once=200, seconds=25.0, kills=3, **SEED)
    check(await Storm(plan, tmp_path / "data").run())


async def test_counters_of_several_workers_equal_what_was_acknowledged(tmp_path: Path) -> None:
    """A service manager starts the supervisor again at the same address; its workers have died with it."""
    workers = 4
    plan = Plan(
        COUNTERS + "TaggedCounter",
        sessions=200,
        seconds=20.0,
        kills=4,
        calmer=1,
        workers=workers,
        supervisor_kills=2,
        **SEED,
    )
    report = await Storm(plan, tmp_path / "data").run()
    check(report)
    assert report.stock_steps > 0 and report.stock_ended, "clients of OpenEnv played, and lost sockets"
    assert len(list((tmp_path / "data/shards/sockets").iterdir())) == workers, "sockets of the killed are replaced"


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
