"""Medians and ranges over rounds, and ratios within each round.

A round measures every arm once, one after the other, so other load on the machine affects all arms alike. A ratio of
two medians would compare different times.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Round = Mapping[str, float]
"""Figures of one arm in one round, by name."""

Arms = Mapping[str, Sequence[Round]]
"""Rounds by arm."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of several rounds.

    Args:
        rounds: One value a round, in order.
    """

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value, or the mean of the two in the middle."""
        return statistics.median(self.rounds)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.rounds)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.rounds)


def spread(arms: Arms, arm: str, key: str) -> Spread | None:
    """Return a figure's values; None where the arm does not have it in every round."""
    rounds = arms.get(arm, ())
    if not rounds or any(key not in figures for figures in rounds):
        return None
    return Spread(tuple(figures[key] for figures in rounds))


def ratio(arms: Arms, arm: str, to: str, key: str, to_key: str | None = None) -> Spread | None:
    """Divide a figure of one arm by that of another, round by round.

    Args:
        arms: All rounds.
        arm: Arm in the numerator.
        to: Arm in the denominator.
        key: Name of the figure.
        to_key: Name of the denominator's figure, if it differs.

    Returns:
        None where a figure is missing or a denominator is zero.

    Raises:
        ValueError: The arms have different numbers of rounds, so that there are no pairs.
    """
    above, below = spread(arms, arm, key), spread(arms, to, to_key or key)
    if above is None or below is None:
        return None
    if len(above.rounds) != len(below.rounds):
        raise ValueError(f"{arm} has {len(above.rounds)} rounds and {to} {len(below.rounds)}: no ratio by round")
    if not all(below.rounds):
        return None
    return Spread(tuple(a / b for a, b in zip(above.rounds, below.rounds, strict=True)))
