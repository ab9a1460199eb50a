"""Frames and envelopes of the multiplexed socket (PROTOCOL D1, C1).

A frame is one envelope or an array of them. The server validates a whole frame strictly before it admits any of it. A
client ignores unknown fields of its server's messages, so that a newer server may add some.

Validation is cheap because the decoder (msgspec) refuses nearly everything itself. Three things it does not check, and
a cheap test shows when each might matter. UTF-8 inside ``data``: the whole frame is decoded as text. Duplicate keys, of
which it takes the last: the frame then has more colons than its decoded fields account for. So has one with a colon in
a label, which is then looked at again. Nesting depth: only ``data`` with as many brackets as levels are allowed is
counted.

Decisions that PROTOCOL D states:

- An envelope nests at most `MAX_DEPTH` levels, counting itself but not the array around it. If it nests far deeper
  (about a thousand levels), the decoder fails and the whole frame is unparsable.
- Unknown fields of an envelope are refused (INVALID_ENVELOPE), as by OpenEnv's server. Such errors consume no id and
  always have ``index``, which is 0 for a frame that is one envelope.
- Duplicate keys *inside* ``data`` are left to the environment's decoder, which refuses them with a recorded error. In
  control messages (open, resume, fork, cancel, ...) they are refused here.
- A frame without an envelope, ``[]``, is unparsable. So is a binary message that is not UTF-8. A text message that is
  not UTF-8 closes the socket with 1007 before it gets here, as RFC 6455 requires.
- Missing ``data`` is ``{}``. An error about a bad element has its ``sid`` and ``id`` if both could be read.
- sid and key are 21 to 128 characters of ``A-Z a-z 0-9 _ -``: fewer cannot hold 122 random bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from ..bounded_json import no_constant
from ..errors import FrameTooLarge, InvalidEnvelope, RemoteProtocolError, Unparsable
from ..json_text import MAX_VALUES, ValueCounter, cut_out, depth, elements, has_surrogates
from ..labels import Labels
from ..names import SESSION
from ..payload import DIGEST_PREFIX

MAX_ID = 2**53 - 1
MAX_DEPTH = 64
"""Levels of objects and arrays in one envelope."""
MAX_HEAD_BYTES = 4096
"""Most bytes that an envelope with data of too many values has beside its data."""

RequestId = Annotated[int, Meta(ge=1, le=MAX_ID)]
Count = Annotated[int, Meta(ge=0, le=MAX_ID)]
Sid = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{21,128}\Z")]
"""Session id or key: URL-safe and long enough to hold 122 random bits."""
Eid = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.~-]{1,128}\Z")]

_TEXT = rb'"(?:[^"\\]++|\\.)*+"'
_MEMBER = (
    rb'\s*+"(?!data")[^"\\]*+"\s*+:\s*+(?:' + _TEXT + rb'|[^\s"{}\[\],]++|\{(?:[^"{}\[\]]++|' + _TEXT + rb")*+\})\s*+"
)
_BEFORE_DATA = re.compile(rb"\s*+\{(?:" + _MEMBER + rb',)*+\s*+"data"\s*+:\s*+(?=[\[{])')
_AFTER_DATA = re.compile(rb"(?<=[\]}])\s*+(?:," + _MEMBER + rb")*+\}\s*+\Z")
"""What stands before and after the data of an envelope, if that is an array or an object."""
_MAY_BE_DATA = (b'"data"', rb"\u00")
"""What is in the text of every key ``data``."""

EMPTY = b"{}"
"""``data`` of an envelope that has none."""


class Condition(Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """``if`` of a mutating request: the position that the session must have when the request starts (PROTOCOL D6)."""

    t: Count
    eid: Eid | UnsetType = UNSET


class Envelope(Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """An envelope from a client. ``data`` has the exact bytes received; missing fields are UNSET."""

    type: str
    sid: str | UnsetType | None = UNSET
    id: RequestId | UnsetType = UNSET
    q: RequestId | UnsetType = UNSET
    data: Raw | UnsetType = UNSET
    condition: Condition | UnsetType = msgspec.field(name="if", default=UNSET)
    deadline_ms: Count | UnsetType = UNSET
    labels: Labels | UnsetType = UNSET


class ServerEnvelope(Struct, frozen=True, gc=False):
    """An envelope from a server. Unknown fields are ignored."""

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
    """An element of a frame that is not a valid envelope.

    Args:
        error: What is wrong with it.
        sid: Its session, if that could be read.
        id: Its request id, if that and its session could be read.
        q: Its read number, if that and its session could be read.
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


