"""The normative statements of the RFCs, as this version of the kit checks them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal


@dataclass(frozen=True)
class Statement:
    """One statement.

    Args:
        id: As ``R-016-7``.
        tag: ``wire``: can be seen in the messages. ``fault``: can be seen where something is lost, late or too much.
            ``inspection``: cannot be seen from outside.
        side: Which program it binds.
        level: Whether it says MUST, or only SHOULD.
        reason: Why it is `inspection`; else empty.
        text: As in the RFC, on one line.
    """

    id: str
    tag: Literal["wire", "fault", "inspection"]
    side: Literal["server", "client"]
    level: Literal["MUST", "SHOULD"]
    reason: str
    text: str

    @property
    def rfc(self) -> str:
        """Number of the RFC, three digits."""
        return self.id.split("-")[1]


@cache
def statements() -> dict[str, Statement]:
    """Return all statements by their id, in the order of the RFCs."""
    text = (resources.files(__package__) / "statements.json").read_text()
    return {one["id"]: Statement(**one) for one in json.loads(text)}


@cache
def schema(name: str) -> dict[str, Any]:
    """Return a JSON Schema of a message by its name, as ``server.Opened``."""
    found: dict[str, Any] = json.loads((resources.files(__package__) / "schemas" / f"{name}.json").read_text())
    return found
