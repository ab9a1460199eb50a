"""The slots that hint templates may use. Their values come only from text that the agent can read, too.

Nothing that only a grader knows has a slot: no reward, no verifier output, and of the task only what it asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .hint import FailedTurn
from .neutral import neutral

SLOTS: dict[str, int] = {
    "tool": 60,
    "tools": 200,
    "parameters": 160,
    "command": 120,
    "span": 80,
    "file": 120,
    "line": 9,
    "column": 9,
    "test_id": 160,
    "message": 200,
    "cwd": 120,
    "exit_code": 5,
    "time_limit_s": 12,
    "limit": 60,
    "goal": 240,
}
"""Slots and the code points that a value may have at most.

``tool`` the tool that was called; ``tools`` names of those there are; ``parameters`` what the tool takes, only for a
call whose arguments did not fit; ``command`` the command, path or other text that the call is about; ``span`` the part
of it that is the error site; ``file``, ``line``, ``column``, ``test_id``, ``message`` of the site; ``cwd``,
``exit_code``, ``time_limit_s``, ``limit`` (which one was hit) of the observation; ``goal`` the beginning of what the
task asks for.
"""

_MAIN_ARGUMENTS = ("command", "code", "path", "patch", "query", "input")


def slots_of(failed: FailedTurn) -> dict[str, str]:
    """Return the values of the slots that can be filled: one line each, bounded, without chat tokens and backticks."""
    call, marker, observation = failed.call, failed.call.marker, failed.observation
    site = marker.error_site if marker is not None else None
    tools = {str(name): schema for name, schema in map(_described, failed.tools) if name}
    values: dict[str, Any] = {
        "tool": call.name,
        "tools": ", ".join(tools),
        "command": next((call.arguments[name] for name in _MAIN_ARGUMENTS if call.arguments.get(name)), None),
        "cwd": observation.get("cwd"),
        "exit_code": observation.get("exit_code"),
        "time_limit_s": _seconds(observation.get("time_limit_s")),
        "limit": observation.get("limit_hit"),
        "goal": goal_of(failed.rollout.task),
    }
    if call.t is None and call.name in tools:
        values["parameters"] = _parameters(tools[call.name])
    if site is not None:
        values |= {"line": site.line, "column": site.column, "test_id": site.test_id}
        values["file"] = None if site.file is None or site.file.startswith("<") else site.file  # code in the action
        values["message"] = None if site.message is None else site.message.strip().rstrip(".:;, ")
        text = call.arguments.get(site.action_field) if site.action_field else None
        if isinstance(text, str) and site.action_span is not None:
            values["span"] = text[slice(*site.action_span)]
    filled = {}
    for name, value in values.items():
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            shown = neutral(str(value), SLOTS[name]).replace("`", "'")
            if shown:
                filled[name] = shown
    return filled


def goal_of(task: Mapping[str, Any]) -> str | None:
    """Return the goal of a task: its instruction, its problem statement, or the last user message of its prompt."""
    for name in ("instruction", "problem_statement", "prompt"):
        value = task.get(name)
        if isinstance(value, list):
            messages = [one.get("content") for one in value if isinstance(one, Mapping) and one.get("role") == "user"]
            value = messages[-1] if messages else None
        if isinstance(value, str) and value.strip():
            return value
    return None


def _described(tool: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    function = tool.get("function", tool)
    return function.get("name"), function.get("parameters") or {}


def _parameters(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required") or ())
    names = schema.get("properties") or {}
    return ", ".join(f"{name}" if name in required else f"{name} (optional)" for name in names) or "no arguments"


def _seconds(value: Any) -> str | None:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else None
