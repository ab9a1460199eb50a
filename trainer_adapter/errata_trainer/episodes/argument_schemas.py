"""The JSON schema of a tool's arguments, as a server sends it, brought to the form that trainers can show to a student.

What comes out has no references and no combinations but ``anyOf``, names that are Python identifiers, and bounded size.
What has no such form is refused by the name of its field.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from errata_protocol.errors import InvalidRequest
from errata_protocol.json_text import well_formed
from errata_protocol.printable import printable

MAX_ARGUMENTS = 64
"""Most arguments of one tool."""
MAX_NODES = 1000
"""Most schemas within the schema of one tool, references followed: a few references can stand for millions."""
MAX_DEPTH = 8
"""Deepest nesting of an argument's schema, references followed."""
MAX_VALUES = 256
"""Most values of one enumeration."""
MAX_NAME = 64
"""Longest name of a tool or an argument, characters."""
MAX_TEXT = 16 * 1024
"""Longest description, and longest JSON of one argument's schema, characters."""

WAY_OUT = "describe the environment with a PlayedEnvironment, as docs/training.md shows"

_INNER = ("items", "additionalProperties")
_PYTHON = {"type", "enum", "anyOf", *_INNER}
"""Keywords that types of Python can say."""
_HEADINGS = ("Args", "Returns", "Raises")
"""Ends of names that transformers takes for headings of a docstring, where a colon follows."""
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_BOUNDS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern",
    "format", "minItems", "maxItems", "uniqueItems",
)  # fmt: skip
"""Keywords that types of Python cannot say; they are written behind the description."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a tool.

    Attributes:
        parameters: JSON schema of all of them, an object.
        fields: The environment's names, by the student's, where they differ.
        constants: Fields that always have the same value, which the student is not asked for.
    """

    parameters: dict[str, Any]
    fields: dict[str, str]
    constants: dict[str, Any]


def arguments_of(schema: Any, where: str, *, without: Iterable[str] = ()) -> Arguments:
    """Return the arguments that a schema of type object describes.

    Args:
        schema: The schema; nothing is assumed about it.
        where: Name of the tool or action in error messages.
        without: Properties to leave out.

    Raises:
        InvalidRequest: A trainer cannot show it to a student; the message names the field.
    """
    if not isinstance(schema, Mapping):
        raise _refusal(where, "its schema is no JSON object")
    reader = _Reader(schema, where)
    root = reader.resolved(schema, where, 0)
    if root.get("type", "object") != "object" or {"anyOf", "oneOf", "enum"} & root.keys():
        raise _refusal(where, "it is no object with named fields but a choice, a list or a single value")
    properties, left_out = root.get("properties", {}), set(without)
    if not isinstance(properties, Mapping):
        raise _refusal(where, "its properties are no JSON object")
    required = [name for name in _names(root.get("required", ()), where) if name not in left_out]
    if missing := [name for name in required if name not in properties]:
        raise _refusal(f"{where}.{printable(missing[0], MAX_NAME)}", "it is required, and the schema does not have it")
    given = {name: field for name, field in properties.items() if name not in left_out}
    if len(given) > MAX_ARGUMENTS:
        raise _refusal(where, f"it has {len(given)} fields, more than {MAX_ARGUMENTS}")
    shown: dict[str, Any] = {}
    fields: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name, field in given.items():
        place = f"{where}.{printable(name, MAX_NAME)}"
        found = reader.expressed(field, place, 1)
        if "const" in found:
            constants[name] = found["const"]
            continue
        own = identifier(name, place)
        if own in shown:
            raise _refusal(place, f"it and {fields.get(own, own)!r} would both be the argument {own!r}")
        shown[own] = {**found, "description": _description(field, found, reader, place)}
        if own != name:
            fields[own] = name
    by_field = {fields.get(own, own): own for own in shown}
    needed = [by_field[name] for name in required if name in by_field]
    parameters = {"type": "object", "properties": shown, "required": needed, "additionalProperties": False}
    return Arguments(parameters, fields, constants)


