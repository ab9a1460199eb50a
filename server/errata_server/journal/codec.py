"""Records to bytes and back, apart from any store: pure functions (no file, no clock).

A segment is a header and frames. A frame is what one sync made durable: the records of some commits, all or none.

    header = MAGIC, u64 number of the segment, 8 bytes salt, u32 crc32 of these
    frame  = MARK, u32 size of the body, u32 crc32 of (salt, u64 offset of the frame, size, body), body
    body   = records, each: u8 kind, u8 number of values, values
    value  = u8 type, then nothing (None, False, True) | i64 | f64 | u32 size and UTF-8 or bytes

All integers are little-endian. The salt is random and never leaves the disk, and the offset goes into the checksum:
bytes that an agent sent cannot pass for a frame, nor can a stale frame that lies where another was meant to.

A store writes a frame only after it synced the one before. So a bad frame with a good one behind it was durable once,
and is damage; a bad frame with none behind it is what a crash tore, was acknowledged to nobody, and is cut off.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from errata_protocol.errors import EnvironmentOutputInvalid, JournalUnavailable

from . import columns
from .base import DeliveryRow, EpisodeRow, Record, RewardRow, SessionChange, SessionRow
from .columns import Value

MAGIC = b"errataj1"
"""First bytes of a segment; the digit is the version of all that follows."""

MARK = b"\xe7\x4a\xf0\x01"
"""First bytes of a frame, by which a search finds frames behind a damaged one."""

SALT_BYTES = 8
HEADER_BYTES = len(MAGIC) + 8 + SALT_BYTES + 4
FRAME_BYTES = len(MARK) + 8
"""Size of a frame beside its body."""

MAX_BODY_BYTES = 2**32 - 1

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_NONE, _FALSE, _TRUE, _INT, _FLOAT, _TEXT, _BYTES = range(7)
_SESSION, _EPISODE, _DELIVERY, _CHANGE, _DELETION, _REWARD = range(1, 7)


@dataclass(frozen=True, slots=True)
class Deletion:
    """An episode and its deliveries were deleted."""

    eid: str


LogRecord = Record | Deletion

_READ: dict[int, Callable[[Sequence[Any]], LogRecord]] = {
    _SESSION: columns.session,
    _EPISODE: columns.episode,
    _DELIVERY: columns.delivery,
    _CHANGE: columns.change,
    _REWARD: columns.reward,
    _DELETION: lambda values: Deletion(*values),
}


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment says of itself.

    Args:
        number: From 1, in order of writing.
        salt: Goes into the checksum of each frame.
    """

    number: int
    salt: bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """What a segment holds.

    Args:
        records: Those of all good frames, in order.
        good_bytes: Where the last good frame ends.
        torn_bytes: What lies behind that and is to be cut off.
    """

    records: list[LogRecord]
    good_bytes: int
    torn_bytes: int


def encode_header(header: Header) -> bytes:
    """Return the first `HEADER_BYTES` of a segment."""
    body = MAGIC + _U64.pack(header.number) + header.salt
    return body + _U32.pack(zlib.crc32(body))


def decode_header(data: bytes) -> Header | None:
    """Read a segment's header; None where it is not whole."""
    body, checksum = data[: HEADER_BYTES - 4], data[HEADER_BYTES - 4 : HEADER_BYTES]
    if len(checksum) < 4 or _U32.unpack(checksum)[0] != zlib.crc32(body) or not body.startswith(MAGIC):
        return None
    return Header(_U64.unpack_from(body, len(MAGIC))[0], body[-SALT_BYTES:])


def encode_records(records: Iterable[LogRecord]) -> bytes:
    """Return the body that holds ``records``.

    Raises:
        EnvironmentOutputInvalid: A value has no form here: a text with a lone surrogate, an integer beyond 64 bits.
    """
    out = bytearray()
    for record in records:
        kind, values = _flat(record)
        out += bytes((kind, len(values)))
        for value in values:
            try:
                _put(out, value)
            except (ValueError, TypeError, OverflowError, struct.error) as error:
                raise EnvironmentOutputInvalid(
                    f"what the environment returned cannot be journaled: {type(error).__name__}: {error}; "
                    "check its texts for lone surrogates and its numbers for 64 bits"
                ) from error
    return bytes(out)


