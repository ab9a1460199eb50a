"""Watches the logged metrics for signs that channel 2 does harm, and warns with the setting to change."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("errata.trainer")


@dataclass(frozen=True, slots=True)
class Sign:
    """A metric, and the change of it that is a sign of harm.

    Attributes:
        metric: Name of the metric in the log.
        factor: Factor of the metric's first value. It is a lower bound if under 1 and an upper bound if over 1.
        meaning: Text of the warning: what the sign means, and what to change.
    """

    metric: str
    factor: float
    meaning: str

    def shows(self, first: float, now: float) -> bool:
        """Return whether the change from the first value to the current value is a sign of harm."""
        return now < self.factor * first if self.factor < 1.0 else now > self.factor * first


SIGNS = (
    Sign(
        "rollouts/calls",
        0.5,
        "the policy makes less than half of its tool calls: lower alpha_sdpo, or leave keys out with "
        "ChannelSettings.hint_keys (sdpo/share/KEY says which key weighs most)",
    ),
    Sign(
        "sdpo/divergence",
        3.0,
        "the student is ever further from its hinted teacher: lower alpha_sdpo, ema_rate, or the learning rate",
    ),
    Sign(
        "counterfactual/accepted",
        0.5,
        "hints help half as often as at first, so the teacher erodes: use teacher='ema' with a smaller ema_rate, or "
        "teacher='base'",
    ),
)


class Watch:
    """Compares the recent mean of each metric with its first mean, and warns once for each sign.

    Every process sees the same metrics, and so comes to the same dose.

    Args:
        window: Number of values in each mean; nothing is compared before there are twice as many.
        lower_dose: Halve `dose` at each sign, once for each window.

    Attributes:
        dose: Factor of channel 2's weight, in (0, 1].
        shown: Metrics of the signs that were seen, in order.
    """

    def __init__(self, window: int = 20, *, lower_dose: bool = False) -> None:
        self.window, self.lower_dose = window, lower_dose
        self.dose = 1.0
        self.shown: list[str] = []
        self._first: dict[str, list[float]] = {sign.metric: [] for sign in SIGNS}
        self._last: dict[str, deque[float]] = {sign.metric: deque(maxlen=window) for sign in SIGNS}

    def see(self, metrics: Mapping[str, float]) -> None:
        """Process the logged metrics of a step."""
        for sign in SIGNS:
            value = metrics.get(sign.metric)
            if value is None:
                continue
            first, last = self._first[sign.metric], self._last[sign.metric]
            if len(first) < self.window:
                first.append(value)
                continue
            last.append(value)
            if len(last) < self.window:
                continue
            before, now = sum(first) / len(first), sum(last) / len(last)
            if sign.shows(before, now):
                last.clear()  # the next window begins after this dose
                self._warn(sign, before, now)

    def _warn(self, sign: Sign, before: float, now: float) -> None:
        if self.lower_dose:
            self.dose /= 2
        if self.lower_dose or sign.metric not in self.shown:
            dose = f"; the dose of channel 2 is now {self.dose:g} of alpha_sdpo" if self.lower_dose else ""
            log.warning("%s went from %.3g to %.3g: %s%s", sign.metric, before, now, sign.meaning, dose)
        if sign.metric not in self.shown:
            self.shown.append(sign.metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        last = {name: list(values) for name, values in self._last.items()}
        return {"dose": self.dose, "shown": list(self.shown), "first": dict(self._first), "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.dose, self.shown = float(state["dose"]), list(state["shown"])
        for name in self._first:
            self._first[name] = list(state["first"].get(name, ()))
            self._last[name] = deque(state["last"].get(name, ()), maxlen=self.window)
