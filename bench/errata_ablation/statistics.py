"""Means over seeds with intervals, differences between arms, and the number of seeds that shows a difference.

Intervals are Student's t over seeds. Differences are paired: two arms of one seed have the same weights to begin with
and the same tasks in the same order.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

MOST_SEEDS = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds.

    Attributes:
        mean: Mean of the values.
        half: Half the width of its 95 % interval; infinite for fewer than two values.
        deviation: Standard deviation of the values (n - 1); 0 for one.
        count: Number of values.
    """

    mean: float
    half: float
    deviation: float
    count: int

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values with its t interval.

    Raises:
        ValueError: There are no values.
    """
    count = len(values)
    if not count:
        raise ValueError("no values: no seed of this arm has finished")
    mean = statistics.fmean(values)
    if count == 1:
        return Interval(mean, math.inf, 0.0, 1)
    deviation = statistics.stdev(values)
    half = t_quantile(0.5 + confidence / 2.0, count - 1) * deviation / math.sqrt(count)
    return Interval(mean, half, deviation, count)


def clustered(values: Iterable[tuple[Hashable, float]], confidence: float = 0.95) -> Interval:
    """Return the mean of values that are correlated within clusters, with the t interval of the clusters' means.

    Args:
        values: Values, each with its cluster.
        confidence: Confidence of the interval.
    """
    clusters: dict[Hashable, list[float]] = {}
    for cluster, value in values:
        clusters.setdefault(cluster, []).append(value)
    return interval([statistics.fmean(own) for own in clusters.values()], confidence)


def first_reached(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return where a curve first reaches a target, with straight lines between its points; None if it does not."""
    for place, (x, y) in enumerate(curve):
        if y >= target:
            if place == 0:
                return x
            x0, y0 = curve[place - 1]
            return x0 + (x - x0) * (target - y0) / (y - y0)
    return None


def censored_median(times: Sequence[tuple[float, bool]]) -> float | None:
    """Return Kaplan and Meier's median time: the first at which at most half have not yet reached the end.

    Args:
        times: Times, each with True if the end was reached then, with False if observation ended then.

    Returns:
        None where more than half did not reach it under observation.
    """
    surviving = 1.0
    for time in sorted({time for time, reached in times if reached}):
        at_risk = sum(other >= time for other, _ in times)
        surviving *= 1.0 - sum(reached and other == time for other, reached in times) / at_risk
        if surviving <= 0.5 + 1e-12:
            return time
    return None


def seeds_needed(difference: Interval, *, power: float = 0.8, level: float = 0.05) -> int | None:
    """Return how many paired seeds show a true effect of the size found, in a two-sided t test.

    The smallest n with ``(t(1 - level / 2, n - 1) + t(power, n - 1)) * deviation / sqrt(n) <= |mean|``. It plans the
    next experiment and is no statement about the one that the effect comes from.

    Args:
        difference: Difference between two arms, over the seeds that both have.
        power: Probability of finding a true effect.
        level: Probability of finding an effect that does not exist.

    Returns:
        At least 2; None where no effect was found, its spread is unknown, or more than `MOST_SEEDS` were needed.
    """
    if difference.count < 2 or difference.mean == 0.0:
        return None

    def enough(count: int) -> bool:
        sum_of_quantiles = t_quantile(1.0 - level / 2.0, count - 1) + t_quantile(power, count - 1)
        return sum_of_quantiles * difference.deviation <= abs(difference.mean) * math.sqrt(count)

    if not enough(MOST_SEEDS):
        return None
    low, high = 1, MOST_SEEDS  # the left side falls, the right one grows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t for whole degrees of freedom.

    Raises:
        ValueError: ``share`` is not between 0 and 1, or ``freedom`` below 1.
    """
    if not 0.0 < share < 1.0 or freedom < 1:
        raise ValueError(f"no quantile {share} of t with {freedom} degrees of freedom")
    if share < 0.5:
        return -t_quantile(1.0 - share, freedom)
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < share:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_below(middle, freedom) < share else (low, middle)
    return high


def _t_below(t: float, freedom: int) -> float:
    """Return P(T <= t) for t >= 0: the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = 2.0 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + inside / 2.0
