"""What has to be reached, and whether it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .figures import Arms, Spread, ratio, spread


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on a figure, or on its ratio to another arm.

    Args:
        arm: Whose figure.
        key: Which figure.
        bound: ``>=`` or ``<=``.
        limit: The bound itself.
        to: The arm that the ratio is taken to; None for the figure itself.
        to_key: The other arm's figure, if it is another one.
        share: ``limit`` is a share of the sessions, so 1.0 asks for all of them.
        at: Sessions at which it is meant; at other sizes it is shown and not judged. None judges at any.
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
        """Return what the bound is held against, None where it was not measured."""
        if self.to is not None:
            return ratio(arms, self.arm, self.to, self.key, self.to_key)
        return spread(arms, self.arm, self.key)

    def met(self, arms: Arms, sessions: int) -> bool | None:
        """Return whether the median of the rounds keeps the bound; None where it cannot be judged."""
        found = self.measured(arms)
        if found is None or (self.at is not None and sessions != self.at):
            return None
        limit = self.limit * sessions if self.share else self.limit
        return found.median >= limit if self.bound == ">=" else found.median <= limit

    def text(self, unit: str) -> str:
        """Return it in words."""
        if self.to is not None:
            return f"{self.bound} {self.limit:g} x {self.to}"
        if self.share:
            return f"{self.bound} {self.limit:.0%} of the sessions"
        return f"{self.bound} {self.limit:g} {unit}".rstrip()
