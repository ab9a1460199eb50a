"""Weights by step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_trainer.channels.schedules import Schedule, constant, cosine, linear


def test_a_weight_goes_as_its_shape_says() -> None:
    assert [constant(0.1)(step) for step in (0, 1, 10**6)] == [0.1] * 3
    assert [constant(0.4, warmup=4)(step) for step in range(6)] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert [linear(0.0, 1.0, 4)(step) for step in range(6)] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
    assert [cosine(1.0, 0.0, 2)(step) for step in range(4)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert [linear(1.0, 0.0, 2, warmup=2)(step) for step in range(5)] == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])


@given(
    start=st.floats(0, 10), end=st.floats(0, 10), steps=st.integers(1, 50), warmup=st.integers(0, 20),
    shape=st.sampled_from(["linear", "cosine"]),
)  # fmt: skip
def test_a_weight_stays_between_its_ends_and_never_turns(
    start: float, end: float, steps: int, warmup: int, shape: Any
) -> None:
    weights = [Schedule(start, end, steps, shape, warmup)(step) for step in range(warmup, warmup + steps + 3)]
    assert weights[0] == start
    assert weights[-1] == pytest.approx(end)
    rising = sorted(weights) if end >= start else sorted(weights, reverse=True)
    assert weights == pytest.approx(rising)


@pytest.mark.parametrize(
    "values",
    [
        {"start": -0.1},
        {"start": float("nan")},
        {"start": 0.1, "shape": "step"},
        {"start": 0.1, "shape": "linear"},
        {"start": 0.1, "end": 0.2, "shape": "cosine"},
        {"start": 0.1, "end": 0.2},
        {"start": 0.1, "warmup": -1},
    ],
)
def test_a_schedule_that_means_nothing_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is|needs|has"):
        Schedule(**values)
