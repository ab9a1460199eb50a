"""The wall clock of a simulation: the time of its event loop, counted from a fixed moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..clock import Clock

EPOCH_S = 1_700_000_000.0
"""`SimulatedClock.time` at time 0 of the event loop."""


class SimulatedClock(Clock):
    """A clock in virtual time.

    Args:
        now: Returns the virtual time in seconds; None for the time of the running event loop.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now

    def time(self) -> float:
        return EPOCH_S + self.monotonic()

    def monotonic(self) -> float:
        return self._now() if self._now is not None else asyncio.get_running_loop().time()