def identifier(name: Any, where: str) -> str:
    """Return the Python identifier that stands for a name: ``from_`` for ``from``, ``max_depth`` for ``max-depth``.

    Raises:
        InvalidRequest: It is no text, has none of the characters of an identifier, or is too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise _refusal(where, f"a name has 1 to {MAX_NAME} characters")
    found = name if name.isidentifier() else re.sub(r"[^0-9A-Za-z_]+", "_", name)
    if not found.strip("_"):
        raise _refusal(where, f"{printable(name)!r} has no letter or digit of a Python name")
    if found[0].isdigit():
        found = f"_{found}"
    return f"{found}_" if keyword.iskeyword(found) or found == "self" or found.endswith(_HEADINGS) else found


def text_of(text: Any, where: str) -> str:
    """Return a description as valid Unicode; empty without one.

    Raises:
        InvalidRequest: It is no text, or is too long.
    """
    if text is None:
        return ""
    if not isinstance(text, str):
        raise _refusal(where, f"its description is no text but of type {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise _refusal(where, f"its description has {len(text):,} characters, more than {MAX_TEXT:,}")
    return well_formed(text).strip()


def _refusal(where: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where} cannot be a tool for the student: {why}; {WAY_OUT}")


def _names(names: Any, where: str) -> list[str]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _refusal(where, "what is required is no list of names")
    return list(dict.fromkeys(names))


def _description(field: Any, found: Mapping[str, Any], reader: _Reader, where: str) -> str:
    """Return what a student reads of an argument: its description, then what its Python type does not say."""
    whole = reader.resolved(field, where, 1)
    text = text_of(whole.get("description"), where)
    says = [f"{name} {_json(whole[name], where)}" for name in _BOUNDS if name in whole]
    if whole.get("default") is not None:
        says.append(f"default {_json(whole['default'], where)}")
    if _says_more(found):
        says.append(f"JSON schema {_json(found, where)}")
    return " ".join(part for part in (text, f"({', '.join(says)})" if says else "") if part)


def _says_more(found: Mapping[str, Any]) -> bool:
    """Return whether a schema says what types of Python cannot: fields of objects, places of lists, inner bounds."""
    inner = [*found.get("anyOf", ()), *(found[name] for name in _INNER if name in found)]
    return not found.keys() <= _PYTHON or any(_says_more(schema) for schema in inner)


def _json(value: Any, where: str) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > MAX_TEXT:
        raise _refusal(where, f"it takes {len(text):,} characters to describe, more than {MAX_TEXT:,}")
    return well_formed(text)


class _Reader:
    """Reads the schemas of one tool.

    Args:
        root: The whole schema, in which references point.
        tool: Name of the tool, for messages.
    """

    def __init__(self, root: Mapping[str, Any], tool: str) -> None:
        self._root, self._tool, self._nodes = root, tool, 0

    def resolved(self, schema: Any, where: str, depth: int) -> dict[str, Any]:
        """Return a schema with its references and single combinations followed, as far as its own level goes.

        Raises:
            InvalidRequest: It is no schema, points elsewhere, or nests too deeply or too much.
        """
        if schema is True:
            return {}
        found: dict[str, Any] = {}
        while True:
            self._nodes += 1
            if self._nodes > MAX_NODES:
                raise _refusal(where, f"the schemas of {self._tool} are more than {MAX_NODES}, references followed")
            if not isinstance(schema, Mapping):
                raise _refusal(where, "its schema is no JSON object")
            found = {**schema, **found}  # what stands beside a reference is meant for this place
            if (reference := found.pop("$ref", None)) is not None:
                schema = self._target(reference, where)
            elif len(parts := self._list(found, "allOf", where)) == 1:
                schema = parts[0]
                del found["allOf"]
            elif parts:
                raise _refusal(where, "it has to fit several schemas at once (allOf)")
            else:
                break
        if depth > MAX_DEPTH:
            raise _refusal(where, f"it nests more than {MAX_DEPTH} levels, or refers to itself")
        return found

    def expressed(self, schema: Any, where: str, depth: int) -> dict[str, Any]:
        """Return a schema without references and combinations but ``anyOf``; or ``const``.

        Raises:
            InvalidRequest: It has no such form.
        """
        found = self.resolved(schema, where, depth)
        if "const" in found:
            return {"const": found["const"]}
        if "enum" in found:
            return {"enum": self._values(found["enum"], where)}
        choices = self._list(found, "anyOf", where) or self._list(found, "oneOf", where)
        if choices:
            return {"anyOf": [self._inner(choice, where, depth) for choice in choices]}
        kinds = found.get("type")
        if isinstance(kinds, list):
            return {"anyOf": [self._typed({**found, "type": kind}, where, depth) for kind in kinds]}
        return self._typed(found, where, depth)

    def _typed(self, found: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        kind = found.get("type", "object" if "properties" in found else None)
        if kind is None:
            return {}
        if kind not in _TYPES:
            raise _refusal(where, f"{printable(kind, MAX_NAME)!r} is no type of JSON schema")
        # What an argument's own description says is written there; of what is within it, the schema is.
        told = {} if depth == 1 else {name: found[name] for name in (*_BOUNDS, "description") if name in found}
        told["type"] = kind
        if kind == "array":
            if "items" in found and found["items"] is not False:  # False stands behind places
                told["items"] = self._inner(found["items"], f"{where}[]", depth)
            if places := self._list(found, "prefixItems", where):
                told["prefixItems"] = [self._inner(place, f"{where}[]", depth) for place in places]
        if kind == "object":
            if isinstance(properties := found.get("properties"), Mapping):
                told["properties"] = {
                    name: self._inner(field, f"{where}.{printable(name, MAX_NAME)}", depth)
                    for name, field in properties.items()
                }
                told["required"] = _names(found.get("required", ()), where)
            if isinstance(values := found.get("additionalProperties"), Mapping):
                told["additionalProperties"] = self._inner(values, f"{where}.*", depth)
        return told

    def _inner(self, schema: Any, where: str, depth: int) -> dict[str, Any]:
        told = self.expressed(schema, where, depth + 1)
        return {"enum": self._values([told["const"]], where)} if "const" in told else told

    def _values(self, values: Any, where: str) -> list[Any]:
        if not isinstance(values, list) or not 0 < len(values) <= MAX_VALUES:
            raise _refusal(where, f"an enumeration has 1 to {MAX_VALUES} values")
        if not all(value is None or isinstance(value, str | int | float) for value in values):
            raise _refusal(where, "its enumeration has values that are no texts or numbers")
        for value in values:
            text_of(value if isinstance(value, str) else None, where)
        return [well_formed(value) if isinstance(value, str) else value for value in values]

    def _list(self, found: Mapping[str, Any], name: str, where: str) -> list[Any]:
        parts = found.get(name, [])
        if not isinstance(parts, list):
            raise _refusal(where, f"its {name} is no list")
        return parts

    def _target(self, reference: Any, where: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise _refusal(where, f"it refers to {printable(reference, 200)!r}, which is not in the schema itself")
        at: Any = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(at, Mapping) or name not in at:
                raise _refusal(where, f"it refers to {printable(reference, 200)!r}, which is not there")
            at = at[name]
        return at
