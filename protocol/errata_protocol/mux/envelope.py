"""Frames and envelopes of the multiplexed socket (PROTOCOL D1, C1).

A frame is one envelope or an array of them. What the server receives is scanned strictly before any of it is admitted;
a client reads what its server sends leniently, so that a newer server may say more.

The scan is cheap because the decoder (msgspec) refuses nearly everything itself, and cheap tests say when the rest
might matter: it does not look into ``data`` for UTF-8 (decoding the frame as text does), it takes the last of several
equal keys (then the frame has more colons than the decoded fields account for: no other string of an envelope can hold
one), and it nests as deep as the interpreter (``data`` with fewer brackets than levels is not looked into).

Decisions that PROTOCOL D states:

- An envelope nests at most `MAX_DEPTH` levels, itself counted, the array around it not. Far deeper than that
  (about a thousand levels) the decoder gives up, and the whole frame is unparsable.
- Unknown fields of an envelope are refused (INVALID_ENVELOPE), as OpenEnv's server does. Such refusals consume no id
  and always carry ``index``, 0 for a frame that is one envelope.
- Duplicate keys *inside* ``data`` are the environment's matter: its decoder refuses them, and that is recorded. The
  fields of control messages (open, resume, fork, cancel, ...) are the protocol's, so there they are refused here.
- A frame without an envelope, ``[]``, is unparsable. So is a binary message that is not UTF-8; a text message that is
  not closes the socket with 1007 before it comes here, as RFC 6455 wants it.
- Absent ``data`` is ``{}``. An error names ``sid`` and ``id`` of a bad element where both could be read.
- sid and key are 21 to 128 characters of ``A-Z a-z 0-9 _ -``: 122 random bits do not fit into fewer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from ..errors import FrameTooLarge, InvalidEnvelope, RemoteProtocolError, Unparsable
from ..payload import DIGEST_PREFIX

MAX_ID = 2**53 - 1
MAX_DEPTH = 64
"""Levels of objects and arrays in one envelope."""

RequestId = Annotated[int, Meta(ge=1, le=MAX_ID)]
Count = Annotated[int, Meta(ge=0, le=MAX_ID)]
Sid = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{21,128}\Z")]
"""Session id or key: URL-safe and long enough to hold 122 random bits."""
Eid = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.~-]{1,128}\Z")]

EMPTY = b"{}"
"""``data`` of an envelope that has none."""


class Condition(Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """``if`` of a mutating request: where the session has to stand when its turn comes (PROTOCOL D6)."""

    t: Count
    eid: Eid | UnsetType = UNSET


class Envelope(Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """What a client sends. ``data`` holds the exact bytes received; absent fields are UNSET."""

    type: str
    sid: str | UnsetType | None = UNSET
    id: RequestId | UnsetType = UNSET
    q: RequestId | UnsetType = UNSET
    data: Raw | UnsetType = UNSET
    condition: Condition | UnsetType = msgspec.field(name="if", default=UNSET)
    deadline_ms: Count | UnsetType = UNSET


class ServerEnvelope(Struct, frozen=True, gc=False):
    """What a server sends. Unknown fields are ignored."""

    type: str
    sid: str | None = None
    id: RequestId | None = None
    q: RequestId | None = None
    seq: RequestId | None = None
    index: Count | None = None
    eid: str | None = None
    t: Count | None = None
    kind: str | None = None
    digest: str | None = None
    request: str | None = None
    data: Raw | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Malformed:
    """An element that cannot be admitted as any request.

    Args:
        error: What is wrong with it.
        sid: Its session, where one could be read.
        id: Its request id, where one could be read together with a session.
        q: Its read number, likewise.
    """

    error: InvalidEnvelope
    sid: str | None = None
    id: int | None = None
    q: int | None = None


Element = tuple[Envelope, bytes] | Malformed

_ONE = msgspec.json.Decoder(Envelope)
_MANY = msgspec.json.Decoder(list[Envelope])
_RAWS = msgspec.json.Decoder(list[Raw])
_RAW = msgspec.json.Decoder(Raw)
_SERVER_ONE = msgspec.json.Decoder(ServerEnvelope)
_SERVER_MANY = msgspec.json.Decoder(list[ServerEnvelope])

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_LEVELS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SID = re.compile(r"[A-Za-z0-9_-]{21,128}")


def is_sid(text: str) -> bool:
    """Return whether ``text`` has the form of a session id or key."""
    return _SID.fullmatch(text) is not None


def depth(data: bytes) -> int:
    """Return how many levels of objects and arrays valid JSON text nests."""
    brackets = _STRING.sub(b"", data).translate(_LEVELS, _NO_BRACKETS)
    return max(accumulate(memoryview(brackets).cast("b")), default=0)


def read_frame(frame: bytes | str, *, max_bytes: int = 1 << 24, max_elements: int = 256) -> list[Element]:
    """Read a frame that a client sent, strictly.

    Args:
        frame: A text or binary message of the socket, whole.
        max_bytes: Largest frame that is read.
        max_elements: Most envelopes in one frame.

    Returns:
        For each element the envelope and the exact bytes of its ``data``, or what is wrong with it.

    Raises:
        Unparsable: It is no JSON text, or holds no envelope; nothing of it may have an effect.
        FrameTooLarge: It is over a limit; likewise.
    """
    try:
        if isinstance(frame, str):
            frame = frame.encode()
        if len(frame) > max_bytes:
            raise FrameTooLarge(f"the frame has {len(frame)} bytes, at most {max_bytes} are read: send less, or parts")
        frame.decode()
    except UnicodeError as error:
        raise Unparsable(f"the frame is not UTF-8: {error}") from error
    elements = _read_elements(frame)
    if not elements:
        raise Unparsable("the frame is an empty array: send one envelope, or an array of some")
    if len(elements) > max_elements:
        raise FrameTooLarge(f"the frame has {len(elements)} envelopes, at most {max_elements} are read: send several")
    return elements


def _read_elements(frame: bytes) -> list[Element]:
    array = frame[:1] == b"[" or frame.lstrip(b" \t\r\n")[:1] == b"["
    try:
        envelopes = _MANY.decode(frame) if array else [_ONE.decode(frame)]
    except (msgspec.DecodeError, RecursionError):
        return _read_slowly(frame, array)
    elements: list[Element] = []
    colons = 0
    for envelope in envelopes:
        raw = envelope.data
        if raw is UNSET:
            data = EMPTY
        else:
            data = bytes(raw)  # a copy: the queue must not keep whole frames alive
            colons += 1 + data.count(b":")
            # Fewer brackets than levels cannot nest too deep; fewer bytes cannot hold as many brackets.
            if len(data) >= 2 * MAX_DEPTH and data.count(b"{") + data.count(b"[") >= MAX_DEPTH:
                return _read_slowly(frame, array)
        colons += (
            1
            + (envelope.sid is not UNSET)
            + (envelope.id is not UNSET)
            + (envelope.q is not UNSET)
            + (envelope.deadline_ms is not UNSET)
        )
        if envelope.condition is not UNSET:
            colons += 2 + (envelope.condition.eid is not UNSET)
        elements.append((envelope, data))
    return elements if frame.count(b":") == colons else _read_slowly(frame, array)


def _read_slowly(frame: bytes, array: bool) -> list[Element]:
    """Read a frame that has, or may have, a bad element: each alone."""
    try:
        raws = _RAWS.decode(frame) if array else [_RAW.decode(frame)]
    except RecursionError as error:
        raise Unparsable(f"the frame nests far deeper than the {MAX_DEPTH} levels of an envelope") from error
    except msgspec.DecodeError as error:
        raise Unparsable(f"the frame is not JSON: {error}") from error
    return [_read_element(bytes(raw)) for raw in raws]


def _read_element(element: bytes) -> Element:
    try:
        if element.count(b"{") + element.count(b"[") > MAX_DEPTH and (levels := depth(element)) > MAX_DEPTH:
            return Malformed(InvalidEnvelope(f"the envelope nests {levels} levels, at most {MAX_DEPTH} are read"))
        envelope = _ONE.decode(element)
        data = EMPTY if envelope.data is UNSET else bytes(envelope.data)
        head = element if envelope.data is UNSET else _without(element, data)
        refuse_duplicate_keys(head)
    except (msgspec.DecodeError, InvalidEnvelope) as error:
        return _malformed(element, InvalidEnvelope(str(error)))
    return envelope, data


def _without(element: bytes, data: bytes) -> bytes:
    """Return an envelope with ``data`` cut down, so that only its own keys are looked at.

    With several ``data`` keys the last one counts, and the others stay: their key is then found twice.
    """
    if data[:1] not in (b"{", b"["):
        return element  # what holds no key
    start = element.rfind(data)
    return element[:start] + b"0" + element[start + len(data) :]


def refuse_duplicate_keys(text: bytes) -> None:
    """Raise where an object of a JSON text has a key twice.

    Raises:
        InvalidEnvelope: Which key.
    """
    json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise InvalidEnvelope(f"the key {key!r} stands twice in one object: decoders differ in which one they take")
        made[key] = value
    return made


def _malformed(element: bytes, error: InvalidEnvelope) -> Malformed:
    """Say whose request a bad element was, as far as that has one meaning."""
    try:
        found = json.loads(element, object_pairs_hook=_unique)
    except (ValueError, RecursionError, InvalidEnvelope):
        return Malformed(error)
    if not isinstance(found, dict) or not isinstance(found.get("sid"), str) or not is_sid(found["sid"]):
        return Malformed(error)
    return Malformed(error, found["sid"], _readable_id(found.get("id")), _readable_id(found.get("q")))


def _readable_id(value: object) -> int | None:
    return value if type(value) is int and 1 <= value <= MAX_ID else None


def read_server_frame(frame: bytes | str) -> list[tuple[ServerEnvelope, bytes]]:
    """Read a frame that a server sent.

    Raises:
        RemoteProtocolError: It is no frame of this protocol.
    """
    try:
        if isinstance(frame, str):
            frame = frame.encode()
        else:
            frame.decode()
        array = frame.lstrip(b" \t\r\n")[:1] == b"["
        envelopes = _SERVER_MANY.decode(frame) if array else [_SERVER_ONE.decode(frame)]
    except (UnicodeError, msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"the server sent a frame that cannot be read: {error}; connect again") from error
    return [(envelope, EMPTY if envelope.data is UNSET else bytes(envelope.data)) for envelope in envelopes]


def write_envelope(head: dict[str, Any], data: bytes) -> bytes:
    """Build ``{...head, "data": <data>}`` around the exact bytes of ``data`` (PROTOCOL C1)."""
    return msgspec.json.encode(head)[:-1] + b',"data":' + data + b"}"


def write_reply(
    sid: str, id: int, type: str, eid: str | None, t: int | None, digest: str, data: bytes, request: bytes | None = None
) -> bytes:
    """Build the envelope of a delivery around its exact payload: `write_envelope` for the hot path.

    Args:
        sid: URL-safe session id.
        id: Request id.
        type: Reply type.
        eid: URL-safe episode key; None leaves it and ``t`` out.
        t: Delivery index.
        digest: ``sha256:<hex>`` of ``data``, empty to leave it out.
        data: The payload.
        request: sha256 of the request's ``data``, told where another attachment may have sent it.
    """
    asked = f',"request":"{DIGEST_PREFIX}{request.hex()}"' if request is not None else ""
    place = "" if eid is None else f',"eid":"{eid}","t":{t}'
    seal = f',"digest":"{digest}"' if digest else ""
    return f'{{"sid":"{sid}","id":{id},"type":"{type}"{place}{asked}{seal},"data":'.encode() + data + b"}"


def join_frame(envelopes: Sequence[bytes]) -> bytes:
    """Put envelopes into one frame: a single one stays as it is, several become an array."""
    return envelopes[0] if len(envelopes) == 1 else b"[" + b",".join(envelopes) + b"]"
