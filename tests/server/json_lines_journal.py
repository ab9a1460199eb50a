"""A journal store as another distribution has it, as small as one can be: a line of JSON a commit, rows in memory.

[errata.journal_stores]
json_lines = "tests.server.json_lines_journal:JsonLinesType"
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from errata_protocol.errors import EnvironmentOutputInvalid, ErrataError, JournalUnavailable
from errata_server.journal import DeliveryRow, EpisodeRow, Journal, JournalConfig, JournalType, Reads, RewardRow
from errata_server.journal.base import Record, SessionChange, SessionRow, Settled
from errata_server.journal.claims import check
from errata_server.journal.delegated import DelegatedReads
from errata_server.journal.tables import Tables

R = TypeVar("R")

FILE = "commits.jsonl"
KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (SessionRow, EpisodeRow, DeliveryRow, SessionChange, RewardRow)
}


class JsonLinesJournal(Tables):
    """Appends a line for each commit and syncs it.

    Args:
        directory: Where the file is.
        fsync: Whether commits are synced.
    """

    durable = True

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        super().__init__()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fsync = fsync
        self._file = (directory / FILE).open("a+b")
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(whole))  # a line that was not written whole was not answered
        apply_lines(self, whole)

    @property
    def failing(self) -> str | None:
        return None

    def submit(
        self, records: Sequence[Record], settled: Settled, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        with self._lock:
            self._demand_open()
            try:
                check(records, self, set())
                line = msgspec.json.encode([[type(record).__name__, record] for record in records])
            except ErrataError as error:
                settled(records, error)
                return
            except UnicodeEncodeError as error:
                settled(records, EnvironmentOutputInvalid(f"a text has no form in UTF-8: {error.reason}"))
                return
            self._append(line)
            for record in records:
                self._apply(record)
        settled(records, None)

    def delete_episode(self, eid: str, *, unless_forked: bool = False) -> int:
        with self._lock:
            self._demand_open()
            if unless_forked and self._children[eid]:
                return 0
            if self.has_episode(eid):
                self._append(msgspec.json.encode([["deleted", eid]]))
            return self._delete(eid)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _append(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())

    def _demand_open(self) -> None:
        if self._file.closed:
            raise JournalUnavailable("the journal is closed")


class _Rows(JsonLinesJournal):
    """What a file holds now, and no file."""

    def __init__(self, content: bytes) -> None:
        Tables.__init__(self)
        apply_lines(self, content[: content.rfind(b"\n") + 1])


class JsonLinesReader(DelegatedReads):
    """Reads the file anew for each question."""

    durable = True
    blocking = True

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        if not self._path.is_file():
            raise JournalUnavailable(f"{directory} holds no journal")

    @property
    def failing(self) -> str | None:
        return "it was opened to be read only"

    def submit(
        self, records: Sequence[Record], settled: Settled, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        raise JournalUnavailable("the journal was opened to be read only")

    def delete_episode(self, eid: str, *, unless_forked: bool = False) -> int:
        raise JournalUnavailable("the journal was opened to be read only")

    def close(self) -> None:
        pass

    def _ask(self, read: Callable[[Reads], R]) -> R:
        return read(_Rows(self._path.read_bytes()))


class JsonLinesType(JournalType):
    """The store that the entry point names."""

    def open(self, config: JournalConfig) -> Journal:
        return JsonLinesJournal(config.directory, fsync=config.fsync)

    def open_read_only(self, directory: Path) -> Journal:
        return JsonLinesReader(directory)


def apply_lines(tables: Tables, content: bytes) -> None:
    """Add what the lines of a file say to the rows in memory."""
    for line in content.splitlines():
        for kind, row in msgspec.json.decode(line):
            if kind == "deleted":
                tables._delete(row)
            else:
                tables._apply(msgspec.convert(row, KINDS[kind], builtin_types=()))
