"""Reads tool calls in a student's text: JSON or Qwen's tags in ``<tool_call>``. ROLL gives environments only text."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

_OPENING = "<tool_call>"
_MARKS = re.compile(f"{_OPENING}|</think>")
_ENDS = re.compile("</function>")
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def tool_calls(text: str, tools: Mapping[str, Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the tool calls in a student's turn as chat completions have them, and the number of unreadable ones.

    A call is ``{"name": ..., "arguments": {...}}``, or ``<function=NAME><parameter=KEY>VALUE</parameter></function>``
    as Qwen3-Coder writes it. A last call may lack its closing tag, at which generation may have stopped.

    Args:
        text: Text of the turn. Calls in its reasoning (before ``</think>``) are none.
        tools: JSON schema of the arguments of each tool. Between Qwen's tags all values are text, and those of
            parameters that are no strings are read as JSON.
    """
    calls: list[dict[str, Any]] = []
    unread = at = 0
    ends = [found.start() for found in _ENDS.finditer(text)]
    for mark in _MARKS.finditer(text):
        if mark.start() < at:
            continue  # in the call before, e.g. in a command that searches for it
        if mark[0] != _OPENING:
            calls, unread = [], 0
            continue
        begin = _SPACE.match(text, mark.end()).end()  # type: ignore[union-attr]
        call, at = _tagged(text, begin, ends, tools) if text.startswith("<function=", begin) else _json(text, begin)
        if call is None:
            unread += 1
        else:
            calls.append({"type": "function", "function": call})
    return calls, unread


def _json(text: str, begin: int) -> tuple[dict[str, Any] | None, int]:
    """Return a call in JSON, None if it cannot be read, and where it ends."""
    try:
        call, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not _is_text(name):
        return None, end
    return {"name": name, "arguments": call.get("arguments", {})}, end


def _tagged(
    text: str, begin: int, ends: list[int], tools: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any] | None, int]:
    """Return a call between Qwen's tags, None if it cannot be read, and where it ends.

    Args:
        text: Text of the turn.
        begin: Place of ``<function=``.
        ends: Places of ``</function>`` in the text.
        tools: JSON schema of the arguments of each tool.
    """
    known = bisect_left(ends, begin)
    end = ends[known] if known < len(ends) else len(text)
    name, closed, body = text[begin:end].removeprefix("<function=").partition(">")
    if not closed:
        return None, end
    schemas = tools.get(name, {}).get("properties") or {}
    return {"name": name, "arguments": {key: _value(given, schemas.get(key)) for key, given in _parameters(body)}}, end


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    """Return names and texts of the parameters of a call between Qwen's tags."""
    opening, closing = "<parameter=", "</parameter>"
    at = body.find(opening)
    while at >= 0:
        named = body.find(">", at)
        end = body.find(closing, named)
        if named < 0 or end < 0:
            return
        yield body[at + len(opening) : named], body[named + 1 : end].removeprefix("\n").removesuffix("\n")
        at = body.find(opening, end)


def _value(text: str, schema: Any) -> Any:
    """Return a parameter's value: what its text says as JSON, unless it is a string or says nothing."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds is None or "string" in ([kinds] if isinstance(kinds, str) else kinds):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_text(name: str) -> bool:
    """Return whether a name can be written in UTF-8: JSON can spell half a pair, upon which ROLL's hash fails."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