def decode_records(body: bytes) -> list[LogRecord]:
    """Return the records of a body.

    Raises:
        ValueError: These bytes are no body of this version.
    """
    records: list[LogRecord] = []
    at = 0
    try:
        while at < len(body):
            kind, count = body[at], body[at + 1]
            at += 2
            values: list[Any] = []
            for _ in range(count):
                value, at = _take(body, at)
                values.append(value)
            records.append(_READ[kind](values))
    except (IndexError, KeyError, struct.error, TypeError) as error:
        raise ValueError(f"no journal records: {error}") from error
    return records


def encode_frame(body: bytes, header: Header, offset: int) -> bytes:
    """Return the frame of ``body`` at ``offset`` bytes from its segment's start.

    Raises:
        ValueError: The body is larger than `MAX_BODY_BYTES`.
    """
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes is larger than {MAX_BODY_BYTES}")
    return b"".join((MARK, _U32.pack(len(body)), _U32.pack(_checksum(body, header, offset)), body))


def scan(data: bytes) -> Scan:
    """Read a segment; tell a torn end from damage.

    Raises:
        JournalUnavailable: Something is damaged that was durable once.
    """
    header = decode_header(data)
    if header is None:
        if len(data) > HEADER_BYTES:
            raise JournalUnavailable("the journal is damaged: a segment with frames has no good header")
        return Scan([], 0, len(data))
    records: list[LogRecord] = []
    at = HEADER_BYTES
    while (body := _frame_at(data, header, at)) is not None:
        try:
            records += decode_records(body)
        except ValueError as error:
            raise JournalUnavailable(
                f"the frame at byte {at} of segment {header.number} of the journal cannot be read: {error}; "
                "use the Errata version that wrote it"
            ) from error
        at += FRAME_BYTES + len(body)
    behind = data.find(MARK, at + 1)
    while behind >= 0:
        if _frame_at(data, header, behind) is not None:
            raise JournalUnavailable(
                f"the journal is damaged: segment {header.number} is broken at byte {at} and goes on at {behind}; "
                "restore the data directory from a copy"
            )
        behind = data.find(MARK, behind + 1)
    return Scan(records, at, len(data) - at)


def _checksum(body: bytes | memoryview, header: Header, offset: int) -> int:
    return zlib.crc32(body, zlib.crc32(header.salt + _U64.pack(offset) + _U32.pack(len(body))))


def _frame_at(data: bytes, header: Header, at: int) -> bytes | None:
    if data[at : at + len(MARK)] != MARK or len(data) < at + FRAME_BYTES:
        return None
    size, checksum = _U32.unpack_from(data, at + 4)[0], _U32.unpack_from(data, at + 8)[0]
    start = at + FRAME_BYTES
    if len(data) - start < size or _checksum(memoryview(data)[start : start + size], header, at) != checksum:
        return None
    return data[start : start + size]


def _flat(record: LogRecord) -> tuple[int, Sequence[Value]]:
    match record:
        case DeliveryRow():
            return _DELIVERY, columns.of_delivery(record)
        case EpisodeRow():
            return _EPISODE, columns.of_episode(record)
        case SessionRow():
            return _SESSION, columns.of_session(record)
        case SessionChange():
            return _CHANGE, columns.of_change(record)
        case RewardRow():
            return _REWARD, columns.of_reward(record)
        case Deletion():
            return _DELETION, (record.eid,)


def _put(out: bytearray, value: Value) -> None:
    match value:
        case None:
            out.append(_NONE)
        case bool():
            out.append(_TRUE if value else _FALSE)
        case int():
            out.append(_INT)
            out += _I64.pack(value)
        case float():
            out.append(_FLOAT)
            out += _F64.pack(value)
        case str():
            data = value.encode()
            out.append(_TEXT)
            out += _U32.pack(len(data))
            out += data
        case bytes():
            out.append(_BYTES)
            out += _U32.pack(len(value))
            out += value
        case _:
            raise TypeError(f"a {type(value).__name__} is no journal value")


def _take(body: bytes, at: int) -> tuple[Value, int]:
    kind = body[at]
    at += 1
    match kind:
        case 0:
            return None, at
        case 1 | 2:
            return kind == _TRUE, at
        case 3:
            return _I64.unpack_from(body, at)[0], at + 8
        case 4:
            return _F64.unpack_from(body, at)[0], at + 8
        case 5 | 6:
            end = at + 4 + _U32.unpack_from(body, at)[0]
            data = body[at + 4 : end]
            if end > len(body):
                raise ValueError("a value ends beyond its record")
            return (data.decode() if kind == _TEXT else data), end
    raise ValueError(f"unknown type of value {kind}")