def is_sid(text: str) -> bool:
    """Return whether ``text`` has the form of a session id or key."""
    return SESSION.matches(text)


def read_frame(
    frame: bytes | str, *, max_bytes: int = 1 << 24, max_elements: int = 256, shallow: bool = False
) -> list[Element]:
    """Decode and validate a frame from a client.

    Args:
        frame: A complete text or binary message.
        max_bytes: Size limit of the frame.
        max_elements: Most envelopes in one frame.
        shallow: Whether it is known to nest at most `MAX_DEPTH` levels.

    Returns:
        For each element its envelope and the exact bytes of its ``data``, or a `Malformed`.

    Raises:
        Unparsable: It is not JSON text, or an empty array. Nothing of it may be processed.
        FrameTooLarge: It exceeds a limit. Nothing of it may be processed.
    """
    try:
        if isinstance(frame, str):
            frame = frame.encode()
        if len(frame) > max_bytes:
            raise FrameTooLarge(f"the frame has {len(frame)} bytes, at most {max_bytes} are read: send less, or parts")
        frame.decode()
    except UnicodeError as error:
        raise Unparsable(f"the frame is not UTF-8: {error}") from error
    elements = _read_elements(frame, shallow)
    if not elements:
        raise Unparsable("the frame is an empty array: send one envelope, or an array of some")
    if len(elements) > max_elements:
        raise FrameTooLarge(f"the frame has {len(elements)} envelopes, at most {max_elements} are read: send several")
    return elements


def _read_elements(frame: bytes, shallow: bool) -> list[Element]:
    array = frame[:1] == b"[" or frame.lstrip(b" \t\r\n")[:1] == b"["
    try:
        envelopes = _MANY.decode(frame) if array else [_ONE.decode(frame)]
    except (msgspec.DecodeError, RecursionError):
        return _read_slowly(frame, array, shallow)
    elements: list[Element] = []
    colons = 0
    for envelope in envelopes:
        raw = envelope.data
        if raw is UNSET:
            data = EMPTY
        else:
            data = bytes(raw)  # a copy: the queue must not keep whole frames alive
            colons += 1 + data.count(b":")
            if not shallow and _may_nest(data) and depth(data) >= MAX_DEPTH:
                return _read_slowly(frame, array, shallow)
        colons += (
            1
            + (envelope.sid is not UNSET)
            + (envelope.id is not UNSET)
            + (envelope.q is not UNSET)
            + (envelope.deadline_ms is not UNSET)
        )
        if envelope.condition is not UNSET:
            colons += 2 + (envelope.condition.eid is not UNSET)
        if (labels := envelope.labels) is not UNSET:
            colons += 1 + sum(label is not None for label in (labels.group, labels.step, labels.run))
        elements.append((envelope, data))
    return elements if frame.count(b":") == colons else _read_slowly(frame, array, shallow)


def _may_nest(data: bytes) -> bool:
    """Return whether data may nest too deep: fewer brackets than levels cannot, nor fewer bytes hold as many."""
    return len(data) >= 2 * MAX_DEPTH and data.count(b"{") + data.count(b"[") >= MAX_DEPTH


def read_assembled(text: bytes, values: ValueCounter, *, max_bytes: int) -> Element:
    """Decode and validate an envelope that came in parts.

    One with more than `MAX_VALUES` values is read only if it is a request, and its data is not looked at: to decode it
    takes longer than others can wait. The reader of the data refuses it, with an error that names the request.

    Args:
        text: The envelope, valid UTF-8.
        values: Its values and levels, counted up to `MAX_DEPTH` levels.
        max_bytes: Size limit.

    Returns:
        The envelope and the exact bytes of its ``data``, or a `Malformed`.

    Raises:
        InvalidEnvelope: It is no envelope, or none that is read.
    """
    if values.has_too_many:
        return _read_around_data(text)
    if values.nests_too_deep:
        raise InvalidEnvelope(f"the parts make an envelope that nests more than the {MAX_DEPTH} levels that are read")
    try:
        (element,) = read_frame(text, max_bytes=max_bytes, max_elements=1, shallow=True)
    except (Unparsable, FrameTooLarge) as error:
        raise InvalidEnvelope(f"the parts make no envelope: {error}") from error
    return element


