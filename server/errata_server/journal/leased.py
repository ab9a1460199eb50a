"""Segments that several boxes see: commits count only under a lease, and each owner writes files of its own.

An owner of a later epoch does not write where the one before it wrote. `take_over` gives it a directory in which the
full segments are further names of the same files, which nobody changes any more, and the last one is a copy. What the
owner before still writes, cuts off, compacts or deletes is in its own directory, which is not read again (decision
210).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from errata_protocol.errors import JournalUnavailable

from .codec import FRAME_BYTES, HEADER_BYTES, REPAIR, decode_header, scan
from .disk import Disk
from .segments import SEGMENT_BYTES, SegmentLog, Segments, name_of, random_salt
from .writer import StoreFailed

D = TypeVar("D", bound=Disk)

NOT_OURS = "the lease of the data directory has run out; commits wait until its keeper renews it"


class LeasedLog(SegmentLog):
    """`SegmentLog` of a server that has a lease.

    `append` returns only if its frame was synced while the lease was valid. The next owner reads the directory after
    the lease has ended, so it finds each such frame. A frame that was synced later counts as a failed write: nothing of
    it was shown or answered, and the next call cuts it off.

    Args:
        disk: Where; see `Segments`.
        is_ours: Returns whether the lease is valid now.
        salt: See `SegmentLog`.
        segment_bytes: See `SegmentLog`.
    """

    def __init__(
        self,
        disk: Disk,
        is_ours: Callable[[], bool],
        *,
        salt: Callable[[], bytes] = random_salt,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__(disk, salt=salt, segment_bytes=segment_bytes)
        self._is_ours = is_ours

    def append(self, body: bytes) -> tuple[int, int]:
        if not self._is_ours():
            raise StoreFailed(NOT_OURS)
        segment, offset = super().append(body)
        if not self._is_ours():
            self._size, self._dirty = offset - FRAME_BYTES, True
            raise StoreFailed(NOT_OURS)
        return segment, offset


def log_on(
    disk: Disk,
    is_ours: Callable[[], bool] | None,
    *,
    salt: Callable[[], bytes],
    segment_bytes: int,
    fsync: bool = True,
) -> SegmentLog:
    """Return a log with a lease, or the plain one.

    Args:
        disk: Where; see `Segments`.
        is_ours: See `LeasedLog`; None where one process alone has the directory.
        salt: See `SegmentLog`.
        segment_bytes: See `SegmentLog`.
        fsync: See `SegmentLog`.

    Raises:
        JournalUnavailable: A lease is given without ``fsync``: another box would not find what was acknowledged.
    """
    if is_ours is None:
        return SegmentLog(disk, salt=salt, segment_bytes=segment_bytes, fsync=fsync)
    if not fsync:
        raise JournalUnavailable("a lease needs --fsync: another box finds only what was synced")
    return LeasedLog(disk, is_ours, salt=salt, segment_bytes=segment_bytes)


def take_over(source: D, target: D) -> None:
    """Make the segments of another directory, which its owner may still write to, those of an empty one, durably.

    The end of the copy is the point up to which the earlier owner's rows count. All that it acknowledged is before it,
    if its lease has ended.

    Raises:
        JournalUnavailable: A record that was durable is damaged.
        OSError: A disk cannot be read or written, or has no hard links; or ``source`` is being removed.
    """
    while not _taken(source, target):  # a segment was begun meanwhile
        for name in target.names():
            target.remove(name)
    target.sync_names()


def _taken(source: D, target: D) -> bool:
    """Link the full segments, then copy the last one; return whether it still is the last one.

    In this order, and checked: a deletion that the copy lacks would be missing beside a segment that was compacted
    after it.
    """
    last = _last(source)
    for number in range(1, last):
        target.link_from(source, name_of(number))
    if last:
        _copy(source, target, last)
    return _last(source) == last


def _last(disk: Disk) -> int:
    """Return the number of the last segment that has a header; 0 where there is none."""
    numbers = Segments(disk).numbers()
    while numbers:
        head = disk.read_at(name_of(numbers[-1]), 0, HEADER_BYTES + 1)
        if decode_header(head) is not None:
            return numbers[-1]
        if len(head) > HEADER_BYTES:
            raise JournalUnavailable(f"the journal is damaged: segment {numbers[-1]} has no good header; {REPAIR}")
        numbers.pop()  # it was begun and not finished: nothing was ever written to it
    return 0


def _copy(source: D, target: D, number: int) -> None:
    name = name_of(number)
    data = source.read(name)
    header = decode_header(data)
    if header is None:
        raise JournalUnavailable(f"the journal is damaged: segment {number} has lost its header; {REPAIR}")
    if header.map_at:  # it was compacted: nobody appends to it
        target.link_from(source, name)
        return
    end = scan(data[HEADER_BYTES:], header).good_bytes
    target.append(name, data[:end])
    target.sync(name)
