"""Compares actions: equal actions have equal keys.

An action is a model's answer at a state: tool calls, or a final answer without any. Its key is the sha256 of its
canonical JSON. The original form is kept beside it (`KeyedAction`), because that is what a student is trained on.

There are two levels. ``exact``: names, arguments and text as they are. ``canonical``: differences that do not matter to
the tool's schema or to the shell are removed. Text that is written to files is never trimmed or lower-cased. Whether
two different actions have the same effect is not decided here.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..rollouts.rollout import Call
from .shell import Unreadable, canonical_shell, normal_path
from .tool_schema import Schema

Level = Literal["exact", "canonical"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call without its id.

    Attributes:
        name: Name of the tool, as written.
        arguments: Arguments, parsed.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Action:
    """A model's answer at a state.

    Attributes:
        calls: Tool calls in the order in which they were made; empty for a final answer.
        text: The text beside the calls, or the final answer.
    """

    calls: tuple[ToolCall, ...] = ()
    text: str = ""

    @classmethod
    def of_calls(cls, calls: Sequence[Call], text: str = "") -> Action:
        """Return the action of a student's turn (`errata_trainer.Turn.calls`)."""
        return cls(tuple(ToolCall(call.name, call.arguments) for call in calls), text)


@dataclass(frozen=True, slots=True)
class KeyedAction:
    """An action with its key; two are equal if and only if their keys are.

    Attributes:
        key: sha256 of the canonical form, in hexadecimal.
        raw: The action as it was made.
    """

    key: str
    raw: Action = field(compare=False)


class Unusable(ValueError):
    """The answer is not an action that the tools accept.

    Attributes:
        reason: A word for counting, e.g. ``unknown_tool``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ActionKeys:
    """Computes the keys of actions for a set of tools.

    Args:
        tools: JSON-schema descriptions with ``name`` and ``parameters``, bare as in `EnvironmentSpec.tools` or in the
            form of chat requests (``{"type": "function", "function": {…}}``).
        level: Level of comparison, ``canonical`` or ``exact``.
        shell_arguments: Names of string arguments that are shell text.
        path_arguments: Names of string arguments that are POSIX paths.
        aliases: Declared names of tools, by other names for them.
        read_only: Names of tools whose calls can be made in any order: a turn of only such calls is a multiset.

    Raises:
        ValueError: The level is none, or a tool has no name.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        level: Level = "canonical",
        shell_arguments: Sequence[str] = ("command",),
        path_arguments: Sequence[str] = ("path",),
        aliases: Mapping[str, str] | None = None,
        read_only: Sequence[str] = (),
    ) -> None:
        if level not in ("exact", "canonical"):
            raise ValueError(f"level is {level!r}: exact or canonical")
        self._schemas = {}
        for tool in tools:
            function = tool.get("function", tool)
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise ValueError(f"a tool has no name: {tool!r:.100}")
            self._schemas[function["name"]] = Schema(function.get("parameters") or {})
        self._level = level
        self._shell = frozenset(shell_arguments)
        self._paths = frozenset(path_arguments)
        self._aliases = dict(aliases or {})
        self._read_only = frozenset(read_only)

    def keyed(self, action: Action, *, cwd: str | None = None) -> KeyedAction:
        """Return the action with its key. Unknown tools have keys, too.

        Args:
            action: Action of a student or a teacher.
            cwd: Absolute working directory at the state; None if unknown.
        """
        form = json.dumps(self.canonical(action, cwd=cwd), sort_keys=True, separators=(",", ":"))
        return KeyedAction(hashlib.sha256(form.encode()).hexdigest(), action)

    def canonical(self, action: Action, *, cwd: str | None = None) -> dict[str, Any]:
        """Return the canonical JSON form, of which the key is the hash."""
        if not action.calls:
            exact = self._level == "exact"
            return {"answer": action.text if exact else " ".join(_text(action.text).split())}
        calls = [[self._name(call.name), self._arguments(call, cwd)] for call in action.calls]
        if len(calls) > 1 and self._level == "canonical" and all(name in self._read_only for name, _ in calls):
            calls.sort(key=lambda call: json.dumps(call, sort_keys=True))
        return {"calls": calls}

    def check(self, action: Action) -> None:
        """Raise `Unusable` if the tools cannot accept an action; such an answer is no vote.

        Raises:
            Unusable: ``empty``, ``unknown_tool`` or ``wrong_arguments``.
        """
        if not action.calls and not action.text.strip():
            raise Unusable("empty", "the answer has neither a tool call nor text")
        for call in action.calls:
            schema = self._schemas.get(self._name(call.name))
            if schema is None:
                known = ", ".join(sorted(self._schemas)) or "none"
                raise Unusable("unknown_tool", f"there is no tool {call.name!r:.80}: {known}")
            if fault := schema.fault(call.arguments):
                raise Unusable("wrong_arguments", f"{call.name}: {fault}")

    def _name(self, name: str) -> str:
        return name if self._level == "exact" or name in self._schemas else self._aliases.get(name, name)

    def _arguments(self, call: ToolCall, cwd: str | None) -> dict[str, Any]:
        if self._level == "exact":
            return dict(call.arguments)
        schema = self._schemas.get(self._name(call.name))
        arguments = schema.normal(call.arguments) if schema is not None else dict(call.arguments)
        return {name: self._value(name, _texts(value), cwd) for name, value in arguments.items()}

    def _value(self, name: str, value: Any, cwd: str | None) -> Any:
        if not isinstance(value, str):
            return value
        if name in self._paths:
            return normal_path(value, cwd)
        if name in self._shell:
            try:
                return {"shell": canonical_shell(value, cwd=cwd)}
            except Unreadable:
                return {"bytes": value}  # equal to itself only, and to no command that could be read
        return value


def _text(text: str) -> str:
    return unicodedata.normalize("NFC", re.sub(r"\r+\n", "\n", text))


def _texts(value: Any) -> Any:
    """Return a JSON value with all its strings normalised."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {str(name): _texts(inner) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [_texts(inner) for inner in value]
    return value
