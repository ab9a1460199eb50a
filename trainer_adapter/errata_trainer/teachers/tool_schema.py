"""What a tool's JSON schema says about its arguments: which are equivalent, and which are invalid.

This is not a full validator: it knows types, required and additional properties, and defaults. Bounds, patterns and
formats are left to the environment, because calls that break them still reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NO_DEFAULT = object()
_COMBINED = ("anyOf", "oneOf", "allOf")


class Schema:
    """The schema of a tool's arguments.

    Args:
        parameters: A JSON schema of type object; references within it (``#/…``) are followed.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._root = parameters

    def normal(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with defaults filled in, redundant nulls removed, and numbers by value.

        ``1`` and ``1.0`` are one value only where the schema takes numbers. A null that the schema takes, and whose
        default is another value, stays.
        """
        normal = self._normal(arguments, self._root)
        return normal if isinstance(normal, dict) else dict(arguments)

    def fault(self, arguments: Any) -> str | None:
        """Return what is wrong with arguments, or None."""
        if not isinstance(arguments, Mapping):
            return "the arguments are no object"
        properties = self._properties(self._root)
        required = self._required(self._root)
        if missing := sorted(name for name in required if name not in arguments):
            return f"{', '.join(missing)} missing"
        if self._root.get("additionalProperties") is False and (more := sorted(set(arguments) - set(properties))):
            return f"no arguments {', '.join(more)!r:.80}"
        for name, value in arguments.items():
            types = self._types(properties.get(name, {}))
            if value is None and name not in required:
                continue
            if types and not any(_is_a(value, type_) for type_ in types):
                return f"{name} is no {' or '.join(sorted(types))}"
        return None

    def _normal(self, value: Any, schema: Any) -> Any:
        if isinstance(value, float) and value.is_integer() and "number" in self._types(schema):
            return int(value)
        if isinstance(value, Mapping):
            return self._normal_object(value, schema)
        if isinstance(value, list | tuple):
            items: Any = next((s["items"] for s in self._branches(schema) if "items" in s), {})
            return [self._normal(inner, items) for inner in value]
        return value

    def _normal_object(self, value: Mapping[str, Any], schema: Any) -> dict[str, Any]:
        properties, required = self._properties(schema), self._required(schema)
        normal = {}
        for name, inner in value.items():
            if inner is None and name not in required and not self._null_differs(properties.get(name, {})):
                continue
            normal[name] = self._normal(inner, properties.get(name, {}))
        for name, property_ in properties.items():
            default = self._default(property_)
            if name not in normal and default is not _NO_DEFAULT and default is not None:
                normal[name] = self._normal(default, property_)
        return normal

    def _null_differs(self, property_: Any) -> bool:
        default = self._default(property_)
        return "null" in self._types(property_) and default is not _NO_DEFAULT and default is not None

    def _default(self, schema: Any) -> Any:
        return next((s["default"] for s in self._branches(schema) if "default" in s), _NO_DEFAULT)

    def _properties(self, schema: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for branch in self._branches(schema):
            declared = branch.get("properties")
            if isinstance(declared, Mapping):
                found = {**declared, **found}
        return found

    def _required(self, schema: Any) -> frozenset[str]:
        names = schema.get("required", ()) if isinstance(schema, Mapping) else ()
        return frozenset(name for name in names if isinstance(name, str))

    def _types(self, schema: Any) -> set[str]:
        types: set[str] = set()
        for branch in self._branches(schema):
            declared = branch.get("type", ())
            types |= {declared} if isinstance(declared, str) else set(declared)
        return types

    def _branches(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield a schema and all schemas it is combined of, each once."""
        waiting, seen = [schema], set()
        while waiting:
            branch = waiting.pop(0)
            if not isinstance(branch, Mapping) or id(branch) in seen:
                continue
            seen.add(id(branch))
            yield branch
            waiting += [inner for word in _COMBINED for inner in branch.get(word, ())]
            if isinstance(reference := branch.get("$ref"), str):
                waiting.append(self._referred(reference))

    def _referred(self, reference: str) -> Any:
        found: Any = self._root
        if not reference.startswith("#"):
            return {}
        for step in reference.removeprefix("#").strip("/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            found = found.get(name, {}) if isinstance(found, Mapping) else {}
        return found


def _is_a(value: Any, type_: str) -> bool:
    if isinstance(value, bool):
        return type_ == "boolean"
    if isinstance(value, int):
        return type_ in ("integer", "number")
    if isinstance(value, float):
        return type_ == "number" or (type_ == "integer" and value.is_integer())
    kinds = {"string": str, "object": Mapping, "array": list | tuple, "null": type(None)}
    return isinstance(value, kinds[type_]) if type_ in kinds else type_ not in ("integer", "number", "boolean")
