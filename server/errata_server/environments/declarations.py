"""Options that an operator or author declares for an environment: deterministic, fields that may differ, detection."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from openenv.core.env_server.types import Observation

from errata_protocol.errors import InvalidRequest

from .detection import FieldMap


def field_names(given: Sequence[str] | str) -> tuple[str, ...]:
    """Return field names that were given as a list, or as one text with commas between, as on the command line.

    Raises:
        InvalidRequest: They are something else.
    """
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(
            f"volatile takes names of fields, ['timestamp', 'elapsed'] or 'timestamp,elapsed', not {given!r}"
        )
    return tuple(name.strip() for name in names if name.strip())


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

    def volatile_fields(self, observation: Observation | None = None) -> tuple[str, ...]:
        """Return the volatile fields of an observation; of an MCP result where there is none."""
        cls = type(observation)
        known = _VOLATILE.get(cls)
        if known is None:  # Pydantic looks long for an attribute that a class has not
            known = _VOLATILE[cls] = tuple(getattr(cls, "VOLATILE_FIELDS", ()))
        return (*self.volatile, *known) if known else self.volatile


_VOLATILE: dict[type, tuple[str, ...]] = {}
