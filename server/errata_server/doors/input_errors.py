"""Errors for input that cannot be read: JSON with a code, limited in length; and `BodyLimit`, which bounds bodies.

A validation error quotes its input, once for each problem. Without limits the answer to a frame of 16 MiB would quote
it many times, and encoding the answer would fail on input that has no UTF-8 or JSON form.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errata_protocol.json_text import ValueCounter

from .json_values import exceeds, too_many
from .long_messages import LONG, pay

MAX_ERRORS = 20
"""Most errors that an answer lists for one request."""

_FASTAPI_COULD_NOT_PARSE = "There was an error parsing the body"

MAX_QUOTED = 500
"""Longest JSON of a quoted value, bytes; a longer value is cut."""


def bounded_errors(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first `MAX_ERRORS` of pydantic's errors, with long values cut and unencodable ones escaped."""
    quoted: dict[int, Any] = {}

    def quote(value: Any) -> Any:
        if id(value) not in quoted:  # several errors often quote the same input
            quoted[id(value)] = _quoted(value)
        return quoted[id(value)]

    return [{key: quote(value) for key, value in error.items()} for error in itertools.islice(errors, MAX_ERRORS)]


def named_fields(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the first errors of `bounded_errors` as text: each field and what is wrong with it."""
    parts = []
    for wrong in errors[:3]:
        place = wrong.get("loc")
        where = ".".join(map(str, place)) if isinstance(place, list | tuple) else str(place or "")
        what = str(wrong.get("msg", "not valid"))[:MAX_QUOTED]
        parts.append(f"{where[:MAX_QUOTED]}: {what}" if where else what)
    left_out = len(errors) - len(parts)
    return "; ".join(parts) + (f"; and {left_out} more" if left_out else "")


def error_json(data: Any) -> bytes:
    """Return ``data`` as JSON. Never fails: NaN and infinities become null, lone surrogates are escaped."""
    try:
        return to_json(data, serialize_unknown=True, inf_nan_mode="null")
    except Exception:  # half of a surrogate pair
        return to_json(_encodable(data), serialize_unknown=True, inf_nan_mode="null")


async def answer_invalid(_: Request, error: Exception) -> Response:
    """Answer a `RequestValidationError` with 422: FastAPI's ``detail``, and our ``code`` and ``message``."""
    assert isinstance(error, RequestValidationError)
    detail = bounded_errors(error.errors())
    body = {"code": "VALIDATION_ERROR", "message": named_fields(detail), "detail": detail}
    return Response(error_json(body), 422, media_type="application/json")


async def answer_unreadable(request: Request, error: Exception) -> Response:
    """Answer an `HTTPException` as FastAPI does; with our ``code`` too where a body is too long or not JSON."""
    assert isinstance(error, HTTPException)
    if error.status_code == 413:
        body = {"code": "FRAME_TOO_LARGE", "message": error.detail, "detail": error.detail}
    elif error.status_code == 400 and error.detail == _FASTAPI_COULD_NOT_PARSE:
        cause = f"Invalid JSON: {error.__cause__}"[:MAX_QUOTED]
        body = {"code": "INVALID_JSON", "message": cause, "detail": error.detail}
    else:
        return await http_exception_handler(request, error)
    return Response(error_json(body), error.status_code, media_type="application/json")


class BodyTooLong(HTTPException):
    """Raised while a request body is read that is longer than ``max_frame``; answered with 413."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"a body is over the limit of {limit} bytes: see ERRATA_MAX_FRAME")


class TooManyValues(HTTPException):
    """Raised while a request body is read that has more JSON values than a message may have; answered with 413."""

    def __init__(self) -> None:
        super().__init__(413, too_many().message)


class BodyLimit:
    """ASGI middleware that raises an exception in an application that reads a body over a bound.

    `BodyTooLong` if it has more bytes, `TooManyValues` if it has more JSON values: upstream's routes read all. A form
    with files is no JSON, and its values are not counted.

    Args:
        app: The application to protect.
        max_body: Largest body, bytes.
    """

    def __init__(self, app: ASGIApp, *, max_body: int) -> None:
        self._app = app
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        kinds = [value for name, value in scope.get("headers", ()) if name == b"content-type"]
        is_form = bool(kinds) and all(kind.startswith(b"multipart/") for kind in kinds)
        values = None if is_form else ValueCounter()

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            body = message.get("body", b"")
            size += len(body)
            if size > self._max_body:
                raise BodyTooLong(self._max_body)
            if values is not None and await exceeds(values, body):
                raise TooManyValues
            if size > LONG:
                await pay(len(body))
            return message

        await self._app(scope, counted if scope["type"] == "http" else receive, send)


def _quoted(value: Any) -> Any:
    try:
        text = to_json(value, inf_nan_mode="strings", serialize_unknown=True)
        if len(text) <= MAX_QUOTED:
            return json.loads(text)
    except Exception:  # half of a surrogate pair, or nesting that pydantic does not follow
        text = ascii(type(value).__name__).encode() if isinstance(value, dict | list) else ascii(value).encode()
    return text[:MAX_QUOTED].decode(errors="ignore") + ("..." if len(text) > MAX_QUOTED else "")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value