def _read_around_data(text: bytes) -> Element:
    """Read an envelope with too many values without looking at its data."""
    found = _around_data(text)
    if found is None:
        raise InvalidEnvelope(
            f"the parts have more than {MAX_VALUES} JSON values, which only the data of a request may have, and make "
            f"no envelope with one data and at most {MAX_HEAD_BYTES} bytes before and after it"
        )
    head, data = found
    try:
        envelope = _ONE.decode(head)
    except msgspec.DecodeError as error:
        raise InvalidEnvelope(f"the parts make no envelope: {error}") from error
    refuse_duplicate_keys(head)
    if envelope.type not in ("step", "reset", "mcp") or envelope.id is UNSET:
        raise InvalidEnvelope(f"the parts have more than {MAX_VALUES} JSON values: only the data of a request may")
    return envelope, data


def _around_data(text: bytes) -> tuple[bytes, bytes] | None:
    """Return an envelope with a number in place of its ``data``, and that data, however long it is; None where it is no
    array or object, or anything but a few plain members stands around it."""
    before = _BEFORE_DATA.match(text, 0, MAX_HEAD_BYTES)
    after = _AFTER_DATA.search(text, max(0, len(text) - MAX_HEAD_BYTES))
    if before is None or after is None or after.start() <= before.end():
        return None
    if any(text.find(mark, before.end(), after.start()) >= 0 for mark in _MAY_BE_DATA):
        return None  # the envelope may have another one, which begins there
    return before[0] + b"0" + after[0], text[before.end() : after.start()]


def _read_slowly(frame: bytes, array: bool, shallow: bool) -> list[Element]:
    """Decode each element of a frame by itself, because one of them is bad or may be."""
    try:
        raws = _RAWS.decode(frame) if array else [_RAW.decode(frame)]
    except RecursionError as error:
        raise Unparsable(f"the frame nests far deeper than the {MAX_DEPTH} levels of an envelope") from error
    except msgspec.DecodeError as error:
        return _read_with_halves(frame, array, shallow, error)
    return [_read_element(bytes(raw), shallow) for raw in raws]


def _read_with_halves(frame: bytes, array: bool, shallow: bool, error: msgspec.DecodeError) -> list[Element]:
    """Decode a frame that msgspec refuses: if it is JSON with half of a surrogate pair, that concerns one element.

    Raises:
        Unparsable: It is not JSON.
    """
    try:
        if not has_surrogates(frame):
            raise ValueError("there is another reason")
        json.loads(frame.decode(), parse_constant=no_constant, parse_int=str)
        texts = elements(frame) if array else [frame]
    except (ValueError, RecursionError) as refused:
        raise Unparsable(f"the frame is not JSON: {error}") from refused
    return [_read_element(text, shallow) for text in texts]


def _read_element(element: bytes, shallow: bool) -> Element:
    try:
        if not shallow and _may_nest(element) and (levels := depth(element)) > MAX_DEPTH:
            return Malformed(InvalidEnvelope(f"the envelope nests {levels} levels, at most {MAX_DEPTH} are read"))
        envelope, head, data = _read_parts(element)
        refuse_duplicate_keys(head)
    except (msgspec.DecodeError, InvalidEnvelope) as error:
        return _malformed(element, InvalidEnvelope(str(error)))
    return envelope, data


def _read_parts(element: bytes) -> tuple[Envelope, bytes, bytes]:
    """Return an envelope, its text with a number in place of ``data``, and its data.

    Data with half of a surrogate pair is kept as it is: its reader refuses it, as it refuses duplicate keys there.
    """
    try:
        envelope = _ONE.decode(element)
    except msgspec.DecodeError as error:
        if not has_surrogates(element):
            raise
        try:
            head, cut = _around_data(element) or cut_out(element, b"data")
        except ValueError:
            raise error from None
        return _ONE.decode(head), head, EMPTY if cut is None else cut
    data = EMPTY if envelope.data is UNSET else bytes(envelope.data)
    return envelope, element if envelope.data is UNSET else _without(element, data), data


