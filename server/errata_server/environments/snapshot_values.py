"""What ``snapshot()`` may return beside a `Snapshot`: bytes, text or a JSON value, which ``restore`` gets back.

A row of the journal has room for bytes. The form stands in front of them, also where the bytes of a `Snapshot` happen
to begin like that.
"""

from __future__ import annotations

import json
from typing import Any

from errata_protocol.environment import MAX_STATE_BYTES, Snapshot

_HEAD = b"\0errata-"
_BYTES, _JSON, _STATE = (_HEAD + form + b"\0" for form in (b"bytes", b"json", b"state"))

MAX_VALUE_BYTES = MAX_STATE_BYTES - max(map(len, (_BYTES, _JSON, _STATE)))
"""Largest value, bytes; of text and JSON in UTF-8."""

VALUES: tuple[type, ...] = (Snapshot, bytes, str, dict, list, int, float)
"""Types that ``snapshot()`` may be annotated with."""


class NotASnapshot(ValueError):
    """A value that cannot be journaled as it is; the text says why."""


def packed(value: Any) -> Snapshot:
    """Return what is journaled for a result of ``snapshot()``.

    Raises:
        NotASnapshot: It is None or no value that survives JSON, or it is too large.
    """
    if isinstance(value, Snapshot):
        return value if not value.state.startswith(_HEAD) else Snapshot(_checked(_STATE, value.state), value.refs)
    if isinstance(value, bytes | bytearray):
        return Snapshot(_checked(_BYTES, bytes(value)))
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        same = value is not None and json.loads(text) == value
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise NotASnapshot(
            f"a {type(value).__name__}, not a Snapshot, bytes, text or a JSON value (no None, tuple, set, NaN, or key "
            "that is no text)"
        )
    return Snapshot(_checked(_JSON, text))


def unpacked(snapshot: Snapshot) -> Any:
    """Return what ``restore`` gets: the value of which `packed` made ``snapshot``."""
    state = snapshot.state
    if state.startswith(_BYTES):
        return state[len(_BYTES) :]
    if state.startswith(_JSON):
        return json.loads(state[len(_JSON) :])
    return Snapshot(state[len(_STATE) :], snapshot.refs) if state.startswith(_STATE) else snapshot


def _checked(form: bytes, value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise NotASnapshot(f"{len(value)} bytes, at most {MAX_VALUE_BYTES}: keep large content in files of the sandbox")
    return form + value
