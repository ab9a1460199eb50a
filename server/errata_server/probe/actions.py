"""Draws random actions from an environment's action schema.

A value comes from a list that the observation offers (``legal_actions``), from words, numbers and ranges in the field's
description, or else from fixed samples.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

PYTHON = (
    "x = 2 + 3\nprint(x)",
    "values = [i * i for i in range(6)]\nprint(values)",
    "def double(n):\n    return n * 2\nprint(double(21))",
    "undefined_name + 1",
    "1 / 0",
    "import os",
    "print({'alpha', 'beta', 'gamma', 'delta'})",
    "words = 'one two three'.split()\nprint(sorted(words), len(words))",
    "import math\nprint(math.sqrt(2))",
    "print([]",
    "text = 'abc' * 3\ntext",
    "d = {'a': 1}\nd['b']",
)
"""Samples for fields that take Python code: results, output, several kinds of errors, assignments."""

SHELL = (
    "echo hello",
    "ls",
    "pwd",
    "cat nosuchfile",
    "printf 'a\\nb\\n' | wc -l",
    "nosuchcommand",
    "X=1; echo $X",
    "true",
)
WORDS = ("yes", "no", "7", "hello", "a", "left", "up", "blue", "the answer is 42", "")

_CODE_NAME = re.compile(r"(?i)(^|_)(code|source|script|program|python|snippet)($|_)")
_SHELL_NAME = re.compile(r"(?i)(^|_)(command|cmd|shell|bash)($|_)")
_OFFERED = re.compile(r"(?i)(legal|valid|available|possible|allowed|admissible)_?\w*")
_QUOTED = re.compile(r"""["'`]([A-Za-z][\w.-]{0,30})["'`]""")
_RANGE = re.compile(r"(-?\d+) ?(?:to|-|–|\.\.) ?(-?\d+)")
_NUMBERS = re.compile(r"\[(-?\d+(?:, ?-?\d+)+)\]|^\s*(-?\d+) ?=", re.MULTILINE)


class ActionGenerator:
    """Draws actions that fit a JSON schema.

    Args:
        schema: JSON schema of the action class, with its docstring and the descriptions of its fields.
        seed: Seed of the draws; the same seed and observations give the same actions.
        tools: MCP tools in the form of ``tools/list``, for an environment whose actions are tool calls.
    """

    def __init__(self, schema: Mapping[str, Any], seed: int, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._schema = schema
        self._defs = schema.get("$defs", {})
        self._random = random.Random(seed)
        self._tools = list(tools)

    def action(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Draw an action; a call of a random tool if there are tools and the schema has a ``tool_name``.

        Args:
            observation: The last observation. If it has a list of legal values that fit a field, the field is drawn
                from the list nine times out of ten.
        """
        properties = self._schema.get("properties", {})
        if self._tools and "tool_name" in properties:
            tool, arguments = self.tool_call()
            return {"type": "call_tool", "tool_name": tool, "arguments": arguments}
        return self._object(self._schema, observation)

    def tool_call(self) -> tuple[str, dict[str, Any]]:
        """Draw a tool; return its name and random arguments."""
        tool = self._random.choice(self._tools)
        schema = tool.get("inputSchema") or tool.get("input_schema") or {}
        drawer = ActionGenerator(schema, self._random.getrandbits(32))
        return str(tool["name"]), drawer._object(schema, {})

    def _object(self, schema: Mapping[str, Any], observation: Mapping[str, Any]) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        made = {}
        for name, field in schema.get("properties", {}).items():
            if name == "metadata" or (name not in required and self._random.random() < 0.3 and len(required) > 0):
                continue
            made[name] = self._value(name, field, schema, observation)
        return made

    def _value(
        self, name: str, field: Mapping[str, Any], owner: Mapping[str, Any], observation: Mapping[str, Any]
    ) -> Any:
        field = self._resolved(field)
        if "const" in field:
            return field["const"]
        if "enum" in field:
            return self._random.choice(field["enum"])
        kind = field.get("type")
        offered = [value for value in _offered(observation) if _fits(value, kind)]
        if offered and self._random.random() < 0.9:
            return self._random.choice(offered)
        description = f"{field.get('description', '')}\n{_field_description(name, owner.get('description', ''))}"
        match kind:
            case "integer" | "number":
                return self._number(kind, field, description)
            case "boolean":
                return self._random.random() < 0.2
            case "array":
                item = field.get("items", {"type": "string"})
                return [self._value(name, item, owner, {}) for _ in range(self._random.randint(0, 3))]
            case "object":
                return self._object(field, {})
            case "null":
                return None
        return self._text(name, description)

    def _number(self, kind: str, field: Mapping[str, Any], description: str) -> int | float:
        low, high = (
            field.get("minimum", field.get("exclusiveMinimum")),
            field.get("maximum", field.get("exclusiveMaximum")),
        )
        if low is None and high is None:
            listed = [int(n) for group in _NUMBERS.findall(description) for n in re.findall(r"-?\d+", " ".join(group))]
            if listed:
                return self._random.choice(listed)
            span = _RANGE.search(description)
            low, high = (int(span[1]), int(span[2])) if span else (0, 7)
        low = low if low is not None else high - 8
        high = high if high is not None else low + 8
        if kind == "integer":
            return self._random.randint(int(low), max(int(low), int(high)))
        return round(self._random.uniform(low, high), 3)

    def _text(self, name: str, description: str) -> str:
        if _CODE_NAME.search(name):
            return self._random.choice(PYTHON)
        if _SHELL_NAME.search(name):
            return self._random.choice(SHELL)
        words: Sequence[str] = _QUOTED.findall(description) or WORDS
        return self._random.choice(words)

    def _resolved(self, field: Mapping[str, Any]) -> Mapping[str, Any]:
        while True:
            choices = [c for c in field.get("anyOf", field.get("oneOf", ())) if c.get("type") != "null"]
            if choices:
                field = {**self._random.choice(choices), "description": field.get("description", "")}
            elif "$ref" in field:
                description = field.get("description")
                field = self._defs.get(str(field["$ref"]).rpartition("/")[2], {})
                field = {**field, "description": description} if description else field
            elif len(field.get("allOf", ())) == 1:
                field = field["allOf"][0]
            else:
                return field


def _offered(observation: Mapping[str, Any]) -> list[Any]:
    for name, value in observation.items():
        if _OFFERED.fullmatch(name) and isinstance(value, list) and value:
            return value
    return []


def _fits(value: Any, kind: str | None) -> bool:
    match kind:
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
    return False


def _field_description(name: str, docstring: str) -> str:
    """Return a field's entry in a docstring, with the lines that are indented deeper; '' if it has no entry."""
    lines = docstring.splitlines()
    for at, line in enumerate(lines):
        found = re.match(rf"(\s*){re.escape(name)}\s*(\([^)]*\))?\s*:", line)
        if found:
            rest = [line[found.end() :]]
            for after in lines[at + 1 :]:
                if after.strip() and len(after) - len(after.lstrip()) <= len(found[1]):
                    break
                rest.append(after)
            return "\n".join(rest)
    return ""
