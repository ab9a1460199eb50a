"""A bound on what single error sites may weigh: those whose divergence is far from that of others are left out.

A divergence measures how far the student is from its hinted teacher. At most sites a hint moves a few tokens. Where it
moves everything (a hint that the policy cannot follow, a garbled turn), the teacher is noise, and a mean over tokens
lets few such turns decide the gradient: 88 % of the loss came from a fifth of the turns in one measurement
(docs/ablation.md).
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
        factor: A site above this many medians is an outlier, > 1.
        window: Sites that are remembered, outliers included.
        least: Sites before which nothing is an outlier.

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
        """Return above which divergence per token a site is left out; infinity while too few are known."""
        return self.factor * median(self._seen) if len(self._seen) >= self.least else math.inf

    def remember(self, divergences: Sequence[float]) -> None:
        """Take sites into what later ones are compared with. One that is not finite is not remembered."""
        self._seen.extend(one for one in divergences if math.isfinite(one))

    def outliers(self, divergences: Sequence[float]) -> list[bool]:
        """Return which sites to leave out, and remember all.

        Args:
            divergences: Of each site, in nats per token. One that is not finite is an outlier.
        """
        bound = self.bound()
        self.remember(divergences)
        return [not math.isfinite(one) or one > bound for one in divergences]

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, to go on after a restart."""
        return {"seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the guard whose state it is."""
        self._seen.clear()
        self._seen.extend(state["seen"])
