"""Reads damaged segments: finds the intact frames behind damage, and the sessions with records in a damaged frame.

Pure functions on bytes, as `codec` is. No delivery is taken from a frame that fails its checksum: records' checksums
have no salt, so behind a damaged size an agent's output could pass for a record. What can be read there only names the
sessions that have rows there; rows of sessions and episodes are kept where unbroken sizes lead to them.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from errata_protocol.errors import JournalUnavailable

from .base import DeliveryRow, EpisodeRow, RewardRow, SessionChange, SessionRow
from .codec import (
    FRAME_BYTES,
    HEADER_BYTES,
    LOOSE,
    MAGIC,
    MARK,
    RECORD_BYTES,
    SALT_BYTES,
    Deletion,
    Header,
    LogRecord,
    decode_header,
    decode_record,
    decode_records,
    frame_at,
)

_MARKS = re.compile(re.escape(MARK[:3]) + b"[" + re.escape(MARK[3:] + LOOSE[3:]) + b"]")
_KINDS = range(1, 8)
NAMED = 10
"""Records that a message names."""

_VALUES = msgspec.msgpack.Decoder(list[msgspec.Raw])
"""Finds where each value of a record ends, whatever is in it: a wrong bit in a text is none in its size."""

_FLIPS = 3
"""At most so many bits of a frame's or record's head may be wrong for it to be taken for one."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A good frame: where it begins and ends in its segment, and its body."""

    begin: int
    end: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a damaged frame.

    Args:
        begin: Offset in the bytes that were read.
        end: Offset of the first byte after it.
        record: The record; None if none can be read.
        is_head: It is the head of a frame, good or not.
        is_one: It is exactly one record, or the head of a frame.
        is_chained: The sizes of the records before it lead here from a frame's head.
    """

    begin: int
    end: int
    record: LogRecord | None = None
    is_head: bool = False
    is_one: bool = True
    is_chained: bool = True


def good_frames(data: bytes, header: Header, start: int = HEADER_BYTES) -> Iterator[Frame]:
    """Yield every good frame of a segment, also behind damaged ones.

    Args:
        data: The whole segment.
        header: Its header.
        start: Where the first frame begins.
    """
    at = start
    while at < len(data):
        body = frame_at(data, header, at, 0)
        if body is None:
            found = _MARKS.search(data, at + 1)
            if found is None:
                return
            at = found.start()
            continue
        end = at + FRAME_BYTES + len(body)
        yield Frame(at, end, body)
        at = end


def header_of(data: bytes, number: int) -> Header | None:
    """Return the header of a segment, also where its bytes are damaged; None where no frame confirms one.

    A salt that is lost is replaced by another that has the same effect on the checksums: only its own checksum counts.

    Raises:
        JournalUnavailable: It is good, and of another version.
    """
    header = decode_header(data)
    if header is not None and header.number == number:
        return header
    raw = data[:HEADER_BYTES]
    if (
        len(raw) == HEADER_BYTES
        and raw[:7] == MAGIC[:7]
        and raw[7:8] != MAGIC[7:]
        and zlib.crc32(raw[:-4]) == struct.unpack("<I", raw[-4:])[0]
    ):
        raise JournalUnavailable(
            f"segment {number} of the journal has another version ({raw[:8]!r}): use the Errata version that wrote it"
        )
    salt = raw[HEADER_BYTES - 4 - SALT_BYTES : HEADER_BYTES - 4].ljust(SALT_BYTES, b"\0")
    if next(good_frames(data, Header(number, salt)), None) is not None:
        return Header(number, salt)
    for found in _MARKS.finditer(data, HEADER_BYTES):
        at = found.start()
        size, checksum = struct.unpack("<II", data[at + 4 : at + 12].ljust(8, b"\0"))
        body = data[at + FRAME_BYTES : at + FRAME_BYTES + size]
        if len(body) < size or not _is_body(body):
            continue
        covered = struct.pack("<QI", at, size) + body
        salt = _bytes_with(_before(covered, checksum))
        if at == HEADER_BYTES or sum(1 for _ in good_frames(data, Header(number, salt))) > 1:
            return Header(number, salt)
    return None


def pieces_of(data: bytes) -> Iterator[Piece]:
    """Read bytes that begin where a frame should, and are none that is good.

    A record with one wrong bit is returned with that bit put right, which its checksum tells.
    """
    yield Piece(0, min(FRAME_BYTES, len(data)), is_head=True)
    at, is_chained = FRAME_BYTES, True
    while at < len(data):
        if _MARKS.match(data, at):
            yield Piece(at, min(at + FRAME_BYTES, len(data)), is_head=True)
            at, is_chained = at + FRAME_BYTES, True
            continue
        found = _record_at(data, at) or _corrected(data, at)
        if found is not None:
            record, end = found
            yield Piece(at, end, record, is_chained=is_chained)
            at = end
            continue
        size = _size_at(data, at)
        end = at + RECORD_BYTES + size
        if end <= len(data) and _is_boundary(data, end):
            yield Piece(at, end, is_chained=is_chained)
        else:
            end = next((p for p in range(at + 1, len(data)) if _is_boundary(data, p)), len(data))
            if end - at == FRAME_BYTES and end < len(data):
                yield Piece(at, end, is_head=True, is_chained=False)
            else:
                is_one = (size ^ (end - at - RECORD_BYTES)).bit_count() <= _FLIPS and _is_values(
                    data[at + RECORD_BYTES : end]
                )
                yield Piece(at, end, is_one=is_one, is_chained=False)
            is_chained = False
        at = end


def is_torn(data: bytes) -> tuple[int, bool]:
    """Return whether the last frame of a segment is torn, i.e. only a part of it was written.

    A frame that was written completely but fails its checksum is damaged, not torn: it may have been acknowledged.

    Args:
        data: What follows the segment's last good frame, to the end of the segment.

    Returns:
        The offset in ``data`` at which the last frame begins, and whether it is torn.
    """
    last, ends_with_a_record = 0, False
    for piece in pieces_of(data):
        ends_with_a_record = piece.record is not None
        if piece.is_head:
            last = piece.begin
    head = data[last : last + FRAME_BYTES]
    if len(head) < FRAME_BYTES:
        return last, True
    size, there = struct.unpack_from("<I", head, 4)[0], len(data) - last - FRAME_BYTES
    is_head = min(_differing(head[:4], MARK), _differing(head[:4], LOOSE)) <= _FLIPS
    is_whole = size == there or ((size ^ there).bit_count() == 1 and ends_with_a_record)
    return last, not (is_head and is_whole)


def names_in(data: bytes, known: Mapping[str, str]) -> set[str]:
    """Return the values of those keys of ``known`` that stand in ``data`` as texts of msgpack."""
    found = set[str]()
    longest = max(map(len, known), default=0)
    for at in range(len(data)):
        first = data[at]
        if 0xA0 < first <= 0xBF:
            begin, size = at + 1, first & 0x1F
        elif first == 0xD9 and at + 1 < len(data):
            begin, size = at + 2, data[at + 1]
        else:
            continue
        if size <= 4 * longest:
            name = data[begin : begin + size].decode("utf-8", "replace")
            if name in known:
                found.add(known[name])
    return found


def summary(records: Iterable[LogRecord]) -> str:
    """Return in words what these records are, the first `NAMED` of them by their ids."""
    words = [_words(record) for record in records]
    more = [f"{len(words) - NAMED} more"] if len(words) > NAMED else []
    return ", ".join([*words[:NAMED], *more]) or "no record that can be read"


def _words(record: LogRecord) -> str:
    match record:
        case DeliveryRow(t=None):
            return f"{record.status} for {record.kind} id={record.id} of session {record.sid}"
        case DeliveryRow():
            return f"{record.kind} t={record.t} of {record.eid} (session {record.sid})"
        case RewardRow():
            return f"a reward of t={record.t} of {record.eid} (session {record.sid})"
        case EpisodeRow():
            return f"episode {record.eid} (session {record.sid})"
        case SessionRow():
            return f"session {record.sid}"
        case SessionChange():
            return f"a change of session {record.sid}"
        case Deletion():
            return f"the deletion of {record.eid}"
    return "the map of a compacted segment"


def _differing(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def _is_body(body: bytes) -> bool:
    try:
        return any(True for _ in decode_records(body))
    except ValueError:
        return False


def _is_values(data: bytes) -> bool:
    """Return whether these bytes are all the values of one record, with no more behind them.

    Sizes that are nearly right do not tell: those of a record and of a gap behind it can be a few bits apart by chance.
    """
    try:
        _VALUES.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _record_at(data: bytes, at: int) -> tuple[LogRecord, int] | None:
    if (
        at + RECORD_BYTES > len(data)
        or data[at + 4] not in _KINDS
        or at + RECORD_BYTES + _size_at(data, at) > len(data)
    ):
        return None
    try:
        return decode_record(data, at)
    except ValueError:
        return None


def _is_boundary(data: bytes, at: int) -> bool:
    return at == len(data) or _MARKS.match(data, at) is not None or _record_at(data, at) is not None


def _size_at(data: bytes, at: int) -> int:
    return int(struct.unpack("<I", data[at : at + 4].ljust(4, b"\xff"))[0])


# -- checksums -------------------------------------------------------------------------------------------------------


def _row(n: int) -> int:
    for _ in range(8):
        n = (n >> 1) ^ (0xEDB88320 if n & 1 else 0)
    return n


_TABLE = [_row(n) for n in range(256)]
_BACK = {value >> 24: n for n, value in enumerate(_TABLE)}
_ONE_BIT = {_TABLE[1 << bit]: bit for bit in range(8)}


def _earlier(register: int, byte: int = 0) -> int:
    """Return the register of the CRC before ``byte`` went in."""
    n = _BACK[register >> 24]
    return (((register ^ _TABLE[n]) << 8) & 0xFFFFFFFF) | (n ^ byte)


def _before(data: bytes, checksum: int) -> int:
    """Return the checksum that ``data`` continued to ``checksum``."""
    register = checksum ^ 0xFFFFFFFF
    for byte in reversed(data):
        register = _earlier(register, byte)
    return register ^ 0xFFFFFFFF


def _bytes_with(checksum: int) -> bytes:
    """Return `SALT_BYTES` bytes that have this checksum."""
    start = bytes(SALT_BYTES - 4)
    return start + struct.pack("<I", _before(bytes(4), checksum) ^ zlib.crc32(start))


def _corrected(data: bytes, at: int) -> tuple[LogRecord, int] | None:
    """Return the record at ``at`` with the one bit of it put right that is wrong; None where it is not one."""
    if at + RECORD_BYTES > len(data):
        return None
    raw = data[at : at + RECORD_BYTES]
    for bit in range(8 * RECORD_BYTES):  # of size, kind and checksum
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        size = struct.unpack_from("<I", changed)[0]
        end = at + RECORD_BYTES + size
        if changed[4] in _KINDS and end <= len(data) and (found := _record_at(bytes(changed) + data[at + 9 : end], 0)):
            return found[0], end
    size, kind, checksum = struct.unpack_from("<IBI", raw)
    end = at + RECORD_BYTES + size
    if kind not in _KINDS or end > len(data):
        return None
    values = data[at + RECORD_BYTES : end]
    register = zlib.crc32(values, zlib.crc32(bytes((kind,)))) ^ checksum
    for n in range(len(values) - 1, -1, -1):
        if (wrong := _ONE_BIT.get(register)) is not None:
            right = bytearray(data[at:end])
            right[RECORD_BYTES + n] ^= 1 << wrong
            found = _record_at(bytes(right), 0)
            return (found[0], end) if found is not None else None
        register = _earlier(register)
    return None
