"""`task_of`: the name of the task of an episode, from the reply to its reset."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_BYTES = 1024**2
"""Largest payload or request that is searched for the name of a task, bytes."""

MAX_NAME = 256
"""Longest name of a task, in characters; a longer one is cut."""


def task_of(payload: bytes, request: bytes = b"") -> str | None:
    """Return the task that a reset's reply names, else the one that its arguments name; None without either.

    Args:
        payload: Payload of the reset.
        request: Arguments of the reset, as JSON.
    """
    if len(payload) <= MAX_BYTES:
        try:
            named = _PAYLOADS.decode(payload).observation.name
        except (msgspec.DecodeError, UnicodeDecodeError):
            named = None
        if named is not None:
            return named
    if len(request) <= MAX_BYTES:
        try:
            return _REQUESTS.decode(request).name
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass  # no JSON object, as the request of an environment of others need not be one
    return None


class _Named(msgspec.Struct):
    """The fields that name a task; the first one that does."""

    instance_id: Any = None
    task_id: Any = None
    task: Any = None

    @property
    def name(self) -> str | None:
        for value in (self.instance_id, self.task_id, self.task):
            if isinstance(value, str) and value:
                return value[:MAX_NAME]
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
                return str(value)
        return None


class _Payload(msgspec.Struct):
    observation: _Named = msgspec.field(default_factory=_Named)


_PAYLOADS = msgspec.json.Decoder(_Payload)
_REQUESTS = msgspec.json.Decoder(_Named)
