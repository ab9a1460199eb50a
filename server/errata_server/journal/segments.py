"""Append-only segment files: append and fsync frames, read a record by its `Place`, replay from a position, compact.

One frame is one group commit: append, sync, then its records count. A segment that reached its size is followed by
another. At open what a crash tore off the end of the last one is cut off: it was never acknowledged. A segment
that is mostly garbage is written anew without it (`SegmentLog.rewrite`); its records keep their places.
"""

from __future__ import annotations

import bisect
import logging
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from errata_os.descriptors import explained
from errata_protocol.errors import JournalUnavailable

from .base import JournalDamaged
from .codec import (
    FRAME_BYTES,
    HEADER_BYTES,
    REPAIR,
    SALT_BYTES,
    Header,
    LogRecord,
    Moved,
    decode_header,
    decode_record,
    decode_records,
    encode_frame,
    encode_header,
    encode_record,
    scan,
)
from .damage import pieces_of, summary
from .disk import Disk
from .writer import StoreFailed

log = logging.getLogger("errata.journal")

SEGMENT_BYTES = 64 * 1024**2

_SUFFIX, _NEW = ".log", ".new"


class Place(NamedTuple):
    """Where a record lies: its segment's number, its offset there when it was written, and its size, in bytes."""

    segment: int
    offset: int
    size: int


class Position(NamedTuple):
    """A point between two frames; all before it was applied.

    The salt is the segment's: a position in the files of another journal is none here.
    """

    segment: int
    offset: int
    salt: bytes


Placed = tuple[Place, LogRecord]


_UNFINISHED = "A server that ended while it wrote leaves such an end and has acknowledged nothing of it. "


class UnknownPosition(Exception):
    """A position is not one of these segments: they are older than it, or others."""


def random_salt() -> bytes:
    """Return a segment's salt."""
    return secrets.token_bytes(SALT_BYTES)


