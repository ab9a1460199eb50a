"""Encodes and decodes records, frames and headers; pure functions without a file or a clock.

A segment is a header and frames. A frame is what one sync made durable: the records of some commits, all or none.

    header = MAGIC, u64 number of the segment, u64 where its map begins or 0, 8 bytes salt, u32 crc32 of these
    frame  = MARK or LOOSE, u32 size of the body, u32 crc32 of (salt, u64 offset of the frame, size, body), body
    body   = records, each: u32 size of its values, u8 kind, u32 crc32 of (kind, values), values as one msgpack array

All integers are little-endian. The salt is random and never leaves the disk, and the offset goes into the checksum:
bytes that an agent sent cannot pass for a frame, nor can a stale frame that lies where another was meant to. A record
has its own checksum, so it can be read without its frame.

A store writes a frame only after it synced the one before, or marks it LOOSE. So a bad frame with a good one behind
it that is not loose was durable once, and is damage; any other bad frame is what a crash tore, and is cut off.

A segment that was compacted holds only some of its records. Its last frame is a map of where each was and is
(`Moved`): a record is still found by its old offset.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from errata_protocol.errors import EnvironmentOutputInvalid, JournalUnavailable
from errata_protocol.exception_text import named_text_of

from . import columns
from .base import DeliveryRow, EpisodeRow, Record, RewardRow, SessionChange, SessionRow

MAGIC = b"errataj2"
"""First bytes of a segment; the digit is the version of all that follows."""

MARK = b"\xe7\x4a\xf0\x02"
"""First bytes of a frame whose predecessor was synced, by which a search finds frames behind a damaged one."""

LOOSE = b"\xe7\x4a\xf0\x03"
"""First bytes of a frame that was written without waiting for its predecessor's sync."""

REPAIR = (
    "stop the server and run `errata journal salvage`, which keeps what is whole and lists the sessions that are lost, "
    "or restore the data directory from a copy"
)
"""What to do where something is damaged that was durable."""

SALT_BYTES = 8
HEADER_BYTES = len(MAGIC) + 8 + 8 + SALT_BYTES + 4
FRAME_BYTES = len(MARK) + 8
"""Size of a frame beside its body."""

RECORD_BYTES = 9
"""Size of a record beside its values."""

MAX_BODY_BYTES = 2**32 - 1

SLICE_BYTES = 4096
"""What goes into a checksum at once: for more than 5 KiB zlib gives the interpreter away, and beside a busy event loop
has to wait up to 5 ms to get it back."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_RECORD = struct.Struct("<IBI")
_SESSION, _EPISODE, _DELIVERY, _CHANGE, _DELETION, _REWARD, _MOVED = range(1, 8)
_SEEDS = {kind: zlib.crc32(bytes((kind,))) for kind in range(1, 8)}
_MAX_INTEGER = 2**63 - 1
_KINDS = frozenset(("reset", "step", "mcp", "fork", "close"))
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


@dataclass(frozen=True, slots=True)
class Deletion:
    """An episode and its deliveries were deleted; what its session had counted up to stays.

    Args:
        eid: Episode.
        sid: Its session.
        last_id: The session's highest id when this was written.
        last_seq: Likewise its highest seq.
    """

    eid: str
    sid: str = ""
    last_id: int = 0
    last_seq: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """Where the records of a compacted segment were and are, both rising: offsets from its start.

    Args:
        before: Offsets before the segment was ever compacted.
        now: Offsets in it as it is.
        size_bytes: Size of the segment before it was ever compacted.
    """

    before: Sequence[int]
    now: Sequence[int]
    size_bytes: int


LogRecord = Record | Deletion | Moved

_READ: dict[int, Callable[[Sequence[Any]], LogRecord]] = {
    _SESSION: columns.session,
    _EPISODE: columns.episode,
    _DELIVERY: columns.delivery,
    _CHANGE: columns.change,
    _REWARD: columns.reward,
    _DELETION: lambda values: Deletion(*values),
    _MOVED: lambda values: Moved(*values),
}


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a segment.

    Args:
        number: From 1, in order of writing.
        salt: Goes into the checksum of each frame.
        map_at: Offset of the frame with its `Moved`; 0 in a segment that was never compacted.
    """

    number: int
    salt: bytes
    map_at: int = 0


@dataclass(frozen=True, slots=True)
class Scan:
    """What a segment holds from some offset on.

    Args:
        bodies: Of all good frames in order: offset of the body from the segment's start, and the body.
        good_bytes: Where the last good frame ends.
        torn_bytes: What lies behind that and is to be cut off.
    """

    bodies: list[tuple[int, bytes]]
    good_bytes: int
    torn_bytes: int


def encode_header(header: Header) -> bytes:
    """Return the first `HEADER_BYTES` of a segment."""
    body = MAGIC + _U64.pack(header.number) + _U64.pack(header.map_at) + header.salt
    return body + _U32.pack(zlib.crc32(body))


def decode_header(data: bytes) -> Header | None:
    """Read a segment's header; None where it is not whole."""
    body, checksum = data[: HEADER_BYTES - 4], data[HEADER_BYTES - 4 : HEADER_BYTES]
    if len(checksum) < 4 or _U32.unpack(checksum)[0] != zlib.crc32(body) or not body.startswith(MAGIC):
        return None
    number, map_at = struct.unpack_from("<QQ", body, len(MAGIC))
    return Header(number, body[-SALT_BYTES:], map_at)


