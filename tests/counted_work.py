"""What a call costs, in numbers that do not depend on the machine or on what else runs there."""

from __future__ import annotations

import _lsprof
import ctypes
import gc
import itertools
import operator
import sys
import threading
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
    limit = sys.maxsize - 1 if at_most is None else at_most
    with no_collections():  # what they call depends on what other tests left, and swallows the exception that stops it
        # From 3.12 on cProfile counts the calls of all threads.
        calls = _counted_in_c(function, limit) if sys.version_info < (3, 12) else _counted(function, limit)
    if calls > limit:
        raise TooMuchWork(f"more than {limit} calls")
    return calls


def _counted(function: Callable[[], object], limit: int) -> int:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if frame.f_code in NOT_COUNTED:
            return
        calls += 1
        if calls > limit:
            raise TooMuchWork

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    except TooMuchWork:
        pass
    finally:
        sys.setprofile(before)
    return calls


def _counted_in_c(function: Callable[[], object], limit: int) -> int:
    """Count with cProfile, at a third of the cost: its clock is a counter, which it reads at each call and return.

    Past the limit each reading has the exception raised at the thread's next call, return or jump back. None may be
    left when the profiler is switched off: that asks the audit hooks, and where one of them is Python's, it would be
    raised there, and the profiler would stay on.
    """
    ident, error = threading.get_ident(), ctypes.py_object(TooMuchWork)
    this, target = ctypes.c_ulong(ident), ctypes.c_ulong(ident)
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc  # what a clock itself raises is only printed
    numbers = iter(range(limit + 1))
    clock = itertools.chain(numbers, map(raise_in, itertools.repeat(target), itertools.repeat(error)))
    profiler = _lsprof.Profiler(clock.__next__, 1.0, True, True)
    before = sys.getprofile()
    try:
        profiler.enable()
        function()
    except TooMuchWork:
        pass
    finally:
        target.value = 0  # no thread's, so that no more are raised; this is no call, so that none is raised before it
        try:
            raise_in(this, error)  # the last one, in the place of one that was still to be raised
            while True:
                pass
        except TooMuchWork:
            pass
        profiler.disable()
        sys.setprofile(before)
    calls = limit + 1 - operator.length_hint(numbers)
    for entry in profiler.getstats():
        if entry.code in NOT_COUNTED:
            calls -= 2 * entry.callcount
            calls -= sum(2 * called.callcount for called in entry.calls or () if isinstance(called.code, str))
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

    def exceed(self, function: Callable[[], object], times: float, *, first_s: float | None = None) -> bool:
        """Return whether ``function`` always costs more than ``times`` the harmless one.

        Args:
            function: What may cost too much.
            times: Number of times that it may cost what the harmless one does.
            first_s: Seconds that it took at most in a call before, such as one whose calls were counted.
        """
        if self._known_s is None:
            self._known_s = self._measure(self._harmless)
        if (self._measure(function) if first_s is None else first_s) <= times * self._known_s:
            return False
        return all(self._measure(function) > times * self._measure(self._harmless) for _ in range(self._TRIES))
