"""`Deadlines`: one shared timer for deadlines of 5 s and longer, a timer each for shorter ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from .per_loop import PerLoop
from .step_clock import StepClock, stopped_s

COARSE_S = 5.0
"""Timeouts of at least this many seconds share one timer with a precision of `TICK_S`; shorter ones get their own."""

TICK_S = 1.0

LATE_S = 0.1
"""A deadline that the event loop handles more than this many seconds late passed while the loop was stalled."""


class Expiring(Protocol):
    """An object with a deadline, hashed by identity."""

    def expire(self) -> None:
        """Called when the deadline has passed."""


class Deadlines:
    """The deadlines of one event loop: calls `Expiring.expire` of each object not removed before its deadline.

    Args:
        loop: The event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lanes: dict[float, dict[Expiring, float]] = {}  # by timeout; each in order of deadlines
        self._timer: asyncio.TimerHandle | None = None
        self._late_s = 0.0  # of the current look

    def add(self, timeout_s: float, who: Expiring, now: float) -> dict[Expiring, float] | asyncio.TimerHandle:
        """Schedule ``who.expire`` for ``timeout_s`` after ``now``, or up to `TICK_S` later.

        Args:
            timeout_s: Seconds until the deadline.
            who: Object whose `Expiring.expire` is called.
            now: Current time of the event loop, seconds.

        Returns:
            What cancels the deadline: a dict to remove ``who`` from (it is absent once expired), or a timer handle.
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

    def late_s(self, deadline: dict[Expiring, float] | asyncio.TimerHandle, now: float) -> float:
        """Return how much too late a deadline's `Expiring.expire` is being called, seconds; 0 if by at most `LATE_S`.

        Args:
            deadline: What `add` returned.
            now: Current time of the event loop, seconds.
        """
        late_s = self._late_s if isinstance(deadline, dict) else now - deadline.when()
        return late_s if late_s > LATE_S else 0.0

    def _look(self) -> None:
        now = self.loop.time()
        self._late_s = 0.0 if self._timer is None else now - self._timer.when()
        self._timer = None
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


DEADLINES: PerLoop[Deadlines] = PerLoop(Deadlines)
"""The deadlines of each event loop."""


async def ends_within(
    timeout_s: float, task: asyncio.Task[Any], clock: Callable[[], StepClock | None] = lambda: None
) -> bool:
    """Wait for one task with a timeout; `asyncio.wait`, which takes a set of tasks, costs nearly twice as much.

    Args:
        timeout_s: Timeout in seconds; time in which ``clock`` was stopped does not count.
        task: The task to wait for. It is not cancelled at the timeout.
        clock: Returns the clock of the session that the task belongs to; None if that clock was never stopped.

    Returns:
        Whether the task ended in time.
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
