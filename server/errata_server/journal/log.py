"""`LogJournal`: segments on a `Disk`, all rows in memory; the simulation uses it to test segments without SQLite.

It writes and reads segments as `errata_server.journal.indexed.IndexedJournal` does, with the same code; what differs is
where rows are found: here in memory, all of them, so that every byte goes through a `Disk`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from errata_protocol.errors import ErrataError, JournalUnavailable

from .base import Record, Settled
from .codec import Deletion, Moved, encode_record
from .disk import Disk
from .encoding import encoded
from .leased import NOT_OURS, log_on
from .segments import SEGMENT_BYTES, random_salt
from .tables import Tables, all_are_repeated
from .writer import GroupWriter, StoreFailed, ThreadWriter, Write


class LogJournal(Tables):
    """Journal of append-only segments.

    Args:
        disk: Where; see `errata_server.journal.segments.Segments`.
        writer: Makes the group writer.
        salt: Draws `errata_server.journal.codec.SALT_BYTES` random bytes.
        segment_bytes: A segment that reached this size is followed by another.
        repeats_requests: As in `errata_server.journal.tables.Tables`.
        is_ours: Function that says whether the lease of the directory is valid; None without a lease.

    Raises:
        JournalUnavailable: The disk cannot be read or written, or a record that was durable is damaged.
    """

    durable = True

    def __init__(
        self,
        disk: Disk,
        *,
        writer: Callable[[Write], GroupWriter] = ThreadWriter,
        salt: Callable[[], bytes] = random_salt,
        segment_bytes: int = SEGMENT_BYTES,
        repeats_requests: Callable[[str], bool] = all_are_repeated,
        is_ours: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(repeats_requests)
        self._is_ours = is_ours
        self._log = log_on(disk, is_ours, salt=salt, segment_bytes=segment_bytes)
        self._closed = False
        try:
            self._read_all()
        except OSError as error:
            raise JournalUnavailable(f"cannot open the journal: {error}; mend the disk") from error
        self._writer = writer(self._write)

    @property
    def failing(self) -> str | None:
        if self._is_ours is not None and not self._is_ours():
            return NOT_OURS
        return self._writer.failing

    @property
    def trouble(self) -> str | None:
        return self._writer.trouble

    def watch(self, written: Callable[[int, float], None]) -> None:
        self._writer.written = written

    def submit(
        self,
        records: Sequence[Record],
        settled: Settled,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._writer.submit(records, settled, loop)

    def delete_episode(self, eid: str, *, unless_forked: bool = False) -> int:
        with self._lock:
            if self._closed:
                raise JournalUnavailable("the journal is closed: the server is shutting down")
            if unless_forked and self._children[eid]:
                return 0
            if eid in self._episodes:
                try:
                    self._log.append(encode_record(self._deletion(eid)))
                except StoreFailed as error:
                    raise JournalUnavailable(f"cannot delete from the journal: {error}") from error
            return self._delete(eid)

    def close(self) -> None:
        self._writer.close()
        with self._lock:
            self._closed = True

    def _write(self, groups: list[Sequence[Record]]) -> list[ErrataError | None]:
        """Make all groups that can be written durable with one sync, then show them; or raise and show none."""
        with self._lock:
            if self._closed:
                raise JournalUnavailable("the journal is closed: the server is shutting down")
            body = encoded(groups, self)
            if body.parts:
                self._log.append(b"".join(body.parts))
            for record in body.records:
                self._apply(record)
            return body.errors

    def _read_all(self) -> None:
        for placed, _ in self._log.replay(None):
            for _, record in placed:
                if isinstance(record, Deletion):
                    self._delete(record.eid)
                    self._count(record)
                elif not isinstance(record, Moved):
                    self._apply(record)
