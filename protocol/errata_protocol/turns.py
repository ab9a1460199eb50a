"""`Turn`: what an agent did in one request and how it ended, as people look at it.

Requests and payloads belong to environments and agents. A field that is missing, or is not what it should be, is left
out of a turn; it is no error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .bounded_json import decode
from .bundle import DeliveryRecord, FailureRecord
from .replay import observation_of
from .rollouts import marker_of

_OPENING, _CLOSING = "\u00ab", "\u00bb"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent and its outcome.

    Args:
        t: Index of the delivery; None for a request that delivered nothing.
        kind: Kind of the request: reset, step or mcp.
        action: The request, decoded: an action, the arguments of a reset, or a call of a tool.
        exit_code: Exit code of the command that ran, if the observation has one.
        error: Why the request failed apart from an exit code: a code, or the error that the observation names.
        error_kind: Kind of the marked error.
        error_site: Where the turn failed, in the fields of an `ErrorSite`.
        hint_template_key: Key of the hint that fits.
        reward: Reward of the delivery.
        done: Whether the delivery ended the episode.
        duration_s: Time that the call took, in seconds, if the observation has it.
        created: When the request began to run, seconds since the epoch.
    """

    t: int | None
    kind: str
    action: Any
    exit_code: int | None = None
    error: str | None = None
    error_kind: str | None = None
    error_site: Mapping[str, Any] | None = None
    hint_template_key: str | None = None
    reward: float | None = None
    done: bool = False
    duration_s: float | None = None
    created: float | None = None

    @property
    def action_text(self) -> str:
        """The action as text, with the part that was wrong in guillemets: ``cat «acces.log»``."""
        return _action_text(self.kind, _marked(self.action, self.error_site or {}))

    @property
    def site_text(self) -> str:
        """The place of the error: test, file and line, else the part of the action that was wrong."""
        site = self.error_site or {}
        parts = [site["test_id"]] if isinstance(site.get("test_id"), str) else []
        if isinstance(file := site.get("file"), str):
            parts.append(f"{file}:{site['line']}" if isinstance(site.get("line"), int) else file)
        if not parts and (found := _span(self.action, site)) is not None:
            text, (start, end) = found[0][found[1]], found[2]
            parts.append(_OPENING + text[start:end] + _CLOSING)
        if not parts and isinstance(site.get("action_field"), str):
            parts.append(f"in {site['action_field']}")
        return " ".join(parts)

    @property
    def shown(self) -> dict[str, Any]:
        """The turn as a row of a table shows it, ready for JSON."""
        fields = ("t", "exit_code", "reward", "error_kind", "hint_template_key")
        return {name: getattr(self, name) for name in fields} | {"action": self.action_text, "site": self.site_text}

    @property
    def outcome_text(self) -> str:
        """The exit code, or the error in its place."""
        return str(self.exit_code) if self.exit_code is not None else self.error or ""


def turn_of(record: DeliveryRecord | FailureRecord) -> Turn:
    """Return the turn of a record of a bundle."""
    try:
        action: Any = decode(record.request_bytes) if record.request_bytes else None
    except ValueError:
        action = record.request_bytes.decode(errors="replace")
    if isinstance(record, FailureRecord):
        return Turn(None, record.kind, action, error=record.code, created=record.created)
    turn = turn_from(record.t, record.kind, action, _value(record.payload))
    return replace(
        turn,
        error_kind=record.error_kind,
        hint_template_key=record.hint_template_key,
        reward=record.reward,
        done=record.done,
        created=record.created,
    )


