"""The declared rubric: the reward of a graded repository, and optionally a reward for each step."""

from __future__ import annotations

from typing import Any, Literal

from openenv.core.rubrics import Rubric

from ..rules.verdict import Resolution

Kind = Literal["resolved", "fraction"]


class Resolved(Rubric):  # type: ignore[misc]  # openenv ships no types
    """1.0 where the instance is resolved by the benchmark's rules, else 0.0."""

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


class Untampered(Rubric):  # type: ignore[misc]  # openenv ships no types
    """0.0 where the agent's code interfered with the grading, else 1.0."""

    def __init__(self) -> None:
        super().__init__()
        self.tampering: tuple[str, ...] = ()

    def forward(self, action: Any, observation: Any) -> float:
        """Rate the tampering that was set."""
        return float(not self.tampering)


class SweRubric(Rubric):  # type: ignore[misc]  # openenv ships no types
    """The reward of an episode: its outcome, or 0.0 where the grading was tampered with. Earlier steps get 0.0.

    Args:
        kind: Kind of the outcome's reward: ``resolved`` or ``fraction``.
    """

    def __init__(self, kind: Kind = "resolved") -> None:
        super().__init__()
        self.outcome = Resolved() if kind == "resolved" else FailToPassFraction()
        self.untampered = Untampered()

    def graded(self, resolution: Resolution, tampering: tuple[str, ...]) -> None:
        """Set what the next final step is rated by. Called before the step that ends the episode is rated.

        Args:
            resolution: Verdict of the benchmark's rules on the instance's tests.
            tampering: Signs of interference with the tests, in words; empty if there were none.
        """
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
        kind: Kind of the outcome's reward: ``resolved`` or ``fraction``.
        discount: Factor for each step to the end, in [0, 1].
    """

    def __init__(self, kind: Kind, discount: float) -> None:
        super().__init__(kind)
        self.discount = discount
        self._steps = 0
        self._reward: float | None = None

    @property
    def trajectory(self) -> list[None]:
        """One entry for each rated step; the steps themselves are in the journal."""
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
        """Set the number of steps so far: those of a restored session, 0 for a forked one."""
        self._steps, self._reward = steps, None

    def reset(self) -> None:
        """Forget the last episode."""
        super().reset()
        self.continues(0)


def rubric(kind: Kind, discount: float | None) -> SweRubric:
    """Return the rubric for the settings ``reward`` and ``discount``."""
    return SweRubric(kind) if discount is None else DiscountedSweRubric(kind, discount)
