"""Schedules of a channel's weight by optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from .arguments import not_negative

Shape = Literal["constant", "linear", "cosine"]
Weight = float | Callable[[int], float]
"""Weight of a channel, or a schedule of it by optimizer step from 0."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A weight by step: rises from 0 to ``start`` over ``warmup`` steps, then changes to ``end`` until step ``steps``
    and stays.

    Attributes:
        start: Weight after the warm-up, >= 0.
        end: Weight after the last step, >= 0; None means ``start``.
        steps: Number of steps from ``start`` to ``end``, after the warm-up.
        shape: Course from ``start`` to ``end``: ``constant``, ``linear``, or ``cosine`` (half a wave, level at both
            ends).
        warmup: Number of steps in which the weight rises linearly from 0. At step 0 it is 0, and the channel makes no
            pass.

    Raises:
        ValueError: A negative or infinite number, an unknown shape, a shape that moves in no steps.
    """

    start: float
    end: float | None = None
    steps: int = 0
    shape: Shape = "constant"
    warmup: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, value in (("start", self.start), ("end", self.end), ("steps", self.steps), ("warmup", self.warmup)):
            if value is not None:
                not_negative(name, value)
        if self.shape not in get_args(Shape):
            raise ValueError(f"shape is {self.shape!r}: one of {', '.join(get_args(Shape))}")
        if self.shape != "constant" and (self.end is None or self.steps < 1):
            raise ValueError(f"a {self.shape} schedule needs an end and at least one step to get there")
        if self.shape == "constant" and self.end not in (None, self.start):
            raise ValueError("a constant schedule has no end of its own")

    def __call__(self, step: int) -> float:
        """Return the weight.

        Args:
            step: Optimizer step, from 0.

        Returns:
            The weight, >= 0.
        """
        if step < self.warmup:
            return self.start * step / self.warmup
        if self.shape == "constant" or self.end is None:
            return self.start
        done = min((step - self.warmup) / self.steps, 1.0)
        share = done if self.shape == "linear" else (1.0 - math.cos(math.pi * done)) / 2.0
        return self.start + (self.end - self.start) * share


def constant(value: float, *, warmup: int = 0) -> Schedule:
    """Return a schedule that is constant after a warm-up."""
    return Schedule(value, warmup=warmup)


def linear(start: float, end: float, steps: int, *, warmup: int = 0) -> Schedule:
    """Return a schedule that changes linearly."""
    return Schedule(start, end, steps, "linear", warmup)


def cosine(start: float, end: float, steps: int, *, warmup: int = 0) -> Schedule:
    """Return a schedule that follows half a cosine."""
    return Schedule(start, end, steps, "cosine", warmup)


def weight_at(weight: Weight, step: int) -> float:
    """Return the weight of a channel at an optimizer step."""
    return weight(step) if callable(weight) else weight


def has_weight(weight: Weight, steps: Iterable[int]) -> bool:
    """Return whether the weight of a channel is non-zero in any of some optimizer steps."""
    return any(weight(step) != 0.0 for step in steps) if callable(weight) else weight != 0.0
