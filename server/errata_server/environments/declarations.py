"""Options declared for an environment: whether it is deterministic, volatile fields, detection, call timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openenv.core.env_server.types import Observation

from errata_protocol.environment import tool_of

from .detection import FieldMap
from .volatile_fields import written_by_class


@dataclass(frozen=True, slots=True)
class Declared:
    """Options of one environment that apply to all its sessions.

    Args:
        deterministic: Sessions can be recovered by running their requests again (PROTOCOL E2).
        volatile: Fields that may differ between two runs, in addition to ``VOLATILE_FIELDS`` of the observation class;
            in the form that `volatile_fields.resolved` returns.
        call_timeouts_s: Deadlines of tools, seconds by name, if they are longer than the server's
            (`EnvironmentSpec.call_timeouts_s`).
        sandboxed: The environment runs commands in sandboxes, whose backend may be unable to take a snapshot for each
            step.
        detect: Fields of the observation that hold a command's output (PROTOCOL B2); None to mark nothing.
    """

    deterministic: bool = False
    volatile: tuple[str, ...] = ()
    detect: FieldMap | None = None
    call_timeouts_s: Mapping[str, float] = field(default_factory=dict)
    sandboxed: bool = False

    def timeout_s(self, action: Any, timeout_s: float) -> float:
        """Return a step's deadline, seconds: ``timeout_s`` or a longer one declared for the action's tool."""
        tool = tool_of(getattr(action, "tool", None), getattr(action, "tool_name", None))
        return max(timeout_s, self.call_timeouts_s.get(tool, 0.0))

    def volatile_fields(self, observation: Observation | None = None) -> tuple[str, ...]:
        """Return the volatile fields of an observation, or of an MCP result if it is None."""
        cls = type(observation)
        known = _VOLATILE.get(cls)
        if known is None:  # Pydantic is slow to find that a class lacks an attribute
            known = _VOLATILE[cls] = written_by_class(getattr(cls, "VOLATILE_FIELDS", ()))
        return (*self.volatile, *known) if known else self.volatile


_VOLATILE: dict[type, tuple[str, ...]] = {}