def encode_record(record: LogRecord) -> bytes:
    """Return one record of a body.

    Raises:
        EnvironmentOutputInvalid: A value has no form here: a text with a lone surrogate, an integer beyond 64 bits.
    """
    try:
        kind, seed, of = _WRITTEN[type(record)]
        data = _encode(of(record))
        return _RECORD.pack(len(data), kind, zlib.crc32(data, seed)) + data
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        raise EnvironmentOutputInvalid(
            f"what the environment returned cannot be journaled: {named_text_of(error)}; "
            "check its texts for lone surrogates and its numbers for 64 bits"
        ) from error


def decode_record(data: bytes | memoryview, at: int = 0) -> tuple[LogRecord, int]:
    """Return the record at ``at`` and where it ends.

    Raises:
        ValueError: These bytes are no record of this version.
    """
    try:
        size, kind, checksum = _RECORD.unpack_from(data, at)
        end = at + RECORD_BYTES + size
        values = memoryview(data)[at + RECORD_BYTES : end]
        if len(values) < size or zlib.crc32(values, _SEEDS[kind]) != checksum:
            raise ValueError("its checksum does not fit")
        return _READ[kind](_decode(values)), end
    except (IndexError, KeyError, struct.error, TypeError, msgspec.DecodeError) as error:
        raise ValueError(f"no journal record: {error}") from error


def decode_records(body: bytes) -> Iterator[tuple[int, int, LogRecord]]:
    """Return the records of a body, each with the offset where it begins and its size.

    Raises:
        ValueError: These bytes are no body of this version.
    """
    at = 0
    while at < len(body):
        record, end = decode_record(body, at)
        yield at, end - at, record
        at = end


def encode_frame(body: bytes, header: Header, offset: int, *, loose: bool = False) -> bytes:
    """Return the frame of ``body`` at ``offset`` bytes from its segment's start.

    Raises:
        ValueError: The body is larger than `MAX_BODY_BYTES`.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is larger than {MAX_BODY_BYTES}")
    mark = LOOSE if loose else MARK
    return b"".join((mark, _U32.pack(len(body)), _U32.pack(_checksum(body, header, offset)), body))


def scan(data: bytes, header: Header, start: int = HEADER_BYTES) -> Scan:
    """Read a segment from a frame's offset on; tell a torn end from damage.

    Args:
        data: The segment from ``start`` on.
        header: Its header.
        start: Offset of ``data`` in the segment, where a frame begins.

    Raises:
        JournalUnavailable: Something is damaged that was durable once.
    """
    bodies: list[tuple[int, bytes]] = []
    at = 0
    while (body := frame_at(data, header, at, start)) is not None:
        bodies.append((start + at + FRAME_BYTES, body))
        at += FRAME_BYTES + len(body)
    behind = data.find(MARK, at + 1)
    while behind >= 0:
        if frame_at(data, header, behind, start) is not None:
            raise JournalUnavailable(
                f"the journal is damaged: segment {header.number} is broken at byte {start + at} and goes on at "
                f"{start + behind}; {REPAIR}"
            )
        behind = data.find(MARK, behind + 1)
    return Scan(bodies, start + at, len(data) - at)


def _checksum(body: bytes | memoryview, header: Header, offset: int) -> int:
    checksum = zlib.crc32(header.salt + _U64.pack(offset) + _U32.pack(len(body)))
    view = memoryview(body)
    for at in range(0, len(view), SLICE_BYTES):
        checksum = zlib.crc32(view[at : at + SLICE_BYTES], checksum)
    return checksum


def frame_at(data: bytes, header: Header, at: int, start: int) -> bytes | None:
    """Return the body of the frame at ``at``; None where there is no good one. ``data`` begins at ``start``."""
    if data[at : at + len(MARK)] not in (MARK, LOOSE) or len(data) < at + FRAME_BYTES:
        return None
    size, checksum = _U32.unpack_from(data, at + 4)[0], _U32.unpack_from(data, at + 8)[0]
    begin = at + FRAME_BYTES
    if len(data) - begin < size:
        return None
    if _checksum(memoryview(data)[begin : begin + size], header, start + at) != checksum:
        return None
    return data[begin : begin + size]


def _of_delivery(d: DeliveryRow) -> Sequence[Any] | DeliveryRow:
    if d.kind not in _KINDS:
        raise ValueError(f"{d.kind!r} is no kind of delivery")
    t, id = d.t or 0, d.id or 0
    if t < 0 or id < 0 or t > _MAX_INTEGER or id > _MAX_INTEGER:
        raise OverflowError(f"t {d.t} or id {d.id} is no integer from 0 to 2^63 - 1")
    return columns.of_delivery(d) if d.refs else d  # it is written as the array of its fields, which are the columns


_WRITTEN: dict[type[LogRecord], tuple[int, int, Callable[[Any], Any]]] = {
    record: (kind, _SEEDS[kind], of)
    for record, kind, of in (
        (SessionRow, _SESSION, columns.of_session),
        (EpisodeRow, _EPISODE, columns.of_episode),
        (DeliveryRow, _DELIVERY, _of_delivery),
        (SessionChange, _CHANGE, columns.of_change),
        (RewardRow, _REWARD, columns.of_reward),
        (Deletion, _DELETION, attrgetter("eid", "sid", "last_id", "last_seq")),
        (Moved, _MOVED, attrgetter("before", "now", "size_bytes")),
    )
}
