"""Everything fails at once, and nothing acknowledged is lost, acts twice or stays away (PROTOCOL E3)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .storm import Plan, Storm
from .storm_checks import COUNTERS, SEED, check

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.storm
async def test_counters_in_memory_equal_what_was_acknowledged(tmp_path: Path) -> None:
    plan = Plan(COUNTERS + "TaggedCounter", sessions=400, at_once=200, seconds=25.0, kills=3, **SEED)
    check(await Storm(plan, tmp_path / "data").run())
