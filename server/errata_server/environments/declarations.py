"""Options that an operator or author declares for an environment: deterministic, fields that may differ, detection."""

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
    """What holds for all sessions of one environment.

    Args:
        deterministic: Its sessions can be continued by running their requests again (PROTOCOL E2).
        volatile: Fields that may differ between two runs, beside the observation class's ``VOLATILE_FIELDS``; as
            `volatile_fields.resolved` returns them.
        call_timeouts_s: Deadlines of an action's tools in seconds where they are longer than the server's
            (`EnvironmentSpec.call_timeouts_s`).
        sandboxed: It runs commands in sandboxes, whose backend may not have a snapshot for each step.
        detect: Where a foreign environment's observations hold a command's output (PROTOCOL B2); None marks nothing.
    """

    deterministic: bool = False
    volatile: tuple[str, ...] = ()
    detect: FieldMap | None = None
    call_timeouts_s: Mapping[str, float] = field(default_factory=dict)
    sandboxed: bool = False

    def timeout_s(self, action: Any, timeout_s: float) -> float:
        """Return the deadline of a step, which is ``timeout_s`` where nothing longer is declared of its tool."""
        tool = tool_of(getattr(action, "tool", None), getattr(action, "tool_name", None))
        return max(timeout_s, self.call_timeouts_s.get(tool, 0.0))

    def volatile_fields(self, observation: Observation | None = None) -> tuple[str, ...]:
        """Return the volatile fields of an observation; of an MCP result where there is none."""
        cls = type(observation)
        known = _VOLATILE.get(cls)
        if known is None:  # Pydantic looks long for an attribute that a class has not
            known = _VOLATILE[cls] = written_by_class(getattr(cls, "VOLATILE_FIELDS", ()))
        return (*self.volatile, *known) if known else self.volatile


_VOLATILE: dict[type, tuple[str, ...]] = {}
