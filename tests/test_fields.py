"""rfcs/FIELDS.md names every field of every schema once, with what shows that it is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .test_rfcs import NOTES, STATEMENT

ROOT = Path(__file__).parents[1]
ROWS = re.findall(
    r"^\| `(\w+)` \| (.+) \| (R-\d{3}-\d+|tests/\S+) \|$", (ROOT / "rfcs" / "FIELDS.md").read_text(), re.M
)
REMOVED = {"status", "max_payload"}
"""Named in the text as removed."""


def fields(schema: Any) -> Iterator[str]:
    """Yield the names of all properties of a schema."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            yield from properties
        for value in schema.values():
            yield from fields(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from fields(value)


def test_every_field_of_the_schemas_has_one_line() -> None:
    found = {
        name for path in (ROOT / "rfcs" / "schemas").glob("*.json") for name in fields(json.loads(path.read_text()))
    }
    named = [name for name, *_ in ROWS]
    assert sorted(named) == sorted(set(named))
    assert set(named) == found
    assert not found & REMOVED


def test_what_shows_it_exists() -> None:
    statements = {name for path in NOTES for name, *_ in STATEMENT.findall(path.read_text())}
    for name, without, shown in ROWS:
        assert len(without) > 10, name
        assert shown in statements if shown.startswith("R-") else (ROOT / shown).exists(), (name, shown)
