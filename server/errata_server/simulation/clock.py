"""Wall time of a simulation: its event loop's, counted from a fixed moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..clock import Clock

EPOCH_S = 1_700_000_000.0
"""What `SimulatedClock.time` says at the loop's 0."""


class SimulatedClock(Clock):
    """Clock in virtual time.

    Args:
        now: Seconds of virtual time; by default those of the event loop that runs.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now

    def time(self) -> float:
        return EPOCH_S + self.monotonic()

    def monotonic(self) -> float:
        return self._now() if self._now is not None else asyncio.get_running_loop().time()
