"""SQLite connections for reading, one per thread, that can be closed while threads read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import apsw

from errata_os import descriptors
from errata_protocol.errors import JournalUnavailable

from .base import JournalDamaged


@dataclass(slots=True)
class _Reader:
    db: apsw.Connection
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by its thread during a read and by `Readers.close`, so it is never contended."""


class Readers:
    """Runs queries on a connection of the calling thread.

    Args:
        connect: Opens a connection.
        path: The database, for messages.
    """

    def __init__(self, connect: Callable[[], apsw.Connection], path: str) -> None:
        self._connect = connect
        self._path = path
        self._local = threading.local()
        self._readers: list[_Reader] = []
        self._readers_lock = threading.Lock()
        self._closed = False

    def rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query; none where a value is one that SQLite cannot hold, and so no row can have.

        Raises:
            JournalUnavailable: The database cannot be read, is damaged, or was closed.
        """
        try:
            try:
                return self._read(sql, values)
            except apsw.CantOpenError as error:
                if short := descriptors.trouble(descriptors.FOR_SQLITE):
                    raise JournalUnavailable(f"{self._unread(error)}; {short}", retry_after=1.0) from error
                return self._read(sql, values)  # SQLite gives no reason: there may have been too few a moment ago
        except apsw.Error as error:
            raise JournalUnavailable(self._unread(error)) from error
        except UnicodeDecodeError as error:  # SQLite has no checksums, and returns a text with a flipped bit
            raise JournalDamaged(
                f"the index of the journal is damaged ({error}): stop the server and remove {self._path}, it is made "
                "again from the segments; no delivery is lost"
            ) from error
        except (UnicodeEncodeError, OverflowError):
            return []

    def close(self) -> None:
        """Let the reads that run end, refuse all later ones, and close every connection. Idempotent."""
        with self._readers_lock, ExitStack() as closing:
            self._closed = True
            while self._readers:
                closing.callback(_close, self._readers.pop())

    def _read(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        reader = self._reader()
        with reader.lock:
            self._check_open()
            return reader.db.execute(sql, values).fetchall()

    def _unread(self, error: apsw.Error) -> str:
        return f"cannot read the journal {self._path}: {error}"

    def _reader(self) -> _Reader:
        reader: _Reader | None = getattr(self._local, "reader", None)
        if reader is None:
            with self._readers_lock:
                self._check_open()
                reader = self._local.reader = _Reader(self._connect())
                self._readers.append(reader)
        return reader

    def _check_open(self) -> None:
        if self._closed:
            raise JournalUnavailable("the journal is closed: the server is shutting down")


def _close(reader: _Reader) -> None:
    with reader.lock:
        reader.db.close()