def turn_from(t: int, kind: str, action: Any, payload: Any) -> Turn:
    """Return the turn of a delivery.

    Args:
        t: Index of the delivery.
        kind: Kind of the request.
        action: The request, decoded.
        payload: The payload, decoded.
    """
    observation: Mapping[str, Any] = {}
    if isinstance(payload, dict) and isinstance(payload.get("observation") or {}, dict):
        observation = observation_of(payload)
    error_kind, site = _text(observation.get("error_kind")), observation.get("error_site")
    hint = _text(observation.get("hint_template_key"))
    if error_kind is None and (marker := marker_of(payload)) is not None:
        error_kind, hint = marker.error_kind, marker.hint_template_key
        site = marker.error_site.model_dump(mode="json") if marker.error_site is not None else None
    code = observation.get("exit_code")
    return Turn(
        t,
        kind,
        action,
        exit_code=code if isinstance(code, int) and not isinstance(code, bool) else None,
        error=_error_of(payload, observation),
        error_kind=error_kind,
        error_site=site if isinstance(site, dict) else None,
        hint_template_key=hint,
        reward=_number(observation.get("reward")),
        done=observation.get("done") is True,
        duration_s=_number(observation.get("duration_s")),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _value(payload: str) -> Any:
    try:
        return decode(payload)
    except ValueError:
        return None


def _error_of(payload: Any, observation: Mapping[str, Any]) -> str | None:
    """Return what a payload names as the error of its request: that of a tool, of JSON-RPC, or a time limit."""
    if observation.get("timed_out") is True:
        return "timed out"
    error = observation.get("error")
    if isinstance(payload, dict) and not error:
        error = payload.get("error")
        result = payload.get("result")
        if not error and isinstance(result, dict) and result.get("isError") is True:
            return "tool error"
    if isinstance(error, dict):
        error = error.get("error_type") or error.get("message") or error.get("code") or "error"
    return str(error) if isinstance(error, str | int) and error not in ("", False) else None


def _containers(action: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects in a request that may have the field of an error site: of an action, or of a tool's call."""
    if isinstance(action, dict):
        params = action.get("params")
        called = [action.get("arguments"), params.get("arguments") if isinstance(params, dict) else None]
        yield from (held for held in (action, *called) if isinstance(held, dict))


def _span(action: Any, site: Mapping[str, Any]) -> tuple[dict[str, Any], str, tuple[int, int]] | None:
    """Return the object and the field of an action that a site names, and the span in it; None without one."""
    field, span = site.get("action_field") or "command", site.get("action_span")
    if not (isinstance(field, str) and isinstance(span, list | tuple) and len(span) == 2):
        return None
    start, end = span
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end):
        return None
    for held in _containers(action):
        if isinstance(text := held.get(field), str) and end <= len(text):
            return held, field, (start, end)
    return None


def _marked(action: Any, site: Mapping[str, Any]) -> Any:
    """Return an action with guillemets around the span that a site names."""
    found = _span(action, site)
    if found is None:
        return action
    held, field, (start, end) = found
    text = held[field]
    marked = {**held, field: text[:start] + _OPENING + text[start:end] + _CLOSING + text[end:]}
    if held is action:
        return marked
    if held is action.get("arguments"):
        return {**action, "arguments": marked}
    return {**action, "params": {**action["params"], "arguments": marked}}


_UNSAID = frozenset({"metadata", "timeout_s", "type"})
"""Fields of an action that say nothing of what the agent did."""


def _action_text(kind: str, action: Any) -> str:
    if not isinstance(action, dict):
        text = "" if action is None else action if isinstance(action, str) else _compact(action)
        return f"{kind} {text}".strip() if kind == "reset" else text
    if kind == "reset":
        given = {name: value for name, value in action.items() if value is not None}
        return f"reset {_compact(given)}" if given else "reset"
    params = action.get("params")
    if isinstance(params, dict) and isinstance(params.get("name"), str):
        return f"{params['name']} {_compact(params.get('arguments') or {})}"
    if isinstance(action.get("tool_name"), str):
        return f"{action['tool_name']} {_compact(action.get('arguments') or {})}"
    said = {name: value for name, value in action.items() if name not in _UNSAID and value not in (None, "", [], {})}
    tool = said.pop("tool", None)
    if tool is None or tool == "run":
        (only,) = said.values() if len(said) == 1 else (None,)
        if isinstance(only, str):
            return only
    if isinstance(tool, str):
        if all(isinstance(value, str) for value in said.values()):
            return " ".join([tool, *map(_summarised, said.values())])
        return f"{tool} {_compact(said)}"
    return _compact(said)


def _summarised(text: str) -> str:
    """Return an argument of a tool: a file or a patch of several lines as the number of lines."""
    lines = text.count("\n")
    return text if lines <= 1 else f"({lines} lines)"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
