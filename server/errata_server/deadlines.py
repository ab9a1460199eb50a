"""Deadlines of many calls at little cost: a timer each would cost more than most calls take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

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
        self._lanes: dict[float, dict[_Entry, float]] = {}  # by timeout: in each, who came first is due first
        self._timer: asyncio.TimerHandle | None = None

    def add(self, timeout_s: float, expire: Callable[[], None]) -> object:
        """Call ``expire`` after ``timeout_s``, up to `TICK_S` later; return what `remove` takes."""
        if timeout_s < COARSE_S:
            return self.loop.call_later(max(timeout_s, 0.0), expire)
        lane = self._lanes.get(timeout_s)
        if lane is None:
            lane = self._lanes[timeout_s] = {}
            if self._timer is None:
                self._timer = self.loop.call_later(TICK_S, self._look)
        entry = _Entry(lane, expire)
        lane[entry] = self.loop.time() + timeout_s
        return entry

    def remove(self, entry: object) -> None:
        """Forget a deadline. One that has passed may be removed too."""
        if isinstance(entry, _Entry):
            entry.lane.pop(entry, None)
            entry.expire = _nothing  # or the entry and its owner hold each other until the garbage collector comes by
        else:
            entry.cancel()  # type: ignore[attr-defined] # a timer

    def _look(self) -> None:
        self._timer = None
        now = self.loop.time()
        due: list[_Entry] = []
        for timeout_s, lane in list(self._lanes.items()):
            for entry, deadline in lane.items():
                if deadline > now:
                    break
                due.append(entry)
            if not lane:
                del self._lanes[timeout_s]
        for entry in due:
            if entry.lane.pop(entry, None) is not None:
                entry.expire()
        if self._lanes:
            self._timer = self.loop.call_later(TICK_S, self._look)


def _nothing() -> None:
    """Expire nothing."""


class _Entry:
    __slots__ = ("expire", "lane")

    def __init__(self, lane: dict[_Entry, float], expire: Callable[[], None]) -> None:
        self.lane = lane
        self.expire = expire


async def ends_within(timeout_s: float, task: asyncio.Task[Any]) -> bool:
    """Wait for one task, as `asyncio.wait` does for a set of them at nearly twice the cost."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()

    def answer(in_time: bool) -> None:
        if not ended.done():
            ended.set_result(in_time)

    timer = loop.call_later(timeout_s, answer, False)
    task.add_done_callback(lambda _: answer(True))
    try:
        return await ended
    finally:
        timer.cancel()
