"""Sandboxes, server and disk fail at once, and nothing acknowledged is lost, acts twice or stays away (PROTOCOL E3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .small_disk import small_disk
from .storm import Plan, Storm
from .storm_checks import SEED, check

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.sandbox
async def test_counters_in_sandboxes_equal_what_was_acknowledged(tmp_path: Path) -> None:
    plan = Plan("terminal", sessions=60, at_once=24, seconds=40.0, kills=3, **SEED)
    with small_disk(tmp_path / "own", 2048) as disk:
        check(await Storm(plan, disk.place / "data", disk).run())
