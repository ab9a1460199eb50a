"""Leaves out error sites whose divergence is far above that of other sites.

The divergence of a site measures how far the student is from its teacher with the hint. At most sites a hint changes a
few tokens. Where it changes everything (a hint that the policy cannot follow, a malformed turn) the teacher is noise,
and in a mean over tokens a few such turns decide the gradient: in one measurement 88 % of the loss came from a fifth of
the turns (docs/ablation.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


class DivergenceGuard:
    """Compares each site's divergence per token with the median of the sites before it.

    Args:
        factor: Multiple of the median above which a site is an outlier, > 1.
        window: Number of sites that are remembered, outliers included.
        least: Number of sites to see before any can be an outlier.

    Raises:
        ValueError: An option out of its range.
    """

    def __init__(self, factor: float = 10.0, *, window: int = 512, least: int = 32) -> None:
        if not factor > 1.0:
            raise ValueError(f"factor is {factor}: it has to be above 1")
        if not 0 < least <= window:
            raise ValueError(f"least is {least}, window {window}: 0 < least <= window")
        self.factor, self.least = factor, least
        self._seen: deque[float] = deque(maxlen=window)

    def bound(self) -> float:
        """Return the divergence per token above which a site is left out; infinity until enough sites are known."""
        return self.factor * median(self._seen) if len(self._seen) >= self.least else math.inf

    def add(self, divergences: Sequence[float]) -> None:
        """Add sites to those that later ones are compared with. Values that are not finite are ignored."""
        self._seen.extend(one for one in divergences if math.isfinite(one))

    def outliers(self, divergences: Sequence[float]) -> list[bool]:
        """Return which sites to leave out, then add all of them.

        Args:
            divergences: Divergence of each site, in nats per token. A site whose divergence is not finite is an
                outlier.
        """
        bound = self.bound()
        self.add(divergences)
        return [not math.isfinite(one) or one > bound for one in divergences]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._seen.clear()
        self._seen.extend(state["seen"])
