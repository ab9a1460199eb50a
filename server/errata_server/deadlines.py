"""Deadlines of many calls at little cost: a timer each would cost more than most calls take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

COARSE_S = 5.0
"""Deadlines this far away and further are kept to within `TICK_S`; nearer ones have a timer of their own."""

TICK_S = 1.0


class Deadlines:
    """Calls back what was not removed in time.

    Args:
        loop: The event loop of all that is added.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._wheel: dict[int, dict[object, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, timeout_s: float, expire: Callable[[], None]) -> object:
        """Call ``expire`` after ``timeout_s``, up to `TICK_S` later; return what `remove` takes."""
        if timeout_s < COARSE_S:
            return self.loop.call_later(max(timeout_s, 0.0), expire)
        tick = int((self.loop.time() + timeout_s) / TICK_S) + 1
        entry = _Entry(tick)
        found = self._wheel.get(tick)
        if found is None:
            found = self._wheel[tick] = {}
        found[entry] = expire
        if self._timer is None:
            self._timer = self.loop.call_later(TICK_S, self._turn)
        return entry

    def remove(self, entry: object) -> None:
        """Forget a deadline. One that has passed may be removed too."""
        if isinstance(entry, _Entry):
            waiting = self._wheel.get(entry.tick)
            if waiting is not None:
                waiting.pop(entry, None)
        else:
            entry.cancel()  # type: ignore[attr-defined] # a timer

    def _turn(self) -> None:
        self._timer = None
        now = self.loop.time() / TICK_S
        for tick in [tick for tick, waiting in self._wheel.items() if tick <= now or not waiting]:
            for expire in self._wheel.pop(tick).values():
                expire()
        if self._wheel:
            self._timer = self.loop.call_later(TICK_S, self._turn)


class _Entry:
    __slots__ = ("tick",)

    def __init__(self, tick: int) -> None:
        self.tick = tick
