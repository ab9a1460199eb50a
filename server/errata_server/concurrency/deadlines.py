"""`Deadlines`: one shared timer for deadlines of 5 s and longer, a timer each for shorter ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from .step_clock import StepClock, stopped_s

COARSE_S = 5.0
"""Deadlines this far away and further are kept to within `TICK_S`; nearer ones have a timer of their own."""

TICK_S = 1.0


class Expiring(Protocol):
    """What has a deadline; hashed by its identity."""

    def expire(self) -> None:
        """Called when the deadline has passed."""


class Deadlines:
    """The deadlines of one event loop: calls `Expiring.expire` of whatever was not removed in time.

    Args:
        loop: The event loop.
    """

    _known: dict[asyncio.AbstractEventLoop, Deadlines] = {}  # noqa: RUF012 - one for each loop

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lanes: dict[float, dict[Expiring, float]] = {}  # by timeout: in each, the first added is due first
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Deadlines:
        """Return the deadlines of an event loop."""
        found = cls._known.get(loop)
        if found is None:
            for other in [known for known in list(cls._known) if known.is_closed()]:
                cls._known.pop(other, None)
            found = cls._known.setdefault(loop, cls(loop))
        return found

    def add(self, timeout_s: float, who: Expiring, now: float) -> object:
        """Let ``who`` expire ``timeout_s`` after ``now``, the loop's time, or up to `TICK_S` later.

        Returns:
            What `remove` takes.
        """
        if timeout_s < COARSE_S:
            return self.loop.call_later(max(timeout_s, 0.0), who.expire)
        lane = self._lanes.get(timeout_s)
        if lane is None:
            lane = self._lanes[timeout_s] = {}
            if self._timer is None:
                self._timer = self.loop.call_later(TICK_S, self._look)
        lane[who] = now + timeout_s
        return lane

    def remove(self, who: Expiring, added: Any) -> None:
        """Forget the deadline of ``who``, which `add` returned ``added`` for. It may have passed."""
        if type(added) is dict:
            added.pop(who, None)
        else:
            added.cancel()  # a timer

    def _look(self) -> None:
        self._timer = None
        now = self.loop.time()
        due: list[tuple[dict[Expiring, float], Expiring]] = []
        for timeout_s, lane in list(self._lanes.items()):
            for who, deadline in lane.items():
                if deadline > now:
                    break
                due.append((lane, who))
            if not lane:
                del self._lanes[timeout_s]
        for lane, who in due:
            if lane.pop(who, None) is not None:
                who.expire()
        if self._lanes and self._timer is None:  # an `expire` may have added one
            self._timer = self.loop.call_later(TICK_S, self._look)


async def ends_within(
    timeout_s: float, task: asyncio.Task[Any], clock: Callable[[], StepClock | None] = lambda: None
) -> bool:
    """Wait for one task, as `asyncio.wait` does for a set of them at nearly twice the cost.

    Args:
        timeout_s: How long, without the time in which the clock was stopped.
        task: What is waited for.
        clock: Returns the clock of the session whose call the task is, None where it was never stopped.

    Returns:
        Whether it ended in time.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()
    started, stopped_before_s = loop.time(), stopped_s(clock())

    def answer(in_time: bool) -> None:
        if not ended.done():
            ended.set_result(in_time)

    timer: asyncio.TimerHandle

    def expire() -> None:
        nonlocal timer
        found = clock()
        if found is not None and (left_s := found.left_s(timeout_s, loop.time() - started, stopped_before_s)) > 0.0:
            timer = loop.call_later(left_s, expire)
        else:
            answer(False)

    timer = loop.call_later(timeout_s, expire)
    task.add_done_callback(lambda _: answer(True))
    try:
        return await ended
    finally:
        timer.cancel()
