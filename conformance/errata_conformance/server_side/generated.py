"""Makes values from a JSON Schema: actions to try on an environment that nobody has described to the kit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 8
"""Deepest nesting of a value that is made; what lies deeper is null."""

MAX_VALUES = 10_000
"""Most values in one object that is made; further ones are null."""

_FORMATS = {
    "uuid": "00000000-0000-4000-8000-00000000000{}",
    "date": "2024-01-0{}",
    "date-time": "2024-01-0{}T00:00:00Z",
    "time": "00:00:0{}Z",
    "email": "a{}@example.org",
    "uri": "https://example.org/{}",
}


def objects(schema: Any, variants: int = 3) -> Iterator[dict[str, Any]]:
    """Yield different objects that a schema allows, as far as the kit understands it.

    First come objects with the required members alone, then with all, as some environments need members that their
    schema does not require.

    Args:
        schema: JSON Schema of an object, with its definitions in ``$defs``.
        variants: How many of each kind.
    """
    if not isinstance(schema, dict):
        return
    made: list[dict[str, Any]] = []
    for every in (False, True):
        for variant in range(variants):
            value = _Maker(schema, variant, every).value(schema, 0)
            if isinstance(value, dict) and value not in made:
                made.append(value)
                yield value


class _Maker:
    """Makes one variant of a value.

    Args:
        root: Schema that has the definitions.
        variant: Which of several values of a type, from 0.
        every: Whether objects have their optional members too.
    """

    def __init__(self, root: dict[str, Any], variant: int, every: bool) -> None:
        self._root, self._variant, self._every = root, variant, every
        self._left = MAX_VALUES

    def value(self, schema: Any, depth: int) -> Any:
        """Return a value that the schema allows."""
        self._left -= 1
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self._left < 0:
            return None
        if isinstance(schema.get("$ref"), str):
            return self.value({**self._definition(schema["$ref"]), **_without(schema, "$ref")}, depth + 1)
        if "const" in schema:
            return schema["const"]
        for name in ("enum", "examples"):
            if isinstance(schema.get(name), list) and schema[name]:
                return schema[name][self._variant % len(schema[name])]
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name]:
                possible = [one for one in schema[name] if not (isinstance(one, dict) and one.get("type") == "null")]
                # In an alternative of objects each is a form of its own; else the first is the usual one.
                several = [one for one in possible if isinstance(one, dict) and ("$ref" in one or "properties" in one)]
                chosen = several[self._variant % len(several)] if several else (possible or [None])[0]
                return self.value(chosen, depth + 1)
        if isinstance(schema.get("allOf"), list):
            merged = _without(schema, "allOf")
            for one in schema["allOf"]:
                part = self._definition(one["$ref"]) if isinstance(one, dict) and "$ref" in one else one
                merged = {**merged, **part} if isinstance(part, dict) else merged
            return self.value(merged, depth + 1)
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), None)
        if kind == "object" or (kind is None and "properties" in schema):
            properties = schema.get("properties")
            members = properties if isinstance(properties, dict) else {}
            required = [name for name in _listed(schema.get("required")) if isinstance(name, str)]
            optional = {name: one for name, one in members.items() if name not in required and name != "metadata"}
            made = {name: self.value(members.get(name, {}), depth + 1) for name in required}
            if self._every:
                for name, one in optional.items():
                    usual = one.get("default") if isinstance(one, dict) else None
                    made[name] = usual or self.value(one, depth + 1)
            return made
        if kind == "array":
            length = max(_whole(schema.get("minItems"), 0), 1 if self._every else 0)
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(min(length, self._left + 1))]
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        if kind == "boolean":
            return self._variant % 2 == 0
        if kind == "string":
            form = _FORMATS.get(str(schema.get("format")))
            text = "abc"[self._variant % 3] if form is None else form.format(self._variant + 1)
            text = text.ljust(min(_whole(schema.get("minLength"), 0), 4096), "a")
            return text[: _whole(schema.get("maxLength"), len(text))]
        return None

    def _number(self, schema: dict[str, Any], kind: str) -> Any:
        names = ("multipleOf", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        step, low, above, high, below = (_number(schema.get(name)) for name in names)
        step = step or 1

        def allowed(value: float) -> bool:
            return (
                (low is None or value >= low)
                and (above is None or value > above)
                and (high is None or value <= high)
                and (below is None or value < below)
            )

        floor = low if low is not None else above
        if floor is None:
            ceiling = high if high is not None else below
            floor = 0 if ceiling is None or ceiling >= 0 else ceiling - 8 * step
        first = math.ceil(floor / step)
        found = [value for n in range(8) if allowed(value := (first + n) * step)]
        if not found and low is None and above is not None and below is not None:
            found = [(above + below) / 2]  # as in 0 < x < 1
        value = found[self._variant % len(found)] if found else floor
        return float(value) if kind == "number" else int(value)

    def _definition(self, reference: object) -> dict[str, Any]:
        found: Any = self._root
        for part in str(reference).removeprefix("#/").split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _without(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k != name}


def _number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
    return value if usable else None


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
