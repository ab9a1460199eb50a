"""Maps each value of an environment's ``compute_step_rewards()`` to the delivery (reply number t) that it rates.

Upstream's `TrajectoryRubric` keeps a list with an entry for each judged step, and computes one reward per entry once
the outcome is known (RFC 004); it sends neither to clients. Entries and deliveries do not always correspond: a
tools/call may not be judged, a step that failed may have been judged, and a restored instance may have lost its list.
So the length of the list is read before and after each call, and an entry that belongs to no known delivery gets no t.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from errata_protocol.exception_text import text_of

from ..concurrency.containment import calling

log = logging.getLogger("errata.rewards")


class Credit:
    """Maps entries of one instance's trajectory to deliveries of its current episode.

    Args:
        env: The instance. ``compute_step_rewards()`` is looked up on it and then on its ``rubric``, but not on the
            parts of a composed rubric.
    """

    def __init__(self, env: object) -> None:
        self._env = env
        self._t_of: list[int | None] = []

    @property
    def compute(self) -> Callable[[], Any] | None:
        """The function that computes the step rewards; None if the environment has none."""
        judge = self._judge()
        return getattr(judge, "compute_step_rewards", None) if judge is not None else None

    def judged(self) -> int | None:
        """Return the number of judged steps; None if it is unknown."""
        judge = self._judge()
        if judge is None:
            return None
        try:
            entries = calling(getattr, judge, "trajectory", None)
        except Exception as error:  # the environment may define it as a property
            log.debug("the trajectory cannot be read: %s", text_of(error))
            return None
        return len(entries) if isinstance(entries, list | tuple) else None

    def delivered(self, t: int, before: int | None, *, reset: bool) -> None:
        """Map the entries added since ``before`` to delivery ``t``.

        Args:
            t: The delivery.
            before: `judged` before the call; None if unknown.
            reset: Whether the delivery is of a reset, which begins an episode.
        """
        after = self.judged()
        if before is None or after is None:
            self._t_of = []
            return
        if reset:
            old = before if after >= before else 0  # the environment did not clear its rubric
            self._t_of = [None] * old + [t] * (after - old)
            return
        known = self._t_of[:before]
        self._t_of = known + [None] * (before - len(known)) + [t] * (after - before)

    def restored(self, t: int, *, only_steps: bool) -> None:
        """Rebuild the mapping after the instance was restored from the snapshot of delivery ``t``.

        Entries are mapped only if there is exactly one for each delivery since the reset; else all are unknown.

        Args:
            t: The delivery restored to.
            only_steps: Whether all deliveries since the reset are steps. If not, equal counts prove nothing: a
                tools/call that was not judged and a failed step that was judged cancel out.
        """
        self._t_of = list(range(1, t + 1)) if only_steps and self.judged() == t else []

    def forked(self) -> None:
        """Clear the mapping after a fork: earlier entries belong to the parent episode."""
        self._t_of = []

    def by_delivery(self, t: int, values: Any) -> dict[int, float]:
        """Return the sum of the rewards of each delivery; empty if the rewards cannot be mapped.

        Args:
            t: The delivery that ended the episode.
            values: What ``compute_step_rewards()`` returned.
        """
        try:
            rewards = calling(lambda: [_finite(value) for value in values])
        except Exception as error:
            log.warning("compute_step_rewards() gave no list of finite numbers and is left out: %s", text_of(error))
            return {}
        t_of = self._t_of
        if self.judged() is None:
            t_of = [*range(1, t + 1)] if len(rewards) == t else [*range(t + 1)] if len(rewards) == t + 1 else []
        if len(t_of) != len(rewards):
            log.warning(
                "compute_step_rewards() gave %d rewards for %d judged steps of %d deliveries: none is credited",
                len(rewards),
                len(t_of),
                t,
            )
            return {}
        found: dict[int, float] = {}
        for delivery, reward in zip(t_of, rewards, strict=True):
            if delivery is not None:
                found[delivery] = found.get(delivery, 0.0) + reward
        if len(found) < len(rewards):
            log.info("%d of %d step rewards belong to deliveries of this episode", len(found), len(rewards))
        return {delivery: reward for delivery, reward in found.items() if math.isfinite(reward)}

    def _judge(self) -> object | None:
        for candidate in (self._env, getattr(self._env, "rubric", None)):
            if callable(getattr(type(candidate), "compute_step_rewards", None)):
                return candidate
        return None


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
