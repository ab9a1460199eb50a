"""Limits of an endpoint: how many at once, how many a minute, and a pause for all; in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from errata_server.simulation import simulated
from errata_trainer.teachers.limits import Limits


async def times(limits: Limits, calls: int) -> list[float]:
    """Return when calls that arrive at once begin, in seconds from now."""
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def call() -> float:
        async with limits.slots:
            await limits.pace()
            return loop.time() - begun

    return await asyncio.gather(*(call() for _ in range(calls)))


@simulated
async def test_calls_of_a_minute_are_spaced_evenly() -> None:
    found = await times(Limits(concurrency=9, per_minute=1200), 4)
    assert found == pytest.approx([0.0, 0.05, 0.1, 0.15])


@simulated
async def test_without_a_rate_nobody_waits_and_a_pause_is_for_all() -> None:
    limits = Limits(concurrency=9)
    assert await times(limits, 9) == [0.0] * 9
    limits.pause(0.2)
    limits.pause(0.1)
    assert await times(limits, 9) == pytest.approx([0.2] * 9)


@simulated
async def test_a_pause_that_grows_meanwhile_is_waited_out() -> None:
    limits = Limits()
    limits.pause(0.1)
    waiting = asyncio.create_task(times(limits, 1))
    await asyncio.sleep(0)
    limits.pause(0.3)
    assert await waiting == pytest.approx([0.3])


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"per_minute": 0}])
def test_limits_that_admit_nobody_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Limits(**options)
