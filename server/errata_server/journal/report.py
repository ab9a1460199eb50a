"""Size and integrity of a journal on disk, for ``errata journal`` and for tests."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from errata_protocol.errors import JournalUnavailable

from .base import DeliveryRow
from .disk import DirectoryDisk
from .index import INDEX
from .indexed import OF_AN_EPISODE
from .read_only import ReadOnlyJournal
from .segments import Place, Segments


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """One segment.

    Args:
        number: From 1, in order of writing.
        size_bytes: Its file.
        rows: Records in it.
        dead_rows: Those of deleted episodes.
        dead_bytes: Their size.
    """

    number: int
    size_bytes: int
    rows: int
    dead_rows: int
    dead_bytes: int


@dataclass(frozen=True, slots=True)
class JournalSize:
    """A journal.

    Args:
        segments: In order of writing.
        index_bytes: The index with its write-ahead log.
        rows: Records by kind: those of deliveries by ``reset``, ``step`` and so on, others by their class.
        columns: Bytes by column group of the deliveries (``payload``, ``request``, ``state``), and ``other``.
    """

    segments: tuple[SegmentSize, ...]
    index_bytes: int
    rows: dict[str, int]
    columns: dict[str, int]


def journal_size(directory: Path) -> JournalSize:
    """Return the size of a journal and of its parts; reads all segments. A server may be running.

    Args:
        directory: Directory of the journal; see `errata_server.journal.journal_in`.

    Raises:
        JournalUnavailable: It cannot be read, or is damaged.
    """
    journal = ReadOnlyJournal(directory)
    try:
        segments, rows, columns = Segments(DirectoryDisk(directory)), Counter[str](), Counter[str]()
        found = []
        for number in segments.numbers():
            count, dead, dead_bytes = 0, 0, 0
            for placed, _ in segments.whole(number):
                for place, record in placed:
                    count += 1
                    rows[record.kind if isinstance(record, DeliveryRow) else type(record).__name__] += 1
                    if isinstance(record, OF_AN_EPISODE) and record.eid and journal.episode(record.eid) is None:
                        dead += 1
                        dead_bytes += place.size
                    other = place.size
                    if isinstance(record, DeliveryRow):
                        for name in ("payload", "request", "state"):
                            size = len(getattr(record, name) or b"")
                            columns[name] += size
                            other -= size
                    columns["other"] += other
            found.append(SegmentSize(number, segments.size(number), count, dead, dead_bytes))
        index = sum(file.stat().st_size for file in directory.glob(f"{INDEX}*"))
        return JournalSize(tuple(found), index, dict(sorted(rows.items())), dict(columns))
    finally:
        journal.close()


def journal_problems(directory: Path) -> list[str]:
    """Read a journal whole, each row also by way of its index, and return what is wrong; empty if nothing is.

    A torn end is no problem: the next start cuts it off. A server may be running.

    Args:
        directory: Directory of the journal.

    Raises:
        JournalUnavailable: There is no journal that can be opened.
    """
    journal = ReadOnlyJournal(directory)
    try:
        found = [f"the index: {problem}" for problem in journal.index_problems()]
        seen, last = defaultdict[str, set[int]](set), dict[str, int]()
        for placed, _ in Segments(DirectoryDisk(directory)).after(None):
            for place, record in placed:
                if isinstance(record, DeliveryRow):
                    if hashlib.sha256(record.payload).digest() != record.digest:
                        found.append(f"{_name(record, place)}: its payload does not fit its digest")
                    if record.t is not None and journal.episode(record.eid) is not None:
                        seen[record.eid].add(record.t)  # one that stands there twice is equal to what the index has
                        last[record.eid] = max(record.t, last.get(record.eid, 0))
                        there = journal.delivery(record.eid, record.t)
                        if there != record and journal.episode(record.eid) is not None:
                            found.append(f"{_name(record, place)}: the index has another, or none")
        for eid, count in ((eid, len(ts)) for eid, ts in seen.items()):
            # Not what a running server committed or deleted since its segment was read.
            turns = sum(turn.t <= last[eid] for turn in journal.turns(eid))
            if turns != count and journal.episode(eid) is not None:
                found.append(f"episode {eid}: {count} deliveries in the segments, {turns} in the index")
        return found
    except JournalUnavailable as error:
        return [str(error)]
    finally:
        journal.close()


def _name(row: DeliveryRow, place: Place) -> str:
    return f"delivery t={row.t} of {row.eid} at byte {place.offset} of segment {place.segment}"
