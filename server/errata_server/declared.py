"""What is declared of an environment beside its code: by its class, its spec, or the operator who serves it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from openenv.core.env_server.types import Observation

from .detecting import FieldMap


@dataclass(frozen=True, slots=True)
class Declared:
    """What holds for all sessions of one environment.

    Args:
        deterministic: Its sessions can be continued by running their requests again (PROTOCOL E2).
        volatile: Fields that may differ between two runs, beside the observation class's ``VOLATILE_FIELDS``.
        detect: Where a foreign environment's observations hold a command's output (PROTOCOL B2); None marks nothing.
    """

    deterministic: bool = False
    volatile: tuple[str, ...] = ()
    detect: FieldMap | None = None

    def volatile_fields(self, observation: Observation | None = None) -> Collection[str]:
        """Return the volatile fields of an observation; of an MCP result where there is none."""
        return frozenset((*self.volatile, *getattr(type(observation), "VOLATILE_FIELDS", ())))
