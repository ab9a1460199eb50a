"""Workers and their supervisor are killed, and nothing acknowledged is lost, acts twice or stays away (PROTOCOL E3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .storm import Plan, Storm
from .storm_checks import COUNTERS, SEED, check

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


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
