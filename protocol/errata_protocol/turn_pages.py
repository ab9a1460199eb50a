"""`played_turn`: what a page of turns says of a delivery, from its row, without the whole of its payload.

A payload may have megabytes of output, and an action a file. Of a payload only the fields are decoded that say how the
turn ended; long texts of an action are cut, and their places stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from .bounded_json import decode
from .environment import tool_of
from .replay import PlayedTurn, TurnRecord
from .rollouts import META_KEY, marker_of
from .turns import turn_from

MAX_ACTION_BYTES = 4_096
"""Largest action of a page as JSON, bytes; of a larger one texts are cut, or its beginning is given as text."""

MAX_ACTION_TEXT = 1_000
"""Length from which on a text in a large action is cut, in code points."""

MAX_DECODED_BYTES = 1024**2
"""Largest request that is decoded, bytes; of a larger one the beginning is given as text."""

MAX_ERROR = 300
"""Longest ``error`` of a turn, in code points."""

MAX_FIELD_BYTES = 16_384
"""Largest field of a payload that is decoded, bytes; a larger one is left out."""

DEFAULT_PAGE = 100
"""Turns of a page where no limit is given."""

MAX_PAGE_BYTES = 16 * 1024**2
"""Size of requests and payloads after which a page ends, bytes: it then has fewer turns than its limit."""


def played_turn(
    record: TurnRecord, *, request: bytes, payload: bytes, created: float, before: float | None, late_rewards: int
) -> PlayedTurn:
    """Return a delivery as a page of turns shows it.

    Args:
        record: The delivery as ``GET /episodes/{eid}`` shows it.
        request: The request as journaled.
        payload: P_t.
        created: When its request began to run, seconds since the epoch.
        before: That of the delivery before it; None for the first.
        late_rewards: Number of its late rewards.
    """
    action, cut = action_of(request)
    shown = _shown(payload)
    turn, marker = turn_from(record.t, record.kind, None, shown), marker_of(shown)
    if record.error_kind is None or (marker is not None and marker.error_kind != record.error_kind):
        marker = None
    return PlayedTurn(
        **dict(record),
        created=created,
        since_s=max(0.0, created - before) if before is not None else None,
        duration_s=turn.duration_s,
        action=action,
        action_cut=cut,
        action_bytes=len(request),
        tool=_tool(action),
        exit_code=turn.exit_code,
        error=turn.error[:MAX_ERROR] if turn.error is not None else None,
        severity=marker.severity if marker is not None else None,
        error_site=marker.error_site if marker is not None else None,
        late_rewards=late_rewards,
    )


def action_of(request: bytes) -> tuple[Any, bool]:
    """Return a request as a page shows it, and whether that is less than the whole.

    Args:
        request: The request as journaled.
    """
    if not request:
        return None, False
    if len(request) <= MAX_DECODED_BYTES:
        try:
            action = decode(request)
        except ValueError:
            pass  # no JSON, as the request of an environment of others need not be
        else:
            if len(request) <= MAX_ACTION_BYTES:
                return action, False
            shortened = _shortened(action)
            if len(json.dumps(shortened, ensure_ascii=False).encode("utf-8", "replace")) <= MAX_ACTION_BYTES:
                return shortened, True
    # A character that the end cuts through is left out.
    return request[:MAX_ACTION_BYTES].decode("utf-8", "ignore"), len(request) > MAX_ACTION_BYTES


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value[:MAX_ACTION_TEXT]
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    return [_shortened(one) for one in value] if isinstance(value, list) else value


def _tool(action: Any) -> str | None:
    if not isinstance(action, dict):
        return None
    params = action.get("params")
    called = params.get("name") if isinstance(params, dict) else None
    return tool_of(action.get("tool"), action.get("tool_name"), called) or None


_MARKER = dict.fromkeys(("error_kind", "error_site", "hint_template_key", "severity"))
_METADATA = {**_MARKER, "error_info": None}
_PAYLOAD: Mapping[str, Any] = {
    "observation": {
        **_MARKER,
        **dict.fromkeys(("exit_code", "duration_s", "timed_out", "error")),
        "metadata": _METADATA,
    },
    "metadata": _METADATA,
    "result": {"isError": None, "_meta": {META_KEY: None}},
    "error": {"error_type": None, "message": None, "code": None, "data": {META_KEY: None}},
}
"""The fields of a payload that say how a turn ended; in place of each its own fields, or None to decode it."""


class _Part:
    """Decodes the fields of an object that are wanted, and skips the others.

    Args:
        wanted: Fields to decode, in the form of `_PAYLOAD`.
    """

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self._parts = {name: _Part(inner) if inner is not None else None for name, inner in wanted.items()}
        names = {f"field_{n}": name for n, name in enumerate(wanted)}
        fields = [(field, msgspec.Raw, msgspec.Raw()) for field in names]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Fields", fields, rename=names))
        self._names = names

    def read(self, text: bytes | memoryview) -> dict[str, Any] | None:
        """Return the wanted fields of an object that are there; None for another value."""
        try:
            found = self._decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        fields: dict[str, Any] = {}
        for field, name in self._names.items():
            raw = memoryview(getattr(found, field))
            part = self._parts[name]
            value = part.read(raw) if part is not None and raw else None
            if value is None and 0 < len(raw) <= MAX_FIELD_BYTES:
                try:
                    value = decode(bytes(raw))
                except ValueError:
                    continue
            if raw and value is not None:
                fields[name] = value
        return fields


_READER = _Part(_PAYLOAD)


def _shown(payload: bytes) -> dict[str, Any]:
    """Return a payload with only the fields that say how its turn ended."""
    return _READER.read(payload) or {}
