"""Counts are the same at every run, and what grows too fast is told from what does not, however busy the machine is."""

from __future__ import annotations

import re

import pytest

from .counted_work import Costs, TooMuchWork, calls_of


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


def test_a_search_that_grows_too_fast_exceeds_what_a_linear_one_costs() -> None:
    text = "a" * 4_000
    costs = Costs(lambda: re.search("a+b", text[:1_000]))
    assert costs.exceed(lambda: re.search("a+b", text), times=8)  # 16 times
    assert not costs.exceed(lambda: re.search("b", text * 10), times=8)
