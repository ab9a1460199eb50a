"""Errata with SQLite in place of its segments: ``python -m errata_bench.sqlite_journal STORE TARGET --sessions N ...``.

The alternatives that docs/decisions/130 measures, with all that made the index cheap: WAL, ``synchronous=FULL``,
integer keys, one row for the rows of a group commit, runs of deliveries in one row.

- ``frames``: a table of group commits is the truth, the index follows in batches as behind the segments.
- ``rows``: one database, in which the index is part of each commit's transaction.
- ``segments``: what Errata ships, started in the same way.

They have what a benchmark needs: no compaction, no salvage.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from errata_server.journal import indexed
from errata_server.journal.codec import LogRecord, decode_record, decode_records
from errata_server.journal.index import INDEX, Index, connect
from errata_server.journal.segments import Place, Placed, Position
from errata_server.runtime import runtime
from errata_server.serve import server
from errata_server.settings import Settings

SALT = b"sqlite.."
FRAME_BITS = 32
"""The place of a record is the number of its frame above so many bits, and its offset in the frame below."""

TABLE = "CREATE TABLE IF NOT EXISTS frames(n INTEGER PRIMARY KEY, body BLOB NOT NULL)"


class FrameTable:
    """A table of group commits with the methods of `errata_server.journal.segments.SegmentLog` that a journal calls.

    Args:
        path: The database.
        is_alone: It commits each frame itself; else the index takes `pending` into its transaction.
    """

    def __init__(self, path: Path, *, is_alone: bool) -> None:
        self._is_alone = is_alone
        self.pending: list[tuple[int, bytes]] = []
        path.touch(mode=0o600)
        self._db = connect(path)
        self._db.pragma("journal_mode", "wal")
        self._db.pragma("synchronous", 2)
        if is_alone:
            self._db.pragma("wal_autocheckpoint", 1000)
            self._db.execute(TABLE)
        self._reading = connect(path)
        self._lock = threading.Lock()
        self._n = 0

    @property
    def position(self) -> Position:
        return Position(1, self._n, SALT)

    def append(self, body: bytes) -> tuple[int, int]:
        self._n += 1
        if self._is_alone:
            self._db.execute("INSERT INTO frames VALUES (?, ?)", (self._n, body))
        else:
            self.pending.append((self._n, body))
        return 1, self._n << FRAME_BITS

    def sync(self) -> None:
        """Nothing waits: each transaction is synced."""

    def numbers(self) -> list[int]:
        return [1]

    def read(self, place: Place) -> LogRecord:
        at = (place.offset & (1 << FRAME_BITS) - 1) + 1
        sql = "SELECT substr(body, ?, ?) FROM frames WHERE n = ?"
        with self._lock:
            rows: Any = self._reading.execute(sql, (at, place.size, place.offset >> FRAME_BITS)).fetchall()
        return decode_record(rows[0][0])[0]

    def replay(self, position: Position | None) -> Iterator[tuple[list[Placed], Position]]:
        rows: Any = self._reading.execute(
            "SELECT n, body FROM frames WHERE n > ? ORDER BY n", (position.offset if position else 0,)
        ).fetchall()
        for n, body in rows:
            self._n = n
            placed = [(Place(1, (n << FRAME_BITS) + at, size), record) for at, size, record in decode_records(body)]
            yield placed, self.position


class RowIndex(Index):
    """The index with the frames in it, both in one transaction."""

    frames: FrameTable

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._db.pragma("synchronous", 2)
        self._db.execute(TABLE)

    def _applied(self, position: Position, next_session: int, next_episode: int) -> None:
        pending, self.frames.pending = self.frames.pending, []
        self._insert("frames", pending)
        super()._applied(position, next_session, next_episode)


def journal_of(store: str) -> Callable[..., indexed.IndexedJournal]:
    """Return what makes the journal of a store; it takes the directory, as `IndexedJournal` does."""

    def made(directory: Path, **_: Any) -> indexed.IndexedJournal:
        if store == "segments":
            return indexed.IndexedJournal(directory)
        real = indexed.SegmentLog, indexed.Index
        directory.mkdir(parents=True, exist_ok=True)
        is_alone = store == "frames"
        frames = FrameTable(directory / ("frames.db" if is_alone else INDEX), is_alone=is_alone)
        RowIndex.frames = frames
        indexed.SegmentLog = lambda *_, **__: frames  # type: ignore[assignment, misc]
        indexed.Index = Index if is_alone else RowIndex  # type: ignore[misc]
        try:
            return indexed.IndexedJournal(directory, **({} if is_alone else {"batch_rows": 1, "background": False}))
        finally:
            indexed.SegmentLog, indexed.Index = real  # type: ignore[misc]

    return made


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", choices=("segments", "frames", "rows"))
    parser.add_argument("target")
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    options = parser.parse_args()
    runtime.IndexedJournal = journal_of(options.store)  # type: ignore[assignment, misc]
    bind = server.Bind(port=0)
    settings = Settings(data_dir=options.data_dir)
    served = server.build([options.target], settings, bind=bind, mode=None, max_sessions=options.sessions)
    server.run(served, bind)


if __name__ == "__main__":
    main()
