"""`Store`: asynchronous access to the journal: commits, reads and deletions that do not block the event loop, checks of
an episode's owner, and of free disk space."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import CallerError, ErrataError, JournalUnavailable, UnknownEpisode
from errata_protocol.fleet import FleetMember
from errata_protocol.shards import check_shard

from ..journal.base import (
    DeliveryRow,
    EpisodeRow,
    EpisodeStats,
    Journal,
    JournalDamaged,
    Reads,
    Record,
    RewardRow,
    SessionRow,
    Settled,
    TurnRow,
    durable,
)
from ..journal.disk import Disk
from ..journal.leased import NOT_OURS
from ..journal.registry import DIRECTORY
from .changes import Changes
from .data_watch import DataWatch
from .ownership import ForkParent, delivery_error, find_delivery, find_episode, find_parent, opens

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger("errata.journal")

READER_THREADS = 4
POLL_S = 0.1
"""How often a request that waits for the journal checks it again, seconds."""


class SessionKey(NamedTuple):
    """What a client names to continue a multiplexed session, and where it has to belong.

    Args:
        sid: As journaled.
        key_hash: Hash of the client's key.
        principal: Who asks.
        environment: The environment whose door was asked.
    """

    sid: str
    key_hash: bytes
    principal: str | None
    environment: str


class StoredSession(NamedTuple):
    """What the journal holds of a session: its row, newest delivery, highest request id and highest push number."""

    row: SessionRow
    last: DeliveryRow | None
    last_id: int
    last_seq: int


def _awaited(read: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], Awaitable[R]]:
    """Return a method of a store that has the arguments of a journal's read and awaits its answer."""
    name = read.__name__

    @functools.wraps(read, updated=())  # not the mark of an abstract method
    def awaited(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        found: Callable[P, R] = getattr(self.journal, name)
        return self._read(found, *args, **kwargs)

    return awaited


class Store:
    """The server's one way to its journal: commits, reads and deletions that do not block the event loop.

    A read runs on a thread of this store's pool where the journal may block, and inline where it cannot. Each method is
    one trip to the pool, also where it makes several reads. The methods named as those of
    `errata_server.journal.Journal` return and raise the same.

    Args:
        data_dir: Where the journal lies, for the text of errors; None for one in memory.
        floor_bytes: Free space below which nothing new is run; at most 5 % of the file system.
        wait_s: How long `wait_until_writable` waits.
        changes: Where commits and deletions are noted for those who follow them.
        shard: Name of the data directory, None where it has none.
        is_ours: Returns whether the lease of the data directory is valid; None without a lease.
        deleting: Returns, for as long as it is entered, whether an episode has a fork at another worker; see
            `errata_server.runtime.fleet.EpisodesElsewhere`. None where there are no others.
        member: Returns the member that has a shard, as `errata_protocol.shards.check_shard` takes it.

    Attributes:
        journal: The journal itself; closed by `errata_server.runtime.runtime.Runtime`.
    """

    journal: Journal

    def __init__(
        self,
        data_dir: Path | None,
        *,
        floor_bytes: int,
        wait_s: float,
        changes: Changes | None = None,
        shard: str | None = None,
        is_ours: Callable[[], bool] | None = None,
        deleting: Callable[[str], AbstractAsyncContextManager[bool]] | None = None,
        member: Callable[[str], FleetMember | None] | None = None,
    ) -> None:
        self._is_ours = is_ours
        self._deleting = deleting
        self._member = member
        self._data_dir = data_dir
        self.shard = shard
        self.changes = changes or Changes()
        self._floor_bytes = floor_bytes
        self._wait_s = wait_s
        self._disk: Disk | None = None
        self._short = False
        self._short_lock = threading.Lock()
        self._watch: DataWatch | None = None
        self.journal_bytes = 0
        self.damaged_reads = 0

    def open(self, journal: Journal, disk: Disk | None) -> None:
        """Use ``journal``, and watch the free space of ``disk``; may be called again after `close`."""
        self.journal = journal
        self._disk = disk
        self.changes.begin()
        if self._data_dir is not None:
            watched = [self._data_dir, self._data_dir / DIRECTORY]
            self._watch = DataWatch([path for path in watched if path.is_dir()], self.trouble)
        self._readers = ThreadPoolExecutor(max_workers=READER_THREADS, thread_name_prefix="errata-read")
        # Compactions run one at a time, for minutes: on the threads of the reads they would hold reads up.
        self._compactor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="errata-compact")
        self._stop_compaction = threading.Event()

    def stop_compaction(self) -> None:
        """Let compactions end after the segment that they write; the server is about to stop."""
        self._stop_compaction.set()

    def close(self) -> None:
        """Wait for what runs and end the threads; the journal stays open for the last commits."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self.stop_compaction()
        self._readers.shutdown()
        self._compactor.shutdown()

    def trouble(self) -> str | None:
        """Return why a commit could not be made durable now; None when it could."""
        failing = self.journal.failing
        if failing is not None and self._data_dir is not None:  # the log names the path; callers need not know it
            failing = failing.replace(str(self._data_dir), "the data directory")
        if failing is not None or self._disk is None:
            return failing
        short = self._disk_trouble(self._disk)
        if (short is not None) != self._short:
            self._log_change(short)
        return short

    @property
    def watch_trouble(self) -> str | None:
        """Why the data directory is not watched; None while it is, or without one."""
        return self._watch.trouble if self._watch is not None else None

    def _log_change(self, short: str | None) -> None:
        """Log a change, once: requests and the watch may see it at the same time."""
        with self._short_lock:
            if (short is not None) == self._short:
                return
            self._short = short is not None
        if short is not None:
            log.error("nothing new is run: %s (%s)", short, self._data_dir or "memory")
        else:
            log.warning("requests run again: the data directory can be written")

    def _disk_trouble(self, disk: Disk) -> str | None:
        place = "the data directory" if self._data_dir is not None else "the disk"
        if self._watch is not None and (missing := self._watch.missing) is not None:
            part = place if missing == self._data_dir else f"{missing.name} in {place}"
            return f"{part} is gone: it was removed or unmounted while the server ran"
        try:
            free, total = disk.free()
        except FileNotFoundError:
            return f"{place} is gone: it was removed or unmounted while the server ran"
        except OSError as error:
            return f"{place}: {error.strerror}"
        floor = min(self._floor_bytes, total // 20)
        if free < floor:
            return f"{place} has {free // 1024} KiB free, {floor // 1024} KiB are kept for the journal"
        return None

    async def wait_until_writable(self) -> None:
        """Wait until a commit could be made durable; called before a request runs (PROTOCOL E4).

        Raises:
            JournalUnavailable: No commit could be made durable for ``wait_s``.
        """
        waited = 0.0
        while (trouble := self.trouble()) is not None:
            if waited >= self._wait_s:
                raise JournalUnavailable(
                    f"the journal cannot be written and nothing was run: {trouble}; free space or mend the disk, "
                    "then send the request again",
                    retry_after=5.0,
                )
            await asyncio.sleep(POLL_S)
            waited += POLL_S

    async def measure(self) -> None:
        """Look how large the journal's files are, for `journal_bytes`. The number of segments grows with the journal.

        Raises:
            JournalUnavailable: The store is closed.
        """
        if self._data_dir is not None:
            self.journal_bytes = await self._read(_size, self._data_dir / DIRECTORY)

    def free_bytes(self) -> float:
        """Return how much a commit may still write to the disk, in bytes; NaN where that is not known."""
        try:
            return self._disk.free()[0] if self._disk is not None else math.nan
        except OSError:
            return math.nan

    async def _read(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return ``function(*args, **kwargs)``, called on a reader thread where the journal may block."""
        return await self._on(self._readers, lambda: function(*args, **kwargs))

    async def _on(self, pool: ThreadPoolExecutor, function: Callable[[], R]) -> R:
        """Return ``function()``, called on a thread of ``pool`` where the journal may block.

        Raises:
            JournalUnavailable: The store is closed, or the machine has no thread left.
        """
        return await self._on_thread(pool, function) if self.journal.blocking else function()

    async def _on_thread(self, pool: ThreadPoolExecutor, function: Callable[[], R]) -> R:
        try:
            future = asyncio.get_running_loop().run_in_executor(pool, function)
        except RuntimeError as error:
            raise JournalUnavailable(f"the journal cannot be read now: {error}", retry_after=1.0) from error
        try:
            return await future
        except JournalDamaged as error:  # found only now: nobody but this reader would know
            self.damaged_reads += 1
            log.error("a read found damage; `errata journal verify` looks for all of it: %s", error.message)
            raise

    def read(self, function: Callable[[Journal], R]) -> Awaitable[R]:
        """Return ``function(journal)``: one trip to the pool for all that it reads."""
        return self._read(function, self.journal)

    async def scan(self, function: Callable[[Journal], R]) -> R:
        """Return ``function(journal)``, called on a reader thread whatever the journal is: it goes through as many
        episodes or turns as there are."""
        return await self._on_thread(self._readers, lambda: function(self.journal))

    # -- commits ------------------------------------------------------------------------------------------------------

    def commit(self, *records: Record) -> Awaitable[None]:
        """Make records durable together; see `Journal.commit`."""
        return durable(self.submit, records)

    def submit(
        self,
        records: Sequence[Record],
        settled: Settled,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Make records durable together and call ``settled`` then; see `Journal.submit`."""
        self.journal.submit(records, functools.partial(self._settled, settled), loop)

    def _settled(self, settled: Settled, records: Sequence[Record], error: ErrataError | None) -> None:
        settled(records, error)
        if error is None and self.changes.active:
            self.changes.note(records)

    # -- reads for the owner of an episode: check and rows in one trip ------------------------------------------------

    def check_shard(self, *ids: str) -> None:
        """Refuse ids that name another data directory; each door calls it before it looks an id up (PROTOCOL F5).

        Args:
            ids: Session ids, sids and eids of the request.

        Raises:
            Misdirected: One of them names another.
            SessionLost, UnknownEpisode: One of them names another, which is lost with what it had.
            JournalUnavailable: Another server may have the data directory now; see `check_ours`.
        """
        check_shard(self.shard, *ids, member=self._member)
        if self._is_ours is not None:
            self.check_ours()

    def check_ours(self) -> None:
        """Refuse to say where a session or an episode stands while the lease of the data directory is not valid.

        Another server may have the directory then, and its sessions may have gone on there. A client that has a later
        delivery than the one it is answered with would take its session for lost.

        Raises:
            JournalUnavailable: It is not valid.
        """
        if self._is_ours is not None and not self._is_ours():
            raise JournalUnavailable(f"{NOT_OURS}; send the request again", retry_after=1.0)

    def opens(self, eid: str, key: str, sid: str | None) -> Awaitable[bool]:
        """Return whether ``key`` is the read key of an episode's session, or ``sid`` that session; see
        `errata_server.runtime.ownership.opens`."""
        return self._read(opens, self.journal, eid, key, sid)

    def owned_episode(self, eid: str, principal: str | None) -> Awaitable[EpisodeRow]:
        """Return an episode of ``principal``.

        Raises:
            UnknownEpisode: There is no such episode, or it belongs to somebody else (PROTOCOL F2).
        """
        return self._read(find_episode, self.journal, eid, principal)

    def owned_delivery(self, eid: str, t: int, principal: str | None) -> Awaitable[DeliveryRow]:
        """Return delivery ``t`` of an episode of ``principal``.

        Raises:
            UnknownEpisode: See `owned_episode`.
            NoReset: ``t`` is 0 and the episode began without a reset.
            StateOutOfRange: The episode has no delivery ``t``.
        """
        return self._read(find_delivery, self.journal, eid, t, principal)

    def owned_parent(self, eid: str, t: int, principal: str | None) -> Awaitable[ForkParent]:
        """Return delivery ``t`` of an episode of ``principal`` as the parent of a fork; raises as `owned_delivery`."""
        return self._read(find_parent, self.journal, eid, t, principal)

    def owned_turns(
        self, eid: str, principal: str | None, attached: Callable[[], frozenset[str] | None] = lambda: None
    ) -> Awaitable[tuple[EpisodeStats, list[TurnRow]]]:
        """Return an episode of ``principal`` as lists show it, and its deliveries: semantic digests, no payloads.

        Args:
            eid: Episode.
            principal: Owner of the episode.
            attached: Returns the ids of the sessions that have a connection, on any thread; see
                `errata_server.journal.base.listed_status`.

        Raises:
            UnknownEpisode: See `owned_episode`.
        """

        def find() -> tuple[EpisodeStats, list[TurnRow]]:
            find_episode(self.journal, eid, principal)
            stats, turns = self.journal.episode_stats(eid, attached()), self.journal.turns(eid, semantic=True)
            if stats is None:  # deleted since
                raise UnknownEpisode(eid)
            return stats, turns

        return self._read(find)

    def owned_rewards(self, eid: str, principal: str | None) -> Awaitable[list[RewardRow]]:
        """Return the late rewards of an episode of ``principal``.

        Raises:
            UnknownEpisode: See `owned_episode`.
        """

        def find() -> list[RewardRow]:
            find_episode(self.journal, eid, principal)
            return self.journal.rewards(eid)

        return self._read(find)

    def owned_session(self, eid: str, principal: str | None) -> Awaitable[SessionRow | None]:
        """Return the session that an episode of ``principal`` belongs to; None where it was deleted meanwhile.

        Raises:
            UnknownEpisode: See `owned_episode`.
        """

        def find() -> SessionRow | None:
            return self.journal.session(find_episode(self.journal, eid, principal).sid)

        return self._read(find)

    def delivery_error(self, eid: str, t: int) -> Awaitable[CallerError]:
        """Return the error for an existing episode that has no delivery ``t``."""
        return self._read(delivery_error, self.journal, eid, t)

    def keyed_sessions(self, keys: Sequence[SessionKey]) -> Awaitable[list[StoredSession | None]]:
        """Return the session of each key; None where there is none, or where the key or its owner is another's.

        The error is the same for both, and so is the time: as much is read for one as for the other (PROTOCOL D7).
        """
        return self._read(lambda: [self._keyed_session(key) for key in keys])

    def _keyed_session(self, key: SessionKey) -> StoredSession | None:
        journal, sid = self.journal, key.sid
        row = journal.session(sid)
        owned = row is not None and row.principal == key.principal and row.environment == key.environment
        kept = row.key_hash if row is not None and owned and row.key_hash is not None else bytes(32)
        if not hmac.compare_digest(kept, key.key_hash) or row is None:
            return None
        return StoredSession(row, journal.last_delivery(sid), journal.last_id(sid), journal.last_seq(sid))

    # -- reads: each as `Journal` declares it, awaited -----------------------------------------------------------------

    delivery = _awaited(Reads.delivery)
    recorded = _awaited(Reads.recorded)
    last_delivery = _awaited(Reads.last_delivery)
    replies = _awaited(Reads.replies)
    rewards = _awaited(Reads.rewards)
    pushes = _awaited(Reads.pushes)
    last_seq = _awaited(Reads.last_seq)
    episode = _awaited(Reads.episode)
    first_episode = _awaited(Reads.first_episode)
    session_episodes = _awaited(Reads.session_episodes)
    turns = _awaited(Reads.turns)
    held = _awaited(Reads.held)
    session = _awaited(Reads.session)
    open_sessions = _awaited(Reads.open_sessions)
    fork_session = _awaited(Reads.fork_session)

    def refs(self) -> set[SnapshotRef]:
        """Return every ref that a committed row names; may block, and is called by a sandbox backend as it collects."""
        return self.journal.refs()

    # -- deletions: on a reader thread, because they wait for the disk; compactions on one of their own ---------------

    async def delete_episode(self, eid: str, *, unless_forked: bool = False) -> int:
        """Delete an episode; return how many deliveries it had.

        Args:
            eid: The episode.
            unless_forked: Whether nothing is deleted where the episode has a fork, at another worker too.

        Raises:
            JournalUnavailable: The journal cannot be written, or a worker that may have a fork does not answer.
        """
        if not unless_forked or self._deleting is None:
            return await self._delete(eid, unless_forked)
        async with self._deleting(eid) as forked_elsewhere:
            return 0 if forked_elsewhere else await self._delete(eid, unless_forked)

    def _delete(self, eid: str, unless_forked: bool) -> Awaitable[int]:
        def delete() -> int:
            row = self.journal.episode(eid)
            count = self.journal.delete_episode(eid, unless_forked=unless_forked)
            if row is not None and self.journal.episode(eid) is None:
                self.changes.deleted(row)
            return count

        return self._read(delete)

    def compact(self) -> Awaitable[int]:
        """Give the space of deleted episodes back, after the compactions that were asked for earlier; return how many
        bytes. `stop_compaction` ends it early."""
        stop = self._stop_compaction.is_set
        return self._on(self._compactor, lambda: self.journal.compact(stop=stop))


def _size(directory: Path) -> int:
    """Return how large the files of a directory are together, in bytes; 0 without it."""
    total = 0
    for file in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # compaction has removed the segment meanwhile
            total += file.stat().st_size
    return total
