"""State of a fork whose environment does not know that it is one (R-015-22)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ForkedState:
    """Makes a fork's state from what its environment says, which counts from the parent's reset.

    Args:
        name: ``episode_id`` of the fork.
        parent: ``episode_id`` in the environment's state when the fork began.
        before: ``step_count`` in it.
    """

    name: str
    parent: Any
    before: int

    @classmethod
    def of(cls, state: dict[str, Any], name: str, t: int) -> ForkedState:
        """Return it for an environment that was brought to delivery ``t`` of the fork, and whose state is ``state``."""
        count = state.get("step_count")
        return cls(name, state.get("episode_id"), max(0, count - t) if type(count) is int else 0)

    def applied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with the fork's ``episode_id`` and steps counted from it; what is not the parent's stays."""
        count = state.get("step_count")
        if state.get("episode_id") != self.parent or type(count) is not int or count < self.before:
            return state
        return {**state, "episode_id": self.name, "step_count": count - self.before}
