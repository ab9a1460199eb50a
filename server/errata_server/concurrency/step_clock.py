"""`StepClock`: measures time that does not count towards the deadline of a session's calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

RECHECK_S = 5.0
"""A deadline that passes while the clock is stopped is checked again after this many seconds."""


def stopped_s(clock: StepClock | None) -> float:
    """Return for how many seconds ``clock`` has been stopped; 0 for None."""
    return 0.0 if clock is None else clock.stopped_s()


class StepClock:
    """Sums up for how long the clock of one session's calls was stopped. Thread-safe.

    Args:
        monotonic: Returns seconds that never go back.
    """

    __slots__ = ("_lock", "_monotonic", "_since", "_stops", "_sum_s")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._stops = 0
        self._since = 0.0
        self._sum_s = 0.0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock until the block ends. Blocks may be nested, and overlap in several threads."""
        with self._lock:
            if self._stops == 0:
                self._since = self._monotonic()
            self._stops += 1
        try:
            yield
        finally:
            with self._lock:
                self._stops -= 1
                if self._stops == 0:
                    self._sum_s += self._monotonic() - self._since

    def stopped_s(self) -> float:
        """Return for how many seconds the clock has been stopped since it was created."""
        with self._lock:
            return self._sum_s + (self._monotonic() - self._since if self._stops else 0.0)

    def left_s(self, timeout_s: float, elapsed_s: float, stopped_before_s: float) -> float:
        """Return in how many seconds to check a call's deadline; 0 or less if it has passed.

        Args:
            timeout_s: Most seconds that the call may take.
            elapsed_s: Seconds since the call began.
            stopped_before_s: `stopped_s` when the call began.
        """
        left_s = timeout_s - elapsed_s + self.stopped_s() - stopped_before_s
        return max(left_s, RECHECK_S) if self._stops else left_s
