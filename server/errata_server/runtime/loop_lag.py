"""`LoopLag`: how late a server's event loop is, for ``/metrics``, ``/ready`` and the health port."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

BEAT_S = 0.5
"""Interval of the callbacks whose lateness is measured, seconds."""

WINDOW_S = 60.0
"""The metric is the worst of so many seconds."""

UNREADY_S = 30.0
"""A loop that is later than this gets no new work: a server that is busy for seconds goes on with what it has."""


class LoopLag:
    """Measures how much later than asked for a callback runs on one event loop. May be read from any thread.

    Args:
        monotonic: Returns seconds that never go back.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._due: float | None = None
        self._beats: deque[tuple[float, float]] = deque()  # time and lateness, within the window
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure the running event loop, if none is measured."""
        if self._due is None:
            self._wait()

    def stop(self) -> None:
        """Stop measuring."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._due = None

    @property
    def is_measured(self) -> bool:
        """Whether an event loop is measured: from the start of the application to its end."""
        return self._due is not None

    @property
    def overdue_s(self) -> float:
        """How late the next callback is already, seconds; 0 for a loop that is on time, or that is not measured."""
        due = self._due
        return 0.0 if due is None else max(0.0, self._monotonic() - due)

    @property
    def worst_s(self) -> float:
        """The worst lateness of the last `WINDOW_S`, seconds."""
        since = self._monotonic() - WINDOW_S
        return max([self.overdue_s, *(late for at, late in tuple(self._beats) if at >= since)])

    def trouble(self) -> str | None:
        """Return a message if the loop is, or was at its last callback, later than `UNREADY_S`; else None."""
        beats = tuple(self._beats)
        late_s = max(self.overdue_s, beats[-1][1] if beats else 0.0)
        if late_s <= UNREADY_S:
            return None
        return (
            f"the event loop is {late_s:.0f} s late: it has more to do than this machine can, or an environment "
            "computes on it; see errata_event_loop_lag_seconds"
        )

    def _wait(self) -> None:
        self._due = self._monotonic() + BEAT_S
        self._handle = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        now = self._monotonic()
        self._beats.append((now, self.overdue_s))
        while self._beats[0][0] < now - WINDOW_S:
            self._beats.popleft()
        self._wait()
