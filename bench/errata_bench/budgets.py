"""Budgets: the bounds that measured figures have to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .figures import Arms, Spread, ratio, spread


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on a figure, or on its ratio to another arm.

    Args:
        arm: Name of the arm.
        key: Name of the figure.
        bound: ``>=`` or ``<=``.
        limit: Value of the bound.
        to: Arm in the denominator of the ratio; None bounds the figure itself.
        to_key: Name of that arm's figure, if it differs from ``key``.
        share: ``limit`` is a share of the sessions: 1.0 means all of them.
        at: Number of sessions at which the budget is judged; at others the figure is only shown. None judges always.
    """

    arm: str
    key: str
    bound: Literal[">=", "<="]
    limit: float
    to: str | None = None
    to_key: str | None = None
    share: bool = False
    at: int | None = 10_000

    def measured(self, arms: Arms) -> Spread | None:
        """Return the values that are compared with the bound, None where they were not measured."""
        if self.to is not None:
            return ratio(arms, self.arm, self.to, self.key, self.to_key)
        return spread(arms, self.arm, self.key)

    def met(self, arms: Arms, sessions: int) -> bool | None:
        """Return whether the median of the rounds keeps the bound; None if the budget is not judged."""
        found = self.measured(arms)
        if found is None or (self.at is not None and sessions != self.at):
            return None
        limit = self.limit * sessions if self.share else self.limit
        return found.median >= limit if self.bound == ">=" else found.median <= limit

    def text(self, unit: str) -> str:
        """Return the budget as text."""
        if self.to is not None:
            return f"{self.bound} {self.limit:g} x {self.to}"
        if self.share:
            return f"{self.bound} {self.limit:.0%} of the sessions"
        return f"{self.bound} {self.limit:g} {unit}".rstrip()
