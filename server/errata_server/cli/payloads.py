"""Payloads of deliveries as values, for commands that print a part of one."""

from __future__ import annotations

from typing import Any

from errata_protocol.bounded_json import decode
from errata_protocol.errors import JournalUnavailable
from errata_protocol.replay import observation_of


def json_of(payload: bytes, what: str = "payload") -> Any:
    """Return the JSON value of a payload, or of a request where ``what`` says so.

    Raises:
        JournalUnavailable: It has none.
    """
    try:
        return decode(payload)
    except ValueError as error:
        raise JournalUnavailable(f"the {what} is not JSON: {error}; without --json its bytes are printed") from error


def observation_in(payload: bytes) -> dict[str, Any]:
    """Return the observation of a payload, as `errata_protocol.replay.observation_of` does.

    Raises:
        JournalUnavailable: It has none.
    """
    value = json_of(payload)
    if not isinstance(value, dict) or not isinstance(value.get("observation") or {}, dict):
        raise JournalUnavailable("the payload has no observation")
    return observation_of(value)