def _without(element: bytes, data: bytes) -> bytes:
    """Return an envelope with its ``data`` replaced by a number, so that only the envelope's own keys are checked.

    Of several ``data`` keys only the last one is replaced, so that the check finds the key twice.
    """
    if data[:1] not in (b"{", b"["):
        return element  # it holds no keys
    start = element.rfind(data)
    return element[:start] + b"0" + element[start + len(data) :]


def refuse_duplicate_keys(text: bytes) -> None:
    """Check that no object in a JSON text has a key twice.

    Raises:
        InvalidEnvelope: One has; the message names the key.
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
    """Return a bad element's `Malformed`, with its sid, id and q if they can be read unambiguously."""
    head, _ = _around_data(element) or (element, b"")
    try:
        found = json.loads(head, object_pairs_hook=_unique)
    except (ValueError, RecursionError, InvalidEnvelope):
        return Malformed(error)
    if not isinstance(found, dict) or not isinstance(found.get("sid"), str) or not is_sid(found["sid"]):
        return Malformed(error)
    return Malformed(error, found["sid"], _readable_id(found.get("id")), _readable_id(found.get("q")))


def _readable_id(value: object) -> int | None:
    return value if type(value) is int and 1 <= value <= MAX_ID else None


def read_server_frame(frame: bytes | str) -> list[tuple[ServerEnvelope, bytes]]:
    """Decode a frame from a server; return each envelope with the exact bytes of its ``data``.

    ``data`` may be no JSON, or JSON that some decoders refuse: its reader has to expect that.

    Raises:
        RemoteProtocolError: It is not a frame of this protocol.
    """
    try:
        if isinstance(frame, str):
            frame = frame.encode()
        else:
            frame.decode()
        array = frame.lstrip(b" \t\r\n")[:1] == b"["
        try:
            envelopes = _SERVER_MANY.decode(frame) if array else [_SERVER_ONE.decode(frame)]
        except (msgspec.DecodeError, RecursionError):
            return [_read_server_element(text) for text in (elements(frame) if array else [frame])]
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"the server sent a frame that cannot be read: {error}; connect again") from error
    return [(envelope, EMPTY if envelope.data is UNSET else bytes(envelope.data)) for envelope in envelopes]


def _read_server_element(text: bytes) -> tuple[ServerEnvelope, bytes]:
    """Return an envelope with its ``data`` as it is: what cannot be read there concerns the session that it is for."""
    head, data = cut_out(text, b"data")
    return _SERVER_ONE.decode(head), EMPTY if data is None else data


def write_envelope(head: dict[str, Any], data: bytes) -> bytes:
    """Build ``{...head, "data": <data>}`` around the exact bytes of ``data`` (PROTOCOL C1)."""
    return msgspec.json.encode(head)[:-1] + b',"data":' + data + b"}"


def write_reply(
    sid: str, id: int, type: str, eid: str | None, t: int | None, digest: str, data: bytes, request: bytes | None = None
) -> bytes:
    """Build the envelope of a reply around its exact ``data``; a faster `write_envelope` for the hot path.

    Args:
        sid: URL-safe session id.
        id: Request id.
        type: Reply type.
        eid: URL-safe episode key; None to leave out ``eid`` and ``t``.
        t: Delivery index.
        digest: ``sha256:<hex>`` of ``data``, empty to leave it out.
        data: The payload.
        request: sha256 of the request's ``data``, sent if an earlier attachment sent the request; None to leave it out.
    """
    request_field = f',"request":"{DIGEST_PREFIX}{request.hex()}"' if request is not None else ""
    position = "" if eid is None else f',"eid":"{eid}","t":{t}'
    digest_field = f',"digest":"{digest}"' if digest else ""
    head = f'{{"sid":"{sid}","id":{id},"type":"{type}"{position}{request_field}{digest_field},"data":'
    return head.encode() + data + b"}"


def join_frame(envelopes: Sequence[bytes]) -> bytes:
    """Put envelopes into one frame: a single one stays as it is, several become an array."""
    return envelopes[0] if len(envelopes) == 1 else b"[" + b",".join(envelopes) + b"]"
