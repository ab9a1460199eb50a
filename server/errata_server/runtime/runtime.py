"""`Runtime`: the objects that all environments of one data directory share, opened and closed together."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from errata_os import descriptors
from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import InvalidRequest, JournalUnavailable
from errata_protocol.fleet import FleetMember

from ..clock import Clock
from ..concurrency.fair_lock import FairLock
from ..concurrency.os_threads import OsThreads
from ..concurrency.threads import Threads
from ..ids import Ids
from ..journal import DirectoryDisk, Disk, Journal
from ..journal import registry as journal_registry
from ..sandbox import registry as sandbox_registry
from ..sandbox.base import Backend, CollectReport
from ..settings import Settings
from .attached import Attached
from .capacity import PrincipalQuotas
from .changes import Changes
from .data_lock import EPOCHS, lock, resolved
from .fleet import Fleet
from .hash_seed import HashSeeds
from .lease import Lease
from .lease_watch import LeaseWatch
from .listed_members import ListedMembers
from .live_sessions import LiveSessions
from .loop_lag import LoopLag
from .members import MemberWatch
from .metrics import Metrics
from .pages import Pages
from .readiness import Readiness
from .retention_clock import RetentionClock
from .rewards import Rewards
from .sandboxes import Sandboxes
from .shard_name import shard_name
from .shutdown import Shutdown
from .startup import open_journal, recover
from .store import Store

log = logging.getLogger("errata.server")


class Registry(Protocol):
    """Keeps runtimes of one process apart; see `errata_server.runtime.registry.RuntimeRegistry`."""

    def claim(self, directory: Path, runtime: Runtime) -> None:
        """Enter a runtime that opens its data directory."""

    def release(self, directory: Path, runtime: Runtime) -> None:
        """Remove a runtime that is closed, or could not be opened."""


class Runtime:
    """Shared objects of one server process and data directory, and when they are opened and closed.

    Nothing here needs an ASGI lifespan or belongs to an event loop: the first caller of `start` does its work.

    Args:
        settings: How to keep sessions.
        journal: Another journal than the one the settings name; closed with the runtime, which then stays closed.
        disk: Where free space is watched; by default the data directory.
        sandboxes: Another backend than the one the settings name.
        ids: Source of ids.
        clock: Source of times.
        threads: Where blocking code of environments runs.
        registry: Where this runtime is entered while it is open.
        fleet: The other workers, where several processes are behind one address; None for one process.

    Attributes:
        fleet: See above.
        pages: The sessions of OpenEnv's web interface.
        members: The members of the server, of which this process is one.
        drains: Whether this server of one process is to end once its sessions have (``errata fleet drain --server``).
        listed: The members that the settings name a list of; None where they name none.
        store: Access to the journal.
        attached: The sessions that have a connection now.
        rewards: Late rewards.
        live_sessions: The sessions of all environments.
        specs: What the environments that are served publish, by name; one that publishes nothing is not there.
        lease: The lease of the data directory; None where one process alone has it.
        lease_lost: Called on a thread with the reason, again and again, once another server has the data directory.
        sandbox: The sandbox backend and its layers.
        lag: How late the event loop of the application is.
        readiness: Whether the server can be given new work.
        shutdown: What happens before connections are closed.
        retention_clock: When old episodes are deleted next.
        quotas: Limits of each principal.
        hash_seeds: Hash seeds of the processes that used the data directory.

    Raises:
        InvalidRequest: The settings name a sandbox backend or a journal store that is not installed, or no address of
            a list of members; or the data directory has a journal of another store.
        JournalUnavailable: Another server holds the data directory, or its journal or name cannot be read.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        journal: Journal | None = None,
        disk: Disk | None = None,
        sandboxes: Backend | None = None,
        ids: Ids | None = None,
        clock: Clock | None = None,
        threads: Threads | None = None,
        registry: Registry | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        if settings.sandbox is not None:
            sandbox_registry.check(settings.sandbox)  # now rather than at the first session
        if settings.journal_store is not None:
            journal_registry.STORES.check(settings.journal_store)  # also without a data directory
        self.settings = settings
        self.fleet = fleet
        self.ids = ids or Ids()
        self.clock = clock or Clock()
        self.data_dir = resolved(settings.data_dir) if settings.data_dir is not None else None
        if self.data_dir is not None:
            self.ids.shard = shard_name(self.data_dir)
        self.threads: Threads = threads or OsThreads(settings.max_threads, settings.max_written_off, self.clock)
        self.drains = False
        self.listed = None
        if settings.members:
            self.listed = ListedMembers(settings.members, self.ids.shard, lambda: self.drains)
        self.metrics = Metrics()
        self.lease = _lease(settings, self.data_dir)
        self.lease_lost: Callable[[str], None] = lambda why: log.error("nothing is acknowledged any more: %s", why)
        self.store = Store(
            self.data_dir,
            is_ours=None if self.lease is None else self.lease.is_valid,
            floor_bytes=settings.disk_floor_bytes,
            wait_s=settings.journal_wait_s,
            changes=Changes(self.ids.seed),
            shard=self.ids.shard,
            deleting=None if fleet is None else fleet.elsewhere.deleting,
            member=None if self.listed is None else self.listed.member,
        )
        self.attached = Attached(self.store.changes)
        self.pages = Pages()
        self.rewards = Rewards(self.store, self.clock, self.metrics)
        self.live_sessions = LiveSessions(self.store)
        self.specs: dict[str, EnvironmentSpec] = {}
        self.sandbox = Sandboxes(settings, self.data_dir, sandboxes)
        self.quotas = PrincipalQuotas(
            settings.max_sessions_per_principal,
            settings.max_unfinished_bytes,
            shared=None if fleet is None else fleet.principal_capacity,
        )
        self.retention_clock = RetentionClock(self.clock.time())
        self.shutdown = Shutdown()
        self.shutdown.on_begin(self.store.stop_compaction)  # the request that waits for it is waited for
        self.shutdown.on_begin(self.store.changes.end)
        known = fleet if fleet is not None else self.listed
        self.members = MemberWatch(known.members if known is not None else self._alone)
        self.shutdown.on_begin(self.members.end)
        self.lag = LoopLag(self.clock.monotonic)
        self.readiness = Readiness(
            self.store.trouble,
            lambda: self.store.watch_trouble,
            lambda: self._lease_watch.trouble if self._lease_watch is not None else None,
            lambda: self.store.journal.trouble,
            self.threads.trouble,
            self.sandbox.trouble,
            descriptors.trouble,
            self.lag.trouble,
        )
        if self.listed is not None:
            self.readiness.tell("members", self.listed.trouble)
        self._given_journal = journal
        self._disk = disk
        self._registry = registry
        self._lock_fd: int | None = None
        self._lease_watch: LeaseWatch | None = None
        self._users = 0
        self._starting = FairLock()
        self._open()
        self._register_gauges()

    def _alone(self) -> list[FleetMember]:
        return [FleetMember(shard=self.ids.shard, state="draining" if self.drains else "up")]

    def drain_trouble(self) -> str | None:
        """Return why a server that drains is to be given no new work; None for one that does not."""
        return "it drains: it ends once its sessions have" if self.drains else None

    def _register_gauges(self) -> None:
        gauge, threads = self.metrics.gauge, self.threads
        gauge("errata_ready", "1 while this server can be given new work.", lambda: not self.readiness.reasons())
        gauge(
            "errata_journal_failing",
            "1 while commits cannot be made durable.",
            lambda: self.store.journal.failing is not None,
        )
        gauge("errata_journal_bytes", "Size of the journal's files.", lambda: self.store.journal_bytes)
        gauge("errata_disk_free_bytes", "Free space for the data directory.", self.store.free_bytes)
        gauge("errata_event_streams", "Open streams of GET /episodes/events.", lambda: self.store.changes.readers)
        gauge("errata_threads_pinned", "Threads tied to environments.", lambda: threads.counts.pinned)
        gauge("errata_threads_free", "Threads of the shared pool.", lambda: threads.counts.free)
        gauge("errata_calls_hanging", "Calls given up that have not returned.", lambda: threads.counts.written_off)
        self.metrics.counter(
            "errata_journal_damaged_reads_total",
            "Reads that found damage in the journal.",
            lambda: self.store.damaged_reads,
        )
        self.metrics.counter(
            "errata_calls_given_up_total", "Calls given up since the start.", lambda: threads.counts.written_off_total
        )
        gauge(
            "errata_event_loop_lag_seconds",
            "Most seconds by which the event loop was late in the last minute.",
            lambda: self.lag.worst_s,
        )
        gauge(
            "errata_sandbox_commands",
            "Sandboxed commands that run, are being started or cleaned up.",
            lambda: self.sandbox.running,
        )

    # -- opening and closing ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Lock the data directory and open the journal in it.

        Raises:
            JournalUnavailable: Another process, or another runtime of this one, holds the data directory.
        """
        self._started = False
        if self._registry is not None and self.data_dir is not None:
            self._registry.claim(self.data_dir, self)
        try:
            if self.data_dir is not None:
                self._lock_fd = lock(self.data_dir)
            self.hash_seeds = HashSeeds(self.data_dir, self.clock.time())
            journal = self._given_journal or open_journal(self.data_dir, self.settings, self.lease)
            journal.watch(self.metrics.written)
            if self._disk is None and self.data_dir is not None:
                self._disk = DirectoryDisk(self.data_dir)
            self.store.open(journal, self._disk)
            if self.lease is not None and self.data_dir is not None:
                self._lease_watch = LeaseWatch(self.lease, self.data_dir, lambda why: self.lease_lost(why))
            self.members.begin()
        except BaseException:
            self._release()
            raise
        self._closed = False

    @property
    def started(self) -> bool:
        """`start` has done its work."""
        return self._started

    async def start(self, *, reopen: bool = False) -> None:
        """Recover what an earlier server left in the data directory. Runs once; later calls return at once.

        Args:
            reopen: Open a closed runtime again: an application is started a second time. Never set for a request,
                which may arrive late, while the server is going away.

        Raises:
            JournalUnavailable: The runtime was closed, or the data directory is in use by another process now.
        """
        if self._started:
            return
        async with self._starting:  # one caller at a time; the next tries again where this one fails
            if self._closed:
                if not reopen:
                    raise JournalUnavailable("the server is shutting down")
                self._open()
            if not self._started:
                if self.store.journal.durable:
                    self.hash_seeds.keep()
                    await recover(self.store, self.sandbox, taken_over=self.lease is not None)
                elif self._given_journal is None:
                    _warn_of_memory()
                self._started = True

    async def acquire(self) -> None:
        """Start for an application, also where the runtime was closed; the application calls `release` when it stops.

        Raises:
            JournalUnavailable: See `start`.
        """
        await self.start(reopen=True)
        self.lag.start()
        if self.listed is not None and self._users == 0:
            await self.listed.start(self.members.look)
        self._users += 1

    async def release(self) -> None:
        """Undo `acquire`; the last application to stop closes a runtime whose journal is durable."""
        self._users -= 1
        if self._users == 0:
            self.lag.stop()
            if self.listed is not None:
                await self.listed.stop()
        if self._users == 0 and self.store.journal.durable:
            await self.close()

    async def close(self) -> None:
        """Stop sandboxes and threads and release the data directory. Idempotent."""
        self.store.stop_compaction()  # first: it ends while the sandboxes are stopped
        try:
            await self.sandbox.close()
            self.store.close()
            self.threads.close()
            self.store.journal.close()
        finally:
            self.sandbox.remove_temporary()
            self._closed = True
            self._started = False
            self._release()

    def _release(self) -> None:
        """Give up the data directory, for this process and for other ones."""
        if self._lease_watch is not None:
            self._lease_watch.close()
            self._lease_watch = None
        if self._registry is not None and self.data_dir is not None:
            self._registry.release(self.data_dir, self)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # -- shared objects -----------------------------------------------------------------------------------------------

    @property
    def sandboxes(self) -> Backend:
        """The sandbox backend, made at the first access."""
        return self.sandbox.backend

    async def collect(self) -> CollectReport:
        """Delete every sandbox layer that no journal row names."""
        return await self.sandbox.collect(self.store.refs)


@functools.cache  # once per process: a test makes many applications
def _warn_of_memory() -> None:
    log.warning("the journal is in memory and ends with this process: set ERRATA_DATA_DIR, or give data_dir=")


def _lease(settings: Settings, data_dir: Path | None) -> Lease | None:
    """Open the lease that the settings name.

    Raises:
        InvalidRequest: The data directory is not that of the lease's epoch.
        JournalUnavailable: There is no lease.
    """
    if settings.lease is None:
        return None
    lease = Lease(settings.lease)
    if data_dir is None or data_dir.parent.name != EPOCHS or data_dir.name != f"{lease.epoch:020d}":
        raise InvalidRequest("a lease (ERRATA_LEASE) needs `errata serve`, which makes the directory of its epoch")
    return lease
