"""Strict JSON parsing: refuses NaN, duplicate keys, lone surrogates, deep nesting and oversize input."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from errata_protocol.bounded_json import MAX_DEPTH, deeper_than, has_infinity, may_be_infinite, no_constant
from errata_protocol.errors import CallerError, InvalidRequest

from .asgi_extensions import Unread

_INLINE = 1024**2
"""Length of a message up to which it is parsed on the event loop."""

_LONG = 64 * 1024
"""Characters of a text above which its values are looked at instead, of which there are fewer."""


class Refused(CallerError):
    """A frame that is not the JSON that is accepted here; its code is INVALID_JSON or FRAME_TOO_LARGE."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.__dict__["code"] = code


def parse_object(message: Mapping[str, Any], max_frame: int) -> dict[str, Any]:
    """Return the JSON object that an ASGI ``websocket.receive`` message holds.

    Args:
        message: It has ``text`` or ``bytes``; or, where they were discarded, ``unread`` (an `Unread`), ``refused`` (the
            error), or ``oversize`` (the size, for the error message).
        max_frame: The limit that the error for ``oversize`` names, bytes.

    Raises:
        Refused, FrameTooLarge, Overloaded: See `parse_json`.
        InvalidRequest: It is no JSON object, or holds half of a surrogate pair.
    """
    frame = parse_json(message, max_frame)
    if not isinstance(frame, dict):
        raise InvalidRequest(f"a frame is a JSON object, not {type(frame).__name__}")
    return frame


async def parse_object_async(message: Mapping[str, Any], max_frame: int) -> dict[str, Any]:
    """As `parse_object`, in a thread for a message over 1 MiB.

    The decoder calls Python once for each object, so the event loop gets turns between objects, but not inside one
    array.
    """
    if len(message.get("text") or message.get("bytes") or b"") <= _INLINE:
        return parse_object(message, max_frame)
    return await asyncio.to_thread(parse_object, message, max_frame)


def parse_json(message: Mapping[str, Any], max_frame: int) -> Any:
    """Return the JSON value in an ASGI ``websocket.receive`` message.

    JSON on which decoders disagree is refused.

    Args:
        message: See `parse_object`.
        max_frame: See `parse_object`.

    Raises:
        Refused: The frame was discarded as too large (``oversize``); or it is not UTF-8; or not JSON; or it has
            duplicate keys, NaN, numbers outside of a double's range, or nesting deeper than `MAX_DEPTH`.
        InvalidRequest: A string has an unpaired surrogate.
        FrameTooLarge: The frame was discarded as too large (``unread``, ``refused``).
        Overloaded: The frame was discarded because its principal's unfinished messages reached their limit of memory
            (``unread``).
    """
    unread: Unread | None = message.get("unread")
    if unread is not None:
        raise unread.error()
    if "refused" in message:
        raise message["refused"]
    if "oversize" in message:
        raise Refused(
            f"a frame of {message['oversize']} bytes is over the limit of {max_frame}: send less in one action",
            "FRAME_TOO_LARGE",
        )
    text = message.get("text")
    if text is None:
        try:
            text = message["bytes"].decode()
        except UnicodeDecodeError as error:
            raise Refused(f"Invalid JSON: a binary frame that is not UTF-8: {error}", "INVALID_JSON") from error
    try:
        frame = _DECODER.decode(text)
    except RecursionError as error:
        raise Refused("Invalid JSON: nested too deeply", "INVALID_JSON") from error
    except ValueError as error:
        raise Refused(f"Invalid JSON: {error}", "INVALID_JSON") from error
    if has_infinity(frame) if len(text) > _LONG else may_be_infinite(text):
        try:
            json.loads(text, parse_float=_finite)
        except ValueError as error:
            raise Refused(f"Invalid JSON: {error}", "INVALID_JSON") from error
    if text.count("{") + text.count("[") > MAX_DEPTH and deeper_than(frame, MAX_DEPTH):
        raise Refused(f"Invalid JSON: nested deeper than {MAX_DEPTH} levels", "INVALID_JSON")
    if _maybe_surrogates(text):
        _refuse_surrogates(frame)
    return frame


def _maybe_surrogates(text: str) -> bool:
    """Return whether a JSON text holds half of a surrogate pair, or an escape that may stand for one."""
    if "\\ud" in text or "\\uD" in text:
        return True
    try:
        return not text.isascii() and not text.encode()
    except UnicodeEncodeError:
        return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:40]} is beyond what a double holds")
    return number


# json.loads would make a decoder for each call.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=no_constant)


def _refuse_surrogates(frame: Any) -> None:
    try:
        to_json(frame)
    except Exception as error:
        raise InvalidRequest("a string holds half of a surrogate pair, which has no UTF-8 form") from error