class Segments:
    """The segments of one directory, to be read.

    Args:
        disk: Where; all its files named ``*.log`` are segments.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._headers: dict[int, tuple[Header, Moved | None]] = {}
        self._unfinished = set[int]()

    def numbers(self) -> list[int]:
        """Return the numbers of all segments, in order.

        Raises:
            JournalUnavailable: One is missing.
        """
        names = [name for name in self._disk.names() if name.endswith(_SUFFIX)]
        for number, name in enumerate(names, start=1):
            if name != name_of(number):
                raise JournalUnavailable(
                    f"the journal is damaged: segment {number} is missing or broken off, and {names[-1]} follows; "
                    f"{REPAIR}"
                )
        return list(range(1, len(names) + 1))

    def size(self, number: int) -> int:
        """Return the size of a segment in bytes."""
        return self._disk.size(name_of(number))

    def read(self, place: Place) -> LogRecord:
        """Return the record at ``place``, its checksum verified. Any thread may call this.

        Raises:
            JournalUnavailable: It is damaged, or its segment is gone; or the machine cannot read it now.
        """
        try:
            try:
                return self._read(place)
            except (ValueError, FileNotFoundError):  # the segment was rewritten between a look at its map and the read
                self._headers.pop(place.segment, None)
                return self._read(place)
        except FileNotFoundError as error:
            raise JournalDamaged(f"the journal is damaged: segment {place.segment} is gone; {REPAIR}") from error
        except OSError as error:  # of the machine, not of the contents of the file
            raise JournalUnavailable(
                f"segment {place.segment} of the journal cannot be read now: {explained(error)}; then send the request "
                "again, nothing is lost",
                retry_after=1.0,
            ) from error
        except ValueError as error:
            raise JournalDamaged(
                f"the journal is damaged: byte {place.offset} of segment {place.segment} holds no record ({error}); "
                f"{REPAIR}"
            ) from error

    def _read(self, place: Place) -> LogRecord:
        _, moved = self._header(place.segment)
        offset = place.offset
        if moved is not None:
            at = bisect.bisect_left(moved.before, offset)
            if at == len(moved.before) or moved.before[at] != offset:
                raise ValueError("it was deleted")
            offset = moved.now[at]
        return decode_record(self._disk.read_at(name_of(place.segment), offset, place.size))[0]

    def after(self, position: Position | None) -> Iterator[tuple[list[Placed], Position]]:
        """Return what lies behind ``position``, frame by frame, each with the position behind it.

        A torn end is left out. Records that were compacted away do not appear.

        Raises:
            JournalUnavailable: A record that was durable is damaged.
            UnknownPosition: ``position`` is not one of these segments.
        """
        numbers = self.numbers()
        if position is not None and position.segment not in numbers:
            raise UnknownPosition(f"there is no segment {position.segment}")
        for number in numbers[position.segment - 1 if position is not None else 0 :]:
            here = position if position is not None and position.segment == number else None
            yield from self._frames(number, here)
            if number in self._unfinished and number != numbers[-1]:
                raise JournalUnavailable(
                    f"the journal is damaged: segment {number} is missing or broken off, and "
                    f"{name_of(numbers[-1])} follows; {REPAIR}"
                )

    def whole(self, number: int) -> Iterator[tuple[list[Placed], Position]]:
        """Return all of one segment, as `after` does."""
        yield from self._frames(number, None)

    def _frames(self, number: int, position: Position | None) -> Iterator[tuple[list[Placed], Position]]:
        """Yield the frames of one segment behind ``position``; note in `_unfinished` whether it ends in a good one."""
        self._headers.pop(number, None)
        self._unfinished.discard(number)
        size = self.size(number)
        try:
            header, moved = self._header(number)
        except ValueError:
            if size > HEADER_BYTES:
                raise JournalUnavailable(
                    f"the journal is damaged: segment {number} has no good header; {REPAIR}; a later Errata may have "
                    "written it"
                ) from None
            if position is not None:
                raise UnknownPosition(f"segment {number} has no header") from None
            self._unfinished.add(number)
            return
        end = moved.size_bytes if moved is not None else size
        if position is not None and (header.salt != position.salt or position.offset > end):
            raise UnknownPosition(f"segment {number} is another, or ends before byte {position.offset}")
        start = position.offset if position is not None and moved is None else HEADER_BYTES
        name = name_of(number)
        if moved is not None:
            yield self._moved(number, header, moved, position), Position(number, moved.size_bytes, header.salt)
            return
        found = scan(self._disk.read_at(name, start, size - start), header, start)
        for offset, body in found.bodies:
            yield self._records(number, offset, body), Position(number, offset + len(body), header.salt)
        if found.torn_bytes:
            self._unfinished.add(number)

    def _moved(self, number: int, header: Header, moved: Moved, position: Position | None) -> list[Placed]:
        found = scan(self._disk.read_at(name_of(number), HEADER_BYTES, self.size(number)), header)
        if found.torn_bytes:
            raise JournalUnavailable(f"the journal is damaged: compacted segment {number} is broken off; {REPAIR}")
        before = dict(zip(moved.now, moved.before, strict=True))
        return [
            (Place(number, before[place.offset], place.size), record)
            for offset, body in found.bodies
            for place, record in self._records(number, offset, body)
            if not isinstance(record, Moved) and (position is None or before[place.offset] >= position.offset)
        ]

    def _records(self, number: int, offset: int, body: bytes) -> list[Placed]:
        try:
            return [(Place(number, offset + at, size), record) for at, size, record in decode_records(body)]
        except ValueError as error:
            raise JournalUnavailable(
                f"the frame at byte {offset - FRAME_BYTES} of segment {number} of the journal cannot be read: {error}; "
                "use the Errata version that wrote it"
            ) from error

    def _header(self, number: int) -> tuple[Header, Moved | None]:
        """Return a segment's header and map.

        Raises:
            ValueError: It has no good header.
        """
        known = self._headers.get(number)
        if known is None:
            header = decode_header(self._disk.read_at(name_of(number), 0, HEADER_BYTES))
            if header is None or header.number != number:
                raise ValueError("its segment has no good header")
            known = self._headers[number] = (header, self._map(number, header))
        return known

    def _map(self, number: int, header: Header) -> Moved | None:
        if not header.map_at:
            return None
        rest = self._disk.read_at(name_of(number), header.map_at, self.size(number) - header.map_at)
        moved = decode_record(rest, FRAME_BYTES)[0]
        if not isinstance(moved, Moved):
            raise ValueError("its segment has no map")
        return moved


class SegmentLog(Segments):
    """The segments of one directory, to be written; one at a time may. `replay` comes first, and once.

    Args:
        disk: Where; see `Segments`.
        salt: Draws `errata_server.journal.codec.SALT_BYTES` random bytes.
        segment_bytes: A segment that reached this size is followed by another.
        fsync: Sync each frame before `append` returns. Otherwise a segment is synced when it is full and by `sync`.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        salt: Callable[[], bytes] = random_salt,
        segment_bytes: int = SEGMENT_BYTES,
        fsync: bool = True,
    ) -> None:
        super().__init__(disk)
        self._salt = salt
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._head = Header(0, b"")
        self._size = 0
        self._dirty = False
        self._sealed = False

    @property
    def position(self) -> Position:
        """Behind the last frame."""
        return Position(self._head.number, self._size, self._head.salt)

    def replay(
        self, position: Position | None, known: Position | None = None
    ) -> Iterator[tuple[list[Placed], Position]]:
        """`after`, and when it is exhausted, this log appends behind it: a torn end was cut off.

        Args:
            position: See `after`.
            known: Position up to which a former index, which is not used any more, had recorded these segments. If they
                end before it, rows that may have been acknowledged are gone, which is logged.

        Raises:
            JournalUnavailable: See `after`.
            UnknownPosition: Likewise.
            OSError: The disk cannot be read or written.
        """
        for name in self._disk.names():
            if name.endswith(_NEW):  # a rewrite that a crash ended
                self._disk.remove(name)
        self._make_durable(position)
        last = position
        for records, last in self.after(position):
            yield records, last
        numbers = self.numbers()
        if not numbers:
            return
        number = numbers[-1]
        try:
            header, moved = self._header(number)
        except ValueError:  # torn while it was begun: nothing was ever written to it
            log.warning("journal: segment %d was begun and not finished when the server ended: removed", number)
            self._disk.remove(name_of(number))
            self._disk.sync_names()
            if len(numbers) == 1:
                if known is not None:
                    _lacks(known, 0, 0, b"")
                return
            number -= 1
            header, moved = self._header(number)
        size = last.offset if last is not None and last.segment == number else HEADER_BYTES
        self._head, self._size = header, size
        if moved is not None:
            self._sealed = True  # nothing is appended to what was compacted
            return
        lost = known is not None and _lacks(known, number, size, header.salt)
        if (torn := self.size(number) - size) > 0:
            tail = self._disk.read_at(name_of(number), size, torn)
            held = summary(piece.record for piece in pieces_of(tail) if piece.record is not None)
            log.warning(
                "journal: the last %d bytes of segment %d are dropped, from byte %d on: they hold no whole frame. %sIt "
                "held: %s",
                torn,
                number,
                size,
                "" if lost else _UNFINISHED,
                held,
            )
            self._disk.truncate(name_of(number), size)
        # Also where nothing was torn: a frame that was read here may never have been synced, and reads
        # return it from now on.
        self._disk.sync(name_of(number))
        self._disk.sync_names()

    def _make_durable(self, position: Position | None) -> None:
        """Write the last frame again in place, unless it lies before ``position`` and so was acknowledged.

        The process before this one may have ended with a sync that failed: then the kernel has the frame in memory,
        holds it for written, and a further sync does nothing. What is appended behind it would be lost with it.
        """
        numbers = self.numbers()
        if not numbers:
            return
        number = numbers[-1]
        name, size = name_of(number), self.size(number)
        try:
            header, moved = self._header(number)
        except ValueError:  # torn while it was begun
            return
        if moved is not None:
            return
        known = position is not None and position.segment == number and position.salt == header.salt
        start = position.offset if position is not None and known else HEADER_BYTES
        bodies = list(scan(self._disk.read_at(name, start, max(0, size - start)), header, start).bodies)
        if bodies:
            offset, body = bodies[-1]
            begin = offset - FRAME_BYTES
            self._disk.rewrite(name, begin, self._disk.read_at(name, begin, FRAME_BYTES + len(body)))
        if start == HEADER_BYTES and len(bodies) < 2:
            self._disk.rewrite(name, 0, self._disk.read_at(name, 0, HEADER_BYTES))

    def append(self, body: bytes) -> tuple[int, int]:
        """Write one frame, synced where this log syncs; return its segment and the offset of its body.

        Raises:
            StoreFailed: It may be there in part; the next call cuts that off first.
        """
        try:
            if self._dirty:
                self._disk.truncate(self._name, self._size)
                self._dirty = False
            if self._head.number == 0 or self._sealed or self._size >= self._segment_bytes:
                self._begin()
            frame = encode_frame(body, self._head, self._size, loose=not self._fsync)
            self._dirty = True
            (self._disk.append_synced if self._fsync else self._disk.append)(self._name, frame)
            self._dirty = False
        except OSError as error:
            raise StoreFailed(f"{error.filename or 'disk'}: {error.strerror}") from error
        offset = self._size + FRAME_BYTES
        self._size += len(frame)
        return self._head.number, offset

    def sync(self) -> None:
        """Make durable what was appended before, where `append` does not.

        Raises:
            StoreFailed: It may be lost.
        """
        if self._fsync or not self._head.number:
            return
        try:
            self._disk.sync(self._name)
        except OSError as error:
            raise StoreFailed(f"{error.filename or 'disk'}: {error.strerror}") from error

    def rewrite(self, number: int, keep: Collection[int]) -> int:
        """Write a full segment anew with those of its records that were written at ``keep``; return the bytes given
        back.

        The old one remains until the new one is durable. Reads go on meanwhile.

        Raises:
            OSError: The disk cannot be written; the old segment remains.
            ValueError: It is the one that is written to.
        """
        if number >= self._head.number:
            raise ValueError(f"segment {number} is not full yet")
        name, new = name_of(number), f"{number:08d}{_NEW}"
        before = self.size(number)
        kept = [place for records, _ in self.whole(number) for place, _ in records if place.offset in keep]
        header, moved = self._header(number)
        data, where = (
            self._disk.read(name),
            dict(zip(moved.before, moved.now, strict=True)) if moved is not None else {},
        )
        body, now, at = bytearray(), list[int](), HEADER_BYTES + FRAME_BYTES
        for place in kept:
            now.append(at + len(body))
            begin = where.get(place.offset, place.offset)
            body += data[begin : begin + place.size]
        size = moved.size_bytes if moved is not None else before
        map_at = at + len(body)
        header = Header(number, header.salt, map_at)
        table = encode_record(Moved([place.offset for place in kept], now, size))
        data = b"".join(
            (
                encode_header(header),
                encode_frame(bytes(body), header, HEADER_BYTES),
                encode_frame(table, header, map_at),
            )
        )
        if len(data) >= before:
            return 0
        if new in self._disk.names():  # what an attempt left behind that failed
            self._disk.remove(new)
        self._disk.append(new, data)
        self._disk.sync(new)
        self._disk.sync_names()
        self._disk.rename(new, name)
        self._disk.sync_names()
        self._headers.pop(number, None)
        return before - len(data)

    def _begin(self) -> None:
        if self._head.number:
            self.sync()
        header = Header(self._head.number + 1, self._salt())
        name = name_of(header.number)
        if name in self._disk.names():  # what an attempt left behind that failed
            self._disk.remove(name)
        self._disk.append(name, encode_header(header))
        self._disk.sync(name)
        self._disk.sync_names()
        self._head, self._size, self._sealed = header, HEADER_BYTES, False

    @property
    def _name(self) -> str:
        return name_of(self._head.number)


def all_gone(directory: Path) -> JournalUnavailable:
    """Return what to tell where an index has a position in segments, and there are none."""
    return JournalUnavailable(
        f"the segments of the journal in {directory} are gone ({name_of(1)} is missing), and its index knows of rows "
        "in them: restore them from a copy, or give another --data-dir to start an empty journal"
    )


def name_of(number: int) -> str:
    """Return the name of a segment's file."""
    return f"{number:08d}{_SUFFIX}"


def _lacks(known: Position, number: int, size: int, salt: bytes) -> bool:
    """Return whether segments end before what an index knew of them; log it, because that may have been acknowledged.

    Args:
        known: Up to where the index knew them.
        number: Last segment.
        size: Where its last whole frame ends.
        salt: Salt of that segment.
    """
    if known.segment < number or (known.segment == number and (known.offset <= size or known.salt != salt)):
        return False
    log.error(
        "journal: the segments end at byte %d of segment %d, and the index knew them up to byte %d of segment %d. What "
        "was between is gone, and had been acknowledged (without fsync, a power loss does that). Sessions with rows "
        "there end with SESSION_LOST when their clients come back. To keep them, stop this server and restore a copy",
        size,
        number,
        known.offset,
        known.segment,
    )
    return True
