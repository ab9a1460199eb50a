"""`ReadOnlyJournal`: reads a journal whose server may be running."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import apsw

from errata_protocol.errors import JournalUnavailable

from .base import Reads, Record, Settled
from .codec import Deletion
from .delegated import DelegatedReads
from .disk import DirectoryDisk
from .index import INDEX, SCHEMA, connect, position_in
from .indexed_reads import IndexedReads
from .indexed_standing import Standing
from .live import Live
from .segments import Position, Segments, UnknownPosition, all_gone

R = TypeVar("R")


class ReadOnlyJournal(DelegatedReads):
    """Reads the segments and the index as it was when this was opened; what came behind it is kept in memory, and each
    read first adds what was committed before it. Changes no row, starts no thread, makes no file.

    Args:
        directory: Directory of the journal.

    Raises:
        JournalUnavailable: There is no journal of this version, or it cannot be read.
    """

    durable = True
    blocking = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.RLock()
        self._closed = False
        try:
            if not directory.is_dir():
                raise JournalUnavailable(f"cannot read the journal {directory}: there is none; give another --data-dir")
            self._segments, self._live = Segments(DirectoryDisk(directory)), Live()
            self._standing = Standing(self._live, self._rows)
            self._reads = IndexedReads(self._segments, self._standing, self._live, self._rows)
            self._db, self._position = self._snapshot()
            if not self._segments.numbers():
                self._db.close()
                if self._position is not None:
                    raise all_gone(directory)
                raise JournalUnavailable(f"{directory} holds no journal yet: give another --data-dir")
            try:
                self._refresh()
            except UnknownPosition:  # a server that starts now makes the index again, and so do we
                self._db.close()
                self._db, self._position = _nothing()
                self._refresh()
        except (apsw.Error, OSError) as error:
            raise JournalUnavailable(f"cannot read the journal {directory}: {error}; check its permissions") from error

    @property
    def failing(self) -> str | None:
        return "it was opened to be read only"

    def submit(
        self,
        records: Sequence[Record],
        settled: Settled,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        raise self._refusal()

    def delete_episode(self, eid: str, *, unless_forked: bool = False) -> int:
        raise self._refusal()

    def index_problems(self) -> list[str]:
        """Return what SQLite's own check finds wrong with the index."""
        found = [str(row[0]) for row in self._rows("PRAGMA integrity_check")]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    def _rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._db.execute(sql, values).fetchall()
        except apsw.Error as error:
            raise JournalUnavailable(f"cannot read the journal {self._directory}: {error}") from error
        except (UnicodeEncodeError, OverflowError):
            return []

    def _snapshot(self) -> tuple[apsw.Connection, Position | None]:
        """Return a connection that goes on seeing the index as it is now, and up to where it has the segments."""
        path = self._directory / INDEX
        if path.exists():
            try:
                db = connect(path, apsw.SQLITE_OPEN_READONLY)
                try:
                    db.execute("BEGIN")
                    position = position_in(db)
                    if position is not None:
                        return db, position
                except BaseException:
                    db.close()
                    raise
                db.close()
            except (apsw.NotADBError, apsw.CorruptError, apsw.SQLError):
                pass  # it is made again from the segments, here as at the server's next start
        return _nothing()

    def _ask(self, read: Callable[[Reads], R]) -> R:
        with self._lock:  # one thread at a time
            self._refresh()
            return read(self._reads)

    def _refresh(self) -> None:
        """Add what was committed since the last call."""
        with self._lock:
            if self._closed:
                raise JournalUnavailable("the journal is closed")
            live = self._live
            if live.batch.position is None and (rows := self._rows("SELECT next_session, next_episode FROM applied")):
                live.next_session, live.next_episode = rows[0]
            for placed, behind in self._segments.after(self._position):
                self._standing.look_up(record for _, record in placed)
                begin = 0
                for at, (_, record) in enumerate(placed):
                    if isinstance(record, Deletion):
                        live.take(placed[begin:at], behind)
                        live.count(record)
                        begin = at + 1
                        if (episode := live.episodes.get(record.eid)) is not None:
                            live.delete(record.eid, episode.n)
                live.take(placed[begin:], behind)
                self._position = behind

    def _refusal(self) -> JournalUnavailable:
        return JournalUnavailable(f"the journal {self._directory} was opened to be read only")


def is_unused(directory: Path) -> bool:
    """Return whether a journal's directory has never held a row: no server has committed anything to it.

    A journal whose segments are gone is not unused: its index names them.

    Args:
        directory: Directory of the journal.

    Raises:
        JournalUnavailable: It cannot be read.
    """
    try:
        if Segments(DirectoryDisk(directory)).numbers():
            return False
        if not (directory / INDEX).exists():
            return True
        with contextlib.closing(connect(directory / INDEX, apsw.SQLITE_OPEN_READONLY)) as db:
            return position_in(db) is None
    except (apsw.NotADBError, apsw.CorruptError, apsw.SQLError):
        return True  # an index is made from segments, and there are none
    except (apsw.Error, OSError) as error:
        raise JournalUnavailable(f"cannot read the journal {directory}: {error}; check its permissions") from error


def _nothing() -> tuple[apsw.Connection, None]:
    db = apsw.Connection(":memory:")
    db.execute(SCHEMA)
    return db, None
