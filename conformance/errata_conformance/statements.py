"""The normative statements of rfcs/notes that this version of the kit checks."""

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
        id: Such as ``R-016-7``.
        tag: ``wire``: messages show whether it holds. ``fault``: only losses, delays or floods show it.
            ``inspection``: it cannot be seen from outside.
        side: The program that it binds.
        level: MUST or SHOULD.
        reason: Why its tag is ``inspection``; empty for other tags.
        text: The statement's text in its note, on one line.
    """

    id: str
    tag: Literal["wire", "fault", "inspection"]
    side: Literal["server", "client"]
    level: Literal["MUST", "SHOULD"]
    reason: str
    text: str

    @property
    def rfc(self) -> str:
        """Number of its group, three digits."""
        return self.id.split("-")[1]


@cache
def statements() -> dict[str, Statement]:
    """Return all statements by their id, in the order of their numbers."""
    text = (resources.files(__package__) / "statements.json").read_text()
    return {one["id"]: Statement(**one) for one in json.loads(text)}


@cache
def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a message, by a name such as ``server.Opened``."""
    found: dict[str, Any] = json.loads((resources.files(__package__) / "schemas" / f"{name}.json").read_text())
    return found
