"""Checks and decodes ``data`` on the client's side."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..errors import CODES, ErrataError, InvalidRequest, RemoteProtocolError, ServiceError, error_from_wire
from ..json_text import depth
from .envelope import MAX_DEPTH


def checked_data(data: bytes) -> bytes:
    """Return ``data`` if it may be sent.

    Raises:
        InvalidRequest: It is not JSON, or its nesting is too deep.
    """
    try:
        data.decode()
        msgspec.json.decode(data, type=msgspec.Raw)
    except (UnicodeError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"data is not JSON: {error}") from error
    if len(data) >= 2 * MAX_DEPTH and depth(data) >= MAX_DEPTH:
        raise InvalidRequest(f"data nests {depth(data)} levels, at most {MAX_DEPTH - 1} are sent")
    return data


def fields(data: bytes) -> dict[str, Any]:
    """Decode the ``data`` of a small message from the server.

    Raises:
        RemoteProtocolError: It is not a JSON object.
    """
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise RemoteProtocolError(f"data cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise RemoteProtocolError("data is no object")
    return found


def number(fields: dict[str, Any], name: str, default: float) -> float:
    """Return a number from the fields of a message, ``default`` if the field is missing.

    Raises:
        RemoteProtocolError: The field is not a number.
    """
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RemoteProtocolError(f"{name} is no number")
    return value


def error_of(data: bytes) -> ErrataError:
    """Return the exception for the ``data`` of an ``error`` message; a `ServiceError` if it cannot be decoded.

    Raises:
        RemoteProtocolError: It is not a JSON object.
    """
    try:
        found = json.loads(data)  # reads half of a surrogate pair, which earlier servers sent in messages
    except (ValueError, RecursionError) as error:
        return ServiceError(f"the server sent an error that cannot be read: {error}")
    if not isinstance(found, dict):
        raise RemoteProtocolError("data is no object")
    return error_from_wire(found)


def is_recorded(error: ErrataError) -> bool:
    """Return whether an error is the recorded reply to its request id.

    Its code decides; an error with an unknown code is recorded unless it has ``next_id``.
    """
    info = CODES.get(error.code)
    return info.consumes_id if info is not None else "next_id" not in error.details
