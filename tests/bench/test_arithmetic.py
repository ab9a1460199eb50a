"""Medians, ratios by round, budgets: worked by hand."""

from __future__ import annotations

import pytest

from errata_bench.budgets import Budget
from errata_bench.figures import Spread, ratio, spread
from errata_bench.latencies import percentile, spread_ms
from errata_bench.table import number

ARMS = {
    "stock": [{"steps_per_s": 100.0}, {"steps_per_s": 200.0}, {"steps_per_s": 400.0}],
    "ours": [
        {"steps_per_s": 500.0, "opened": 9.0},
        {"steps_per_s": 400.0, "opened": 10.0},
        {"steps_per_s": 1200.0, "opened": 10.0},
    ],
}


def test_median_and_range_are_those_of_the_rounds() -> None:
    found = spread(ARMS, "ours", "steps_per_s")
    assert found is not None
    assert (found.median, found.low, found.high) == (500.0, 400.0, 1200.0)


def test_an_even_number_of_rounds_has_the_mean_of_the_middle_two_as_median() -> None:
    assert Spread((1.0, 9.0, 2.0, 4.0)).median == 3.0


def test_the_ratio_is_taken_in_each_round_and_not_of_the_medians() -> None:
    found = ratio(ARMS, "ours", "stock", "steps_per_s")
    assert found is not None
    assert found.rounds == (5.0, 2.0, 3.0)
    assert found.median == 3.0  # 500 / 200 would be 2.5


def test_a_figure_that_an_arm_lacks_has_neither_spread_nor_ratio() -> None:
    assert spread(ARMS, "stock", "opened") is None
    assert ratio(ARMS, "ours", "stock", "opened") is None
    assert ratio(ARMS, "nobody", "stock", "steps_per_s") is None


def test_a_ratio_to_zero_is_none() -> None:
    assert ratio({"a": [{"k": 1.0}], "b": [{"k": 0.0}]}, "a", "b", "k") is None


def test_arms_of_different_length_have_no_pairs() -> None:
    with pytest.raises(ValueError, match="no ratio by round"):
        ratio({"a": [{"k": 1.0}] * 2, "b": [{"k": 1.0}]}, "a", "b", "k")


@pytest.mark.parametrize(("limit", "met"), [(3.0, True), (3.1, False)])
def test_a_budget_on_a_ratio_is_held_against_its_median(limit: float, met: bool) -> None:
    assert Budget("ours", "steps_per_s", ">=", limit, to="stock").met(ARMS, 10_000) is met


def test_a_share_of_the_sessions_is_a_bound_in_sessions() -> None:
    assert Budget("ours", "opened", ">=", 1, share=True, at=10).met(ARMS, 10) is True
    assert Budget("ours", "opened", ">=", 1, share=True, at=11).met(ARMS, 11) is False


def test_a_budget_is_not_judged_at_another_size_or_without_figures() -> None:
    assert Budget("ours", "steps_per_s", ">=", 1).met(ARMS, 100) is None
    assert Budget("ours", "nothing", ">=", 1).met(ARMS, 10_000) is None
    assert Budget("ours", "steps_per_s", ">=", 1, at=None).met(ARMS, 100) is True


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0
    assert spread_ms([0.003, 0.001, 0.002]) == {"p50_ms": 2.0, "p99_ms": 3.0}


def test_no_values_have_no_percentile() -> None:
    assert spread_ms([]) == {}
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (12_345.6, "12,346"), (25.04, "25.0"), (1.234, "1.23"), (0.0123, "0.012")]
)
def test_numbers_show_the_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text
