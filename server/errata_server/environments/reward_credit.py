"""Maps each value of an environment's ``compute_step_rewards()`` to the delivery (reply number t) that it rates.

Upstream's `TrajectoryRubric` keeps what it judged as a list, and computes one reward per entry once the outcome is
known (RFC 004); nothing of it reaches a client. An entry is one judged step, and a delivery need not be one: a
tools/call may judge nothing, a step that failed may have been judged, a restored instance may have forgotten. So the
length of the list is looked at around each call, and an entry that belongs to no delivery is not guessed at.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

log = logging.getLogger("errata.rewards")


class Credit:
    """Ties entries of one instance's trajectory to deliveries of its current episode.

    Args:
        env: The instance: itself, or else its ``rubric``, may have ``compute_step_rewards()``. Of a rubric that is
            made of others only its own counts: what its parts say has no weight of its own.
    """

    def __init__(self, env: object) -> None:
        self._env = env
        self._t_of: list[int | None] = []

    @property
    def compute(self) -> Callable[[], Any] | None:
        """Computes the rewards; None for an environment that has none."""
        judge = self._judge()
        return getattr(judge, "compute_step_rewards", None) if judge is not None else None

    def judged(self) -> int | None:
        """Return how many steps were judged, None where nobody says."""
        judge = self._judge()
        if judge is None:
            return None
        try:
            entries = getattr(judge, "trajectory", None)
        except Exception as error:  # a property of the environment's own
            log.debug("the trajectory cannot be read: %s", error)
            return None
        return len(entries) if isinstance(entries, list | tuple) else None

    def delivered(self, t: int, before: int | None, *, reset: bool) -> None:
        """Take note that the entries since ``before`` were judged during delivery ``t``."""
        after = self.judged()
        if before is None or after is None:
            self._t_of = []
            return
        if reset:
            old = before if after >= before else 0  # an environment that does not reset its rubric
            self._t_of = [None] * old + [t] * (after - old)
            return
        known = self._t_of[:before]
        self._t_of = known + [None] * (before - len(known)) + [t] * (after - before)

    def restored(self, t: int, *, only_steps: bool) -> None:
        """Take note that the instance was restored from the snapshot of delivery ``t``, with what it remembers.

        That is one judged step for each delivery, or else nobody knows of which.

        Args:
            t: Where it stands now.
            only_steps: All deliveries since the reset are steps. A tools/call that was not judged and a step that was
                judged and failed would else be taken for one delivery.
        """
        self._t_of = list(range(1, t + 1)) if only_steps and self.judged() == t else []

    def forked(self) -> None:
        """Take note that deliveries count from 0 again: what was judged before is the parent's."""
        self._t_of = []

    def by_delivery(self, t: int, values: Any) -> dict[int, float]:
        """Return rewards by delivery, up to ``t``; several of one delivery are added up.

        Args:
            t: The delivery that ended the episode.
            values: What ``compute_step_rewards()`` returned.
        """
        try:
            rewards = [_finite(value) for value in values]
        except (TypeError, ValueError) as error:
            log.warning("compute_step_rewards() gave no list of finite numbers and is left out: %s", error)
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
