"""`StepClock`: the time of a session's calls that does not count against their deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

RECHECK_S = 5.0
"""A deadline that passes while the clock is stopped is looked at again after this time."""


def stopped_s(clock: StepClock | None) -> float:
    """Return for how many seconds ``clock`` has been stopped; 0 where there is none."""
    return 0.0 if clock is None else clock.stopped_s()


class StepClock:
    """Sums up how long the clock of one session's calls was stopped. Usable from any thread.

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
        """Return for how many seconds it has been stopped since it was made."""
        with self._lock:
            return self._sum_s + (self._monotonic() - self._since if self._stops else 0.0)

    def left_s(self, timeout_s: float, elapsed_s: float, stopped_before_s: float) -> float:
        """Return the seconds after which a call's deadline has to be looked at; 0 or less when it has passed.

        Args:
            timeout_s: What the call may take.
            elapsed_s: Since it began.
            stopped_before_s: `stopped_s` when it began.
        """
        left_s = timeout_s - elapsed_s + self.stopped_s() - stopped_before_s
        return max(left_s, RECHECK_S) if self._stops else left_s
