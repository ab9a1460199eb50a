"""The declared reward: what a graded repository is worth, and optionally what each step on the way was worth."""

from __future__ import annotations

from typing import Any, Literal

from openenv.core.rubrics import Rubric

from ..rules.verdict import Resolution

Kind = Literal["resolved", "fraction"]


class Resolved(Rubric):
    """1.0 where the benchmark's rules say that the instance is resolved, else 0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.resolution: Resolution | None = None

    def forward(self, action: Any, observation: Any) -> float:
        """Rate the resolution that was set; 0.0 without one."""
        return float(self.resolution is not None and self.resolution.resolved)


class FailToPassFraction(Resolved):
    """The share of FAIL_TO_PASS that passes where all of PASS_TO_PASS does, else 0.0."""

    def forward(self, action: Any, observation: Any) -> float:
        """Rate the resolution that was set; 0.0 without one."""
        found = self.resolution
        if found is None or found.invalid or found.pass_to_pass.failure:
            return 0.0
        return found.fail_to_pass.fraction


class Untampered(Rubric):
    """0.0 where the agent's code was seen to interfere with the grading, else 1.0."""

    def __init__(self) -> None:
        super().__init__()
        self.tampering: tuple[str, ...] = ()

    def forward(self, action: Any, observation: Any) -> float:
        """Rate what was seen."""
        return float(not self.tampering)


class SweRubric(Rubric):
    """The reward of an episode: its outcome, worth nothing where it was tampered with. Steps before the end get 0.0.

    Args:
        kind: ``resolved`` or ``fraction``.
    """

    def __init__(self, kind: Kind = "resolved") -> None:
        super().__init__()
        self.outcome = Resolved() if kind == "resolved" else FailToPassFraction()
        self.untampered = Untampered()

    def graded(self, resolution: Resolution, tampering: tuple[str, ...]) -> None:
        """Take the verdict of the episode's grading; the next call is of the step that ends it."""
        self.outcome.resolution, self.untampered.tampering = resolution, tampering

    def forward(self, action: Any, observation: Any) -> float:
        """Return the reward of one step."""
        if not getattr(observation, "done", False):
            return 0.0
        return float(self.outcome(action, observation)) * float(self.untampered(action, observation))

    def reset(self) -> None:
        """Forget the last verdict."""
        self.outcome.resolution, self.untampered.tampering = None, ()


class DiscountedSweRubric(SweRubric):
    """`SweRubric`, which also credits every step with ``reward * discount ** (steps to the end)``.

    The credits are late rewards of the environment (PROTOCOL D8): they reach the rewards channel when the episode is
    over, and no observation.

    Args:
        kind: As in `SweRubric`.
        discount: In [0, 1].
    """

    def __init__(self, kind: Kind, discount: float) -> None:
        super().__init__(kind)
        self.discount = discount
        self._steps = 0
        self._reward: float | None = None

    @property
    def trajectory(self) -> list[None]:
        """One entry for each step that was judged; the steps themselves are in the journal."""
        return [None] * self._steps

    def forward(self, action: Any, observation: Any) -> float:
        """Return the reward of one step."""
        reward = super().forward(action, observation)
        self._steps += 1
        self._reward = reward if getattr(observation, "done", False) else None
        return reward

    def compute_step_rewards(self) -> list[float]:
        """Return a reward for each step; none before the episode is over."""
        if self._reward is None:
            return []
        return [self._reward * self.discount ** (self._steps - 1 - step) for step in range(self._steps)]

    def continues(self, steps: int) -> None:
        """Go on after ``steps`` judged steps: of a restored session, or 0 of a forked one."""
        self._steps, self._reward = steps, None

    def reset(self) -> None:
        """Forget the last episode."""
        super().reset()
        self.continues(0)


def rubric(kind: Kind, discount: float | None) -> SweRubric:
    """Return the rubric that the settings ask for."""
    return SweRubric(kind) if discount is None else DiscountedSweRubric(kind, discount)
