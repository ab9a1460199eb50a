"""`IndexedJournal`: the durable journal: append-only segments hold the data, SQLite holds an index of them (PROTOCOL
E1).

A group of waiting commits is one frame: encoded, appended and synced by the writer thread, then seen by reads
and answered. The index is updated later, in large batches, and can be rebuilt from the segments; see
`errata_server.journal.index`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import apsw

from errata_os import descriptors
from errata_os.service_threads import ServiceThread
from errata_protocol.errors import ErrataError, JournalUnavailable

from .base import DeliveryRow, EpisodeRow, Reads, Record, RewardRow, Settled
from .codec import Deletion, encode_record
from .delegated import DelegatedReads
from .disk import DirectoryDisk, Disk
from .encoding import encoded
from .index import FAILURES, INDEX, Index, Tally, connect
from .indexed_reads import IndexedReads
from .indexed_standing import Standing
from .leased import NOT_OURS, log_on
from .live import Live
from .readers import Readers
from .segments import SEGMENT_BYTES, Placed, Position, UnknownPosition, all_gone, random_salt
from .writer import GroupWriter, StoreFailed, ThreadWriter, Write

log = logging.getLogger("errata.journal")

R = TypeVar("R")

BATCH_ROWS = 65_536
"""Rows that are worth a batch: of 10,000 episodes each has six, which are one row of the index."""

BATCH_S = 2.0
"""Longest time that a row waits for a batch."""

UNUSED_BATCHES = 15
"""So many times `BATCH_S` apart, what no row came for is forgotten."""

WAITING_ROWS = 4 * BATCH_ROWS
"""Rows that may wait in memory; beyond, commits wait for the index."""

OF_AN_EPISODE = (EpisodeRow, DeliveryRow, RewardRow)
"""Records that go with their episode."""

PROGRESS_S = 5.0
"""How often a long start logs its progress."""


class IndexedJournal(DelegatedReads):
    """Journal in a directory of segments with an index.

    Args:
        directory: Where the index is, and by default the segments; made if missing, for its owner alone.
        fsync: False trades the promise of PROTOCOL E3 under power loss for speed; a process crash still loses nothing.
        disk: Where the segments are, if not in ``directory``.
        writer: Makes the group writer.
        salt: Draws `errata_server.journal.codec.SALT_BYTES` random bytes.
        segment_bytes: A segment that reached this size is followed by another.
        batch_rows: Rows that go to the index together.
        background: Update the index on its own thread; else the commit of the last row of a batch does.
        is_ours: Returns whether the lease of the data directory is valid, without which nothing is acknowledged; None
            where one process alone has the directory.

    Raises:
        JournalUnavailable: The directory cannot be used, or a record that was durable is damaged or gone.
    """

    durable = True
    blocking = True

    def __init__(
        self,
        directory: Path,
        *,
        fsync: bool = True,
        disk: Disk | None = None,
        writer: Callable[[Write], GroupWriter] = ThreadWriter,
        salt: Callable[[], bytes] = random_salt,
        segment_bytes: int = SEGMENT_BYTES,
        batch_rows: int = BATCH_ROWS,
        background: bool = True,
        is_ours: Callable[[], bool] | None = None,
    ) -> None:
        self._path = directory / INDEX
        self._is_ours = is_ours
        self._batch_rows = batch_rows
        self._write_lock = threading.Lock()
        """Held while segments are appended to; taken before `_index_lock`."""
        self._index_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
        self._compact_lock = threading.Lock()
        self._index_failing: str | None = None
        self._is_damaged = False
        self._opened: Index | None = None
        self._deletions: deque[tuple[str, int, Position]] = deque()
        try:
            own = DirectoryDisk(directory)
            self._log = log_on(disk or own, is_ours, salt=salt, segment_bytes=segment_bytes, fsync=fsync)
            try:
                self._open()
            except BaseException:
                self._release()
                raise
        except (apsw.Error, OSError, StoreFailed) as error:
            short = descriptors.trouble(descriptors.FOR_SQLITE)
            raise JournalUnavailable(
                f"cannot open the journal in {directory}: {error}; "
                + (short or "check the directory's permissions and free space, or give another --data-dir")
            ) from error
        self._wake = threading.Condition()
        self._indexer: ServiceThread | None = None
        if background:
            self._indexer = ServiceThread("errata-index", self._run_indexer)
        self._writer = writer(self._write)

    @property
    def _index(self) -> Index:
        if self._opened is None:
            raise JournalUnavailable("the index of the journal could not be opened")
        return self._opened

    def _rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._readers.rows(sql, values)
        except JournalUnavailable as error:
            if isinstance(error.__cause__, apsw.Error) and not isinstance(error.__cause__, FAILURES):
                raise self._damaged(error.__cause__) from error
            raise

    @property
    def failing(self) -> str | None:
        if self._is_ours is not None and not self._is_ours():
            return NOT_OURS
        return self._writer.failing

    @property
    def trouble(self) -> str | None:
        return self._writer.trouble or (self._indexer.trouble if self._indexer is not None else None)

    def watch(self, written: Callable[[int, float], None]) -> None:
        self._writer.written = written

    def submit(
        self,
        records: Sequence[Record],
        settled: Settled,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._writer.submit(records, settled, loop)

    def _ask(self, read: Callable[[Reads], R]) -> R:
        return read(self._reads)

    # -- writing -------------------------------------------------------------------------------------------------

    def _write(self, groups: list[Sequence[Record]]) -> list[ErrataError | None]:
        """Make all groups that can be written durable with one sync, then show them; or raise and show none."""
        try:
            return self._append(groups)
        except JournalUnavailable as error:
            if isinstance(error.__cause__, (*FAILURES, OSError)):  # what was to be looked up first cannot be read now
                raise StoreFailed(error.message) from error
            raise

    def _append(self, groups: list[Sequence[Record]]) -> list[ErrataError | None]:
        with self._write_lock:
            self._check_open()
            if self._live.batch.rows >= WAITING_ROWS:
                self._catch_up()
            self._live.forget_idle()
            self._standing.look_up([record for group in groups for record in group])
            body = encoded(groups, self._standing)
            if body.parts:
                segment, offset = self._log.append(b"".join(body.parts))
                self._live.take(_placed(body.records, body.parts, segment, offset), self._log.position)
        if self._live.batch.rows >= self._batch_rows:
            self._index_soon()
        return body.errors

    def delete_episode(self, eid: str, *, unless_forked: bool = False) -> int:
        self._check_open()
        try:
            self._bring_up()  # most of it while others write
            with self._write_lock:
                self._check_open()
                episode, row = self._standing.episode(eid), self._reads.episode(eid)
                if episode is None or row is None:
                    return 0
                deletion = Deletion(eid, row.sid, self._reads.last_id(row.sid), self._reads.last_seq(row.sid))
                self._catch_up()
                if unless_forked and self._rows("SELECT 1 FROM episodes WHERE origin_eid = ? LIMIT 1", (eid,)):
                    return 0  # nothing waits for the index now, nor can it before this returns
                self._log.append(encode_record(deletion))
                self._delete(eid, episode.n, self._log.position)
                self._log.sync()  # a deletion is durable on return, also where commits are not
        except StoreFailed as error:
            raise JournalUnavailable(f"cannot delete from the journal: {error}") from error
        with contextlib.suppress(StoreFailed):  # the deletion is durable and hidden from reads; the index follows
            self._bring_up()
        return episode.deliveries

    def compact(self, *, garbage: float = 0.5, stop: Callable[[], bool] = lambda: False) -> int:
        """Give the space of deleted episodes back: write full segments anew that are mostly garbage.

        Commits and reads go on meanwhile.

        Args:
            garbage: Share of a segment's bytes from which on it is worth the writing.
            stop: As in `Journal.compact`; asked before each segment.

        Returns:
            Bytes given back.

        Raises:
            JournalUnavailable: The disk or the index cannot be written. What was compacted before stays so.
        """
        with self._compact_lock:
            if stop():
                return 0
            self._check_open()
            try:
                self._bring_up()
                with self._index_lock:
                    tallies, applied = self._index.tallies(), self._index.position()
                full = [t for t in tallies if applied is not None and t.number < applied.segment]
                worth = [t for t in full if t.dead_bytes and t.dead_bytes >= garbage * t.size_bytes]
                return sum(self._compact(t) for t in itertools.takewhile(lambda _: not stop(), worth))
            except StoreFailed as error:
                raise JournalUnavailable(f"cannot compact the journal: {error}") from error
            except OSError as error:
                raise JournalUnavailable(f"cannot compact the journal: {error}; free space or mend the disk") from error

    def _compact(self, tally: Tally) -> int:
        """Rewrite a segment that the index has whole. What is deleted meanwhile stays in it as garbage."""
        placed = [one for records, _ in self._log.whole(tally.number) for one in records]
        eids = {record.eid for _, record in placed if isinstance(record, OF_AN_EPISODE) and record.eid}
        with self._index_lock, self._index_errors():
            self._check_open()  # the journal may be closed meanwhile
            living = self._index.living(eids)
        kept = [
            place
            for place, record in placed
            if not isinstance(record, OF_AN_EPISODE) or not record.eid or record.eid in living
        ]
        back = self._log.rewrite(tally.number, {place.offset for place in kept})
        with self._index_lock, self._index_errors():
            self._check_open()
            self._index.rewritten(tally, len(kept), sum(place.size for place in kept))
        return back

    # -- the index -----------------------------------------------------------------------------------------------

    def _index_soon(self) -> None:
        if self._indexer is None:
            with contextlib.suppress(StoreFailed):  # logged; waiting rows stay in memory, up to a bound
                self._bring_up()
            return
        with self._wake:
            self._wake.notify()

    def _run_indexer(self) -> None:
        for batches in itertools.count(1):
            with self._wake:
                if not self._closed and self._live.batch.rows < self._batch_rows:
                    self._wake.wait(BATCH_S)
                if self._closed:
                    return
            try:
                self._bring_up()
            except StoreFailed:  # logged
                with self._wake:
                    self._wake.wait(BATCH_S)
            if batches % UNUSED_BATCHES == 0:
                with self._write_lock:  # no commit is between its checks and its rows
                    self._live.forget_unused()

    def _catch_up(self) -> None:
        """Apply all that was committed before this call. The caller lets no other commit come between.

        Raises:
            StoreFailed: The index cannot be written.
        """
        self._bring_up()
        self._bring_up()  # a batch may have been leaving already

    def _bring_up(self) -> None:
        """Apply the waiting rows, or the batch that was leaving.

        Raises:
            StoreFailed: The index cannot be written now; what waits stays in memory.
        """
        live = self._live
        with self._index_lock:
            self._log.sync()  # the index never knows of what a power loss could take away
            with self._index_errors():
                while self._deletions:  # they came when nothing waited: what waits now was committed after them
                    eid, n, position = self._deletions[0]
                    self._index.delete(n, position)
                    self._deletions.popleft()
                    del live.deleted[eid]
                batch = live.leave()
                if batch is not None:
                    self._log.sync()  # again: commits may have come since, and are in the batch
                    self._index.apply(batch)
                    live.arrived()
                    self._index.checkpoint()

    def _delete(self, eid: str, n: int, position: Position) -> None:
        """An episode is deleted for reads at once, and in the index with the next batch. Nothing waits but this."""
        self._live.delete(eid, n)
        self._deletions.append((eid, n, position))

    @contextlib.contextmanager
    def _index_errors(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            if self._index_failing is None:
                log.error("the index of the journal cannot be written, it is tried again: %s", error)
            self._index_failing = str(error)
            raise StoreFailed(f"{self._path}: {error}") from error
        except apsw.Error as error:
            raise StoreFailed(str(self._damaged(error))) from error
        if self._index_failing is not None:
            log.warning("the index of the journal is written again")
            self._index_failing = None

    def _damaged(self, error: apsw.Error) -> JournalUnavailable:
        """Remove a damaged index, so that the next start makes it again; return the error to raise."""
        self._is_damaged = True
        log.error("the index of the journal is damaged, the next start makes it again: %s", error)
        _remove(self._path)
        return JournalUnavailable(
            f"the index of the journal, {self._path}, is damaged ({error}): restart the server, which makes it again "
            "from the segments; no delivery is lost"
        )

    # -- opening and closing -------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open index and segments, and bring the index up to where the segments end.

        Raises:
            JournalUnavailable: A record that was durable is damaged.
        """
        try:
            self._start()
        except Exception as error:
            broken = isinstance(error, apsw.Error) and not isinstance(error, FAILURES)
            if not (broken or self._is_damaged or isinstance(error, UnknownPosition)):
                raise
            log.warning("the index of the journal is made again from the segments: %s", error)
            known = self._opened.position() if isinstance(error, UnknownPosition) and self._opened is not None else None
            self._release()
            _remove(self._path)
            self._is_damaged = False
            self._start(known)

    def _release(self) -> None:
        self._readers.close()
        if self._opened is not None:
            self._opened.close()

    def _start(self, known: Position | None = None) -> None:
        self._readers = Readers(lambda: connect(self._path), str(self._path))
        self._live = Live()
        self._standing = Standing(self._live, self._rows)
        self._reads = IndexedReads(self._log, self._standing, self._live, self._rows)
        self._opened = None
        self._opened = Index(self._path)
        self._load(known)

    def _load(self, known: Position | None) -> None:
        live, began, logged = self._live, time.monotonic(), time.monotonic()
        position = self._index.position()
        if position is not None and not self._log.numbers():
            # Nothing of them was torn by a crash: a segment's name is durable before the index knows of it.
            raise all_gone(self._path.parent)
        live.next_session, live.next_episode = self._index.next_numbers()
        rows = 0
        for placed, behind in self._log.replay(position, known):
            self._take_again(placed, behind)
            rows += len(placed)
            if live.batch.rows >= self._batch_rows:
                self._catch_up()
                live.forget_idle()
                if time.monotonic() - logged > PROGRESS_S:
                    logged = time.monotonic()
                    log.info("making the index: %d rows, up to segment %d", rows, behind.segment)
        self._catch_up()
        if rows and time.monotonic() - began > PROGRESS_S:
            log.info("the index has all %d rows now, after %.1f s", rows, time.monotonic() - began)

    def _take_again(self, placed: Sequence[Placed], behind: Position) -> None:
        """Apply one frame of the segments, or a compacted segment, as when it was written."""
        self._standing.look_up(record for _, record in placed)
        begin = 0
        for at, (place, record) in enumerate(placed):
            if isinstance(record, Deletion):
                if at > begin:
                    self._live.take(placed[begin:at], behind._replace(offset=place.offset))
                self._catch_up()
                begin = at + 1
                then = behind if begin == len(placed) else behind._replace(offset=placed[begin][0].offset)
                if (episode := self._live.episodes.get(record.eid)) is not None:
                    self._delete(record.eid, episode.n, then)
                self._live.count(record)
        if begin < len(placed) or not placed:
            self._live.take(placed[begin:], behind)

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            with ExitStack() as rest:  # each runs, whatever happens to the others
                rest.callback(self._close_index)
                rest.callback(self._readers.close)
                self._writer.close()

    def _close_index(self) -> None:
        with self._write_lock:
            self._closed = True
        with self._wake:
            self._wake.notify()
        if self._indexer is not None:
            self._indexer.join()
        try:
            self._catch_up()
        except StoreFailed as failure:
            log.warning("the index was not brought up before the end; the next start does it: %s", failure)
        with self._index_lock:
            if self._opened is not None:
                self._opened.close()

    def _check_open(self) -> None:
        if self._closed:
            raise JournalUnavailable("the journal is closed: the server is shutting down")


def _placed(
    records: Iterable[Record], parts: Iterable[bytes], segment: int, offset: int
) -> Iterator[tuple[tuple[int, int, int], Record]]:
    for record, part in zip(records, parts, strict=True):
        size = len(part)
        yield (segment, offset, size), record
        offset += size


def _remove(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
