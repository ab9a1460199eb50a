"""The kit does not blame a server for delays of a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

import pytest

from errata_conformance.results import Broken, NotTested
from errata_conformance.server_side import stalls
from errata_conformance.server_side.stalls import ATTEMPTS, MEASUREMENTS, Stalls, ensure_prompt

LONG_S, SHORT_S = 1e6, 1e-9
"""Slow steps beside which each delay of this machine is small, and is large."""


async def stalled() -> None:
    await asyncio.sleep(0.02)
    time.sleep(0.2)  # noqa: ASYNC251 - the stall
    await asyncio.sleep(0.02)


class Measured:
    """Measurements of a server, made up.

    Args:
        early: What each of them finds; the last one is found again.
        meanwhile: What happens during each.
    """

    def __init__(self, early: Iterable[float], meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        self.early, self.meanwhile, self.count = list(early), meanwhile, 0

    async def __call__(self) -> dict[str, float]:
        self.count += 1
        if self.meanwhile is not None:
            await self.meanwhile()
        return {"a read": LONG_S, "a step": self.early[min(self.count, len(self.early)) - 1]}


async def soon() -> None:
    """Answer at once."""


async def test_a_stall_of_the_event_loop_is_measured() -> None:
    async with Stalls() as seen:
        await stalled()
    assert seen.longest_s > 0.15


async def test_one_measurement_with_early_answers_is_enough() -> None:
    measured = Measured([*[0.0] * (MEASUREMENTS - 1), LONG_S])
    await ensure_prompt(LONG_S, measured, soon)
    assert measured.count == MEASUREMENTS


async def test_a_server_that_waits_on_a_quiet_machine_is_at_fault() -> None:
    measured = Measured([0.0])
    with pytest.raises(Broken, match=r"a step waited for a step: its answer came 0\.00 s before"):
        await ensure_prompt(LONG_S, measured, soon)
    assert measured.count == MEASUREMENTS


async def test_late_answers_of_a_busy_machine_are_not_the_servers_fault() -> None:
    measured = Measured([0.0])
    with pytest.raises(NotTested, match="less busy machine"):
        await ensure_prompt(SHORT_S, measured, lambda: asyncio.sleep(0.001))
    assert measured.count == ATTEMPTS


async def test_early_answers_that_were_measured_in_a_stall_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "ATTEMPTS", 2)
    measured = Measured([LONG_S], stalled)
    with pytest.raises(NotTested, match="less busy machine"):
        await ensure_prompt(0.4, measured, soon)
    assert measured.count == 2


async def test_late_answers_that_were_measured_in_a_stall_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "ATTEMPTS", MEASUREMENTS)
    measured = Measured([0.0], stalled)
    with pytest.raises(NotTested, match=f"{MEASUREMENTS} of {MEASUREMENTS} measurements"):
        await ensure_prompt(0.4, measured, soon)


async def test_no_measurement_begins_after_45_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "GIVE_UP_S", 0.0)
    measured = Measured([0.0])
    with pytest.raises(NotTested, match="less busy machine"):
        await ensure_prompt(SHORT_S, measured, lambda: asyncio.sleep(0.001))
    assert measured.count == MEASUREMENTS
