"""The arithmetic: medians and ranges over rounds, and ratios that are taken within each round.

A round measures every arm once, one after the other, so what else the machine does weighs on all of them; a ratio of
two medians would compare different moments.
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
        rounds: In order.
    """

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one, or the mean of the middle two."""
        return statistics.median(self.rounds)

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.rounds)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.rounds)


def spread(arms: Arms, arm: str, key: str) -> Spread | None:
    """Return a figure's values; None where the arm does not have it in every round."""
    rounds = arms.get(arm, ())
    if not rounds or any(key not in figures for figures in rounds):
        return None
    return Spread(tuple(figures[key] for figures in rounds))


def ratio(arms: Arms, arm: str, to: str, key: str, to_key: str | None = None) -> Spread | None:
    """Return a figure of one arm through that of another, round by round.

    Args:
        arms: All rounds.
        arm: Above the line.
        to: Below it.
        key: Which figure.
        to_key: The other arm's, if it is another one.

    Returns:
        None where one of them is missing, or zero below the line.

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
