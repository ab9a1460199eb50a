"""Counts are the same at every run, and what grows too fast is told from what does not, however busy the machine is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest

from .counted_work import Costs, TooMuchWork, calls_of, processor_s
from .path_watch import watching


def sums(n: int) -> None:
    for _ in range(n):
        len(sorted(()))


def test_calls_of_python_and_of_c_are_counted_the_same_every_time() -> None:
    least, more = calls_of(lambda: sums(100)), calls_of(lambda: sums(200))
    assert least == calls_of(lambda: sums(100)) and more - least == 400  # two calls a round, and as many returns


def test_what_calls_too_much_is_stopped_even_if_it_catches_errors() -> None:
    def caught() -> None:
        try:
            sums(10**9)
        except Exception:
            sums(10**9)

    with pytest.raises(TooMuchWork, match="more than 1000 calls"):
        calls_of(caught, at_most=1000)


def test_what_calls_too_much_is_stopped_where_audit_hooks_look_on() -> None:
    before = sys.getprofile()
    with watching() as seen:  # its hook stays for ever, and is asked whenever a profiler is switched on or off
        for at_most in range(1000, 1010):  # the last call is one of `sums`, `len` or `sorted`
            with pytest.raises(TooMuchWork, match=f"more than {at_most} calls"):
                calls_of(lambda: sums(10**9), at_most=at_most)
            assert sys.getprofile() is before
    sums(1000)  # nothing is raised later
    assert not seen.written


def test_no_collection_begins_while_calls_are_counted() -> None:
    begun = []
    threshold = gc.get_threshold()
    look = lambda phase, info: begun.append(phase)  # noqa: E731
    gc.callbacks.append(look)
    gc.set_threshold(1)
    try:
        kept: list[list[int]] = []
        calls_of(lambda: kept.extend([number] for number in range(1000)))
        counted = len(begun)
        kept.extend([number] for number in range(1000))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(look)
    assert len(begun) > counted + 100 and counted < 100


def test_a_cost_is_too_large_if_it_is_so_in_every_try() -> None:
    def measured(function: Callable[[], object]) -> float:
        return float(function())  # type: ignore[arg-type]

    costs = Costs(lambda: 1.0, measured)
    assert costs.exceed(lambda: 9.0, times=8)
    assert not costs.exceed(lambda: 8.0, times=8)
    once_quick = iter([9.0, 9.0, 9.0, 8.0])
    assert not costs.exceed(lambda: next(once_quick), times=8)
    harmless = iter([1.0, 1.0, 1.0, 2.0])
    assert not Costs(lambda: next(harmless), measured).exceed(lambda: 9.0, times=8)


def test_processor_time_is_measured() -> None:
    assert processor_s(lambda: sums(1000)) >= 0.0
