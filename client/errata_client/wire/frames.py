"""Parses frames of a plain ``/ws``, and keeps the exact bytes of their ``data`` value. For both transports: checks
digests and converts error frames.

The digest of a delivery is over the bytes that the server sent (PROTOCOL C1). Encoding the decoded value again would
give other bytes (spacing, escapes, ``1.0`` against ``1``), so the value's bytes are cut out of the frame.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from errata_protocol.errors import CODES, ErrataError, ServiceError, error_from_wire
from errata_protocol.payload import digest
from errata_protocol.replay import Kind, StateAt

_WHITESPACE = " \t\n\r"
_decoder = json.JSONDecoder()
_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}


class FrameInvalid(ServiceError):
    """The server sent something that cannot be parsed or does not answer the request."""


class DigestMismatch(FrameInvalid):
    """The bytes of a payload do not have the digest that came with them.

    Args:
        eid: Episode of the payload.
        t: Delivery index.
        announced: The digest that came with it.
        computed: The digest of the bytes that arrived.
    """

    def __init__(self, eid: str, t: int, announced: str, computed: str) -> None:
        super().__init__(
            f"payload t={t} of episode {eid} came with digest {announced} but its bytes give {computed}: "
            f"it changed in transit; fetch it again with state_at({t})",
            eid=eid,
            t=t,
            announced=announced,
            computed=computed,
        )


@dataclass(frozen=True, slots=True)
class Stamp:
    """The position and digest that an Errata server adds to a frame once it was asked for its capabilities.

    Args:
        eid: Episode key.
        t: Delivery index.
        digest: ``sha256:<hex>`` of the payload bytes; None from a server that only numbers its deliveries.
    """

    eid: str
    t: int
    digest: str | None

    def verify(self, payload: bytes) -> None:
        """Check the digest of ``payload``.

        Raises:
            DigestMismatch: It is another one.
        """
        computed = digest(payload)
        if self.digest is not None and computed != self.digest:
            raise DigestMismatch(self.eid, self.t, self.digest, computed)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a server.

    Args:
        type: ``observation``, ``state``, ``state_at``, ``mcp``, ``capabilities``, ``error``.
        data: Its decoded ``data``.
        raw: The exact bytes of ``data`` in the frame.
        stamp: Position and digest; None where the frame has none.
        kind: ``kind`` of a ``state_at`` reply.
    """

    type: str
    data: Any
    raw: bytes
    stamp: Stamp | None = None
    kind: Kind | None = None


def parse_frame(message: bytes | str) -> Frame:
    """Decode a frame and cut out the bytes of its ``data``.

    Args:
        message: The whole message; bytes are UTF-8.

    Raises:
        FrameInvalid: It is not one JSON object in UTF-8; or it has no string ``type``, no ``data``, a repeated key, or
            only a part of a stamp.
    """
    try:
        text = message.decode("utf-8") if isinstance(message, bytes) else message
        values, (start, end) = _members(text)
        raw = text[start:end].encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise FrameInvalid(f"the server sent a frame that cannot be read ({error}): {_excerpt(message)}") from error
    if not isinstance(values.get("type"), str):
        raise FrameInvalid(f"the server sent a frame without a type: {_excerpt(message)}")
    return Frame(values["type"], values["data"], raw, _stamp(values), as_kind(values.get("kind")))


def wire_error(data: Any) -> ErrataError:
    """Return the exception for an error frame; its ``str()`` is that of OpenEnv's client.

    That client raises ``RuntimeError("Server error: <message> (code: <code>)")``, and programs search for this text.
    ``.message``, ``.code`` and ``.details`` hold the parts.

    Args:
        data: ``data`` of the error frame, or the body of an HTTP error.
    """
    fields: dict[str, Any] = data if isinstance(data, dict) else {"message": f"Unknown error: {data!r}"}
    error = error_from_wire(fields)
    error.args = (f"Server error: {error.message} (code: {fields.get('code', 'UNKNOWN')})",)
    return error


def replayed(frame: Frame, t: int, eid: str | None) -> StateAt:
    """Verify a ``state_at`` reply and return the delivery in it.

    Args:
        frame: The reply.
        t: The delivery that was requested.
        eid: The episode that was requested; None for the session's running one.

    Raises:
        FrameInvalid: It is another delivery, or its bytes do not have its digest.
    """
    stamp = frame.stamp
    if stamp is None or stamp.digest is None or frame.kind is None:
        raise FrameInvalid(f"the server answered state_at({t}) without eid, t, digest or a known kind")
    if stamp.t != t or (eid is not None and stamp.eid != eid):
        raise FrameInvalid(f"the server answered state_at({t}) with t={stamp.t} of episode {stamp.eid}")
    stamp.verify(frame.raw)
    return StateAt(stamp.eid, stamp.t, frame.kind, frame.raw, stamp.digest, "server")


def as_kind(value: Any) -> Kind | None:
    """Return ``value`` if it is a known kind of delivery, else None."""
    return _KINDS.get(value) if isinstance(value, str) else None


def is_known_code(data: Any) -> bool:
    """Return whether ``data`` is an error body of OpenEnv or Errata, rather than one of a proxy."""
    return isinstance(data, dict) and data.get("code") in CODES


def _members(text: str) -> tuple[dict[str, Any], tuple[int, int]]:
    """Decode the top-level object; also return the start and end of its ``data`` value in ``text``.

    Raises:
        ValueError: It is no JSON object, repeats a key, has no ``data``, or is followed by other text.
    """
    values: dict[str, Any] = {}
    span: tuple[int, int] | None = None
    at = _expect(text, _skip(text, 0), "{")
    while True:
        key, at = _decoder.raw_decode(text, _skip(text, at))
        if not isinstance(key, str) or key in values:
            raise ValueError(f"key {key!r} is " + ("repeated" if isinstance(key, str) else "no string"))
        start = _skip(text, _expect(text, _skip(text, at), ":"))
        values[key], at = _decoder.raw_decode(text, start)
        if key == "data":
            span = (start, at)
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at += 1
            continue
        at = _skip(text, _expect(text, at, "}"))
        if at != len(text):
            raise ValueError(f"something follows the object at character {at}")
        if span is None:
            raise ValueError("it has no data")
        return values, span


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in _WHITESPACE and at < len(text):
        at += 1
    return at


def _expect(text: str, at: int, token: str) -> int:
    if text[at : at + 1] != token:
        raise ValueError(f"expected {token!r} at character {at}")
    return at + 1


def _stamp(values: dict[str, Any]) -> Stamp | None:
    eid, t, announced = values.get("eid"), values.get("t"), values.get("digest")
    if eid is None and t is None and announced is None:
        return None
    if not isinstance(eid, str) or not isinstance(announced, str | None) or type(t) is not int or t < 0:
        raise FrameInvalid(f"the server sent an incomplete stamp: eid={eid!r}, t={t!r}, digest={announced!r}")
    return Stamp(eid, t, announced)


def _excerpt(message: bytes | str, length: int = 80) -> str:
    head = message[:length]
    return repr(head) + ("..." if len(message) > length else "")
