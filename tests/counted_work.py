"""What a call costs, in numbers that do not depend on the machine or on what else runs there."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType

from .garbage import no_collections

NOT_COUNTED: set[CodeType] = set()
"""Code of tools that look on, such as `tests.loop_watch`: neither their calls nor what they call themselves."""


class TooMuchWork(BaseException):
    """The call was stopped past the calls it may make; of a kind that code under test does not catch."""


def calls_of(function: Callable[[], object], at_most: int | None = None) -> int:
    """Run ``function`` and return how often it calls Python's functions and C's, and returns from them.

    The number is the same on every machine. What one call of a C function costs, a search of a regular expression, say,
    is not in it: `Costs` is for that.

    Args:
        function: What to count.
        at_most: Calls after which it is stopped.

    Raises:
        TooMuchWork: It was stopped.
    """
    calls = 0
    limit = sys.maxsize if at_most is None else at_most

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if frame.f_code in NOT_COUNTED:
            return
        calls += 1
        if calls > limit:
            raise TooMuchWork(f"more than {limit} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def processor_s(function: Callable[[], object]) -> float:
    """Call a function and return the processor time that it took, in seconds."""
    gc.collect()
    with no_collections():  # one collection of all that a long test run holds takes longer than the call
        began = time.thread_time()
        function()
        return time.thread_time() - began


class Costs:
    """Processor time in multiples of what something harmless costs, for work inside C functions, which nobody counts.

    A busy machine makes both slower. A function that exceeds a bound is measured again, in turns with the harmless one,
    so that a multiple is too large only if the work is.

    Args:
        harmless: What is known to cost little.
        measure: Calls a function and returns its cost.
    """

    _TRIES = 5

    def __init__(
        self, harmless: Callable[[], object], measure: Callable[[Callable[[], object]], float] = processor_s
    ) -> None:
        self._harmless = harmless
        self._measure = measure
        self._known_s: float | None = None

    def exceed(self, function: Callable[[], object], times: float) -> bool:
        """Return whether ``function`` always costs more than ``times`` the harmless one."""
        if self._known_s is None:
            self._known_s = self._measure(self._harmless)
        if self._measure(function) <= times * self._known_s:
            return False
        return all(self._measure(function) > times * self._measure(self._harmless) for _ in range(self._TRIES))
