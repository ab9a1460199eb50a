"""`Runtime`: opens the journal and the sandboxes of one data directory, recovers at start, closes them."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import InvalidRequest, JournalUnavailable, SandboxUnavailable
from errata_protocol.mux import Allowance

from .. import descriptors
from ..clock import Clock
from ..concurrency.fair_lock import FairLock
from ..concurrency.os_threads import OsThreads
from ..concurrency.threads import Threads
from ..ids import Ids
from ..journal import (
    DirectoryDisk,
    Disk,
    IndexedJournal,
    Journal,
    MemoryJournal,
    SalvageReport,
    SessionChange,
    journal_in,
    salvage,
)
from ..recovery import recovery_class
from ..sandbox import registry
from ..sandbox.base import Backend, CollectReport
from ..settings import Settings
from .capacity import Room
from .data_lock import lock
from .hash_seed import HashSeeds
from .metrics import Metrics
from .rewards import Rewards
from .store import Store

log = logging.getLogger("errata.server")

_OF_THE_DOORS = ("token", "allowed_hosts")
"""Settings that each application keeps for itself."""

P = ParamSpec("P")
R = TypeVar("R")


class Runtime:
    """Shared resources of one server process and data directory.

    Nothing here needs an ASGI lifespan or belongs to an event loop: `start` runs once, whoever comes first.

    Args:
        settings: How to keep sessions.
        journal: Another journal than the one the settings name; closed with the runtime, which then stays closed.
        disk: Where free space is watched; by default the data directory.
        sandboxes: Another backend than the one the settings name.
        ids: Source of ids.
        clock: Source of times.
        threads: Where blocking code of environments runs.

    Raises:
        InvalidRequest: The settings name a sandbox backend that is not installed.
        JournalUnavailable: Another server holds the data directory, or the journal cannot be opened.
    """

    _shared: dict[Path, Runtime] = {}  # noqa: RUF012 - one per process, guarded below
    _shared_guard = threading.Lock()

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
    ) -> None:
        if settings.sandbox is not None:
            registry.check(settings.sandbox)  # now rather than at the first session
        self.settings = settings
        self.ids = ids or Ids()
        self.clock = clock or Clock()
        self.data_dir = settings.data_dir.expanduser().resolve() if settings.data_dir is not None else None
        self.enders: list[Callable[[str], Awaitable[bool]]] = []
        self.relievers: list[Callable[[Room], Awaitable[bool]]] = []
        """Each takes the instance of a detached session where that makes room, and says whether there was one."""
        self._rooms: dict[str | None, Room] = {}
        self._unfinished: dict[str | None, Allowance] = {}
        self.farewells: list[Callable[[], None]] = []
        """Called when the server process stops, before it waits for its connections to end."""
        self.watches: list[Callable[[], str | None]] = []
        """Each says why the server should be given no new work; None when all is well."""
        self.drains: list[Callable[[], Awaitable[None]]] = []
        """Awaited after these: each sends its clients away and returns when what they asked for is answered."""
        self._given_journal = journal
        self._given_sandboxes = sandboxes
        self._disk = disk
        self.threads = threads or OsThreads(settings.max_threads, settings.max_written_off, self.clock)
        self.metrics = Metrics()
        self.store = Store(self.data_dir, floor_bytes=settings.disk_floor_bytes, wait_s=settings.journal_wait_s)
        self.rewards = Rewards(self.store, self.clock, self.metrics)
        self.lifespans = 0
        self.retained_at = self.clock.time()
        """When old episodes were last deleted, or nothing was yet: seconds since the epoch."""
        self._lock_fd: int | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._is_shared = False
        self._starting = FairLock()
        self._start_guard = threading.Lock()
        self._open()
        self._show()

    def _show(self) -> None:
        gauge, threads = self.metrics.gauge, self.threads
        gauge("errata_ready", "1 while this server can be given new work.", lambda: not self.unready())
        gauge(
            "errata_journal_failing",
            "1 while commits cannot be made durable.",
            lambda: self.journal.failing is not None,
        )
        gauge("errata_threads_pinned", "Threads tied to environments.", lambda: threads.counts.pinned)
        gauge("errata_threads_free", "Threads of the shared pool.", lambda: threads.counts.free)
        gauge("errata_calls_hanging", "Calls given up that have not returned.", lambda: threads.counts.written_off)
        self.metrics.counter(
            "errata_calls_given_up_total", "Calls given up since the start.", lambda: threads.counts.written_off_total
        )
        gauge(
            "errata_sandbox_commands",
            "Sandboxed commands that run, are being started or cleaned up.",
            lambda: self._sandboxes.running if self._sandboxes is not None else 0,
        )

    def _open(self) -> None:
        self._started = False
        if self.data_dir is not None:
            self._lock_fd = lock(self.data_dir)
        self.hash_seeds = HashSeeds(self.data_dir, self.clock.time())
        try:
            journal = self._given_journal or self._open_journal()
            journal.watch(self.metrics.written)
            if self._disk is None and self.data_dir is not None:
                self._disk = DirectoryDisk(self.data_dir)
            self.store.open(journal, self._disk)
        except BaseException:
            self._unlock()
            raise
        self._sandboxes = self._given_sandboxes
        self._closed = False

    @classmethod
    def of(cls, settings: Settings) -> Runtime:
        """Return the runtime of the settings' data directory, made at its first use in this process.

        Raises:
            InvalidRequest: It was made with other settings. Those of the doors (token, hosts) may differ.
            JournalUnavailable: Another process holds the data directory, or the journal cannot be opened.
        """
        if settings.data_dir is None:
            return cls(settings)
        key = settings.data_dir.expanduser().resolve()
        with cls._shared_guard:
            found = cls._shared.get(key)
            if found is None:
                found = cls._shared[key] = cls(settings)
                found._is_shared = True
            elif differing := _differing(found.settings, settings):
                raise InvalidRequest(
                    f"{key} is in use in this process with other settings: {differing}; "
                    "use the same ones, another data_dir, or pass runtime="
                )
            return found

    @classmethod
    def chosen(cls, settings: Settings | None = None, data_dir: str | Path | None = None) -> Runtime:
        """Return the runtime for an application's arguments: ``ERRATA_*`` by default, ``data_dir`` above all.

        Raises:
            InvalidRequest, JournalUnavailable: As `of`.
        """
        settings = settings or Settings()
        if data_dir is not None:
            settings = settings.model_copy(update={"data_dir": Path(data_dir)})
        return cls.of(settings)

    @property
    def journal(self) -> Journal:
        """The journal, for commits; it is read by `store`."""
        return self.store.journal

    @property
    def sandboxes(self) -> Backend:
        """The sandbox backend, made when first asked for."""
        with self._start_guard:
            if self._sandboxes is None:
                self._sandboxes = self._make_sandboxes()
            return self._sandboxes

    @property
    def started(self) -> bool:
        """`start` has done its work."""
        return self._started

    async def start(self, *, reopen: bool = False) -> None:
        """Bring a data directory that a dead server left behind in order. Runs once; later calls return at once.

        Sessions that ended with their server are marked so, given-out recoverable ones wait to be attached again, and
        sandbox layers that no committed row names are deleted.

        Args:
            reopen: Also where the runtime was closed: an application is started a second time. Never for a request,
                which may come late to a server that is going away.

        Raises:
            JournalUnavailable: The runtime was closed, or the data directory is in use by another process now.
        """
        if self._started:
            return
        async with self._starting:  # whoever comes second waits until the first is done, and tries again if it failed
            if self._closed:
                if not reopen:
                    raise JournalUnavailable("the server is shutting down")
                self._reopen()
            if not self._started:
                await self._recover()
                self._started = True

    async def _recover(self) -> None:
        if not self.journal.durable:
            if self._given_journal is None:
                _warn_of_memory()
            return
        self.hash_seeds.keep()
        over: list[SessionChange] = []
        for row in await self.store.open_sessions():
            if not row.given_out:
                over.append(SessionChange(row.sid, status="closed"))
            elif not recovery_class(row.recovery).survives_restart:
                over.append(SessionChange(row.sid, status="lost"))
        if over:
            await self.journal.commit(*over)
        try:
            report = await self.collect()
        except SandboxUnavailable as error:
            log.error("sandboxes of an earlier server cannot be cleaned up: %s", error)
        else:
            if report.layers or report.sandboxes:
                log.info("dropped %d uncommitted layers, %d dead sandboxes", report.layers, report.sandboxes)

    async def collect(self) -> CollectReport:
        """Delete every sandbox layer that no retained journal row names; nothing where there never was a sandbox."""
        left_behind = self.data_dir is not None and (self.data_dir / registry.DIRECTORY).exists()
        if self._sandboxes is None and not left_behind:
            return CollectReport()
        await self.sandboxes.start()
        return await self.sandboxes.collect(_Lazy(self.journal.refs))

    async def end_session(self, sid: str) -> None:
        """End a session, whichever environment of this process has it, or only its row where none has."""
        for end in self.enders:
            if await end(sid):
                return
        await self.journal.commit(SessionChange(sid, status="closed"))

    def room_of(self, principal: str | None) -> Room:
        """Return where the instances of a principal are counted, of whichever environment."""
        return self._rooms.setdefault(principal, Room(self.settings.max_sessions_per_principal))

    def unfinished_of(self, principal: str | None) -> Allowance:
        """Return what bounds the unfinished messages of a principal's sockets, on whichever environment."""
        return self._unfinished.setdefault(principal, Allowance(self.settings.max_unfinished_bytes))

    def unready(self) -> list[str]:
        """Say why this server should be given no new work; empty when all is well."""
        sandboxes = self._sandboxes
        reasons = (
            self.store.trouble(),
            self.store.watch_trouble,
            self.journal.trouble,
            self.threads.trouble(),
            sandboxes.trouble if sandboxes is not None else None,
            descriptors.trouble(),
            *(watch() for watch in self.watches),
        )
        return [reason for reason in reasons if reason is not None]

    async def drain(self, timeout_s: float) -> None:
        """Let what runs be committed and answered, and ask clients to come again to whoever serves next."""
        if not self.drains:
            return
        draining = {asyncio.ensure_future(drain()) for drain in self.drains}
        done, late = await asyncio.wait(draining, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            log.warning(
                "some requests still ran %g s after the server was asked to stop: they did not happen", timeout_s
            )
        for task in done:
            if (error := task.exception()) is not None:
                log.error("a door could not be drained", exc_info=error)

    async def close(self) -> None:
        """Stop sandboxes and threads and release the data directory. Idempotent."""
        try:
            if self._sandboxes is not None:
                await self._sandboxes.close()
            self.store.close()
            self.threads.close()
            self.journal.close()
        finally:
            if self._scratch is not None:
                self._scratch.cleanup()
                self._scratch = None
            self._closed = True
            self._started = False
            if self._is_shared and self.data_dir is not None:
                with self._shared_guard:
                    if self._shared.get(self.data_dir) is self:
                        del self._shared[self.data_dir]
            self._unlock()

    def _reopen(self) -> None:
        if self._is_shared and self.data_dir is not None:
            with self._shared_guard:
                if self.data_dir in self._shared:
                    raise JournalUnavailable(
                        f"another application of this process took over {self.data_dir} after this one was stopped: "
                        "make this one anew"
                    )
                self._open()
                self._shared[self.data_dir] = self
        else:
            self._open()

    def announce(self, url: str) -> None:
        """Write where this server answers into the data directory, for command-line tools."""
        if self.data_dir is not None:
            (self.data_dir / "server.json").write_text(json.dumps({"url": url, "pid": os.getpid()}))

    @property
    def snapshots_each_step(self) -> bool:
        """Whether the sandboxes' backend has a snapshot for each step."""
        return registry.backend_type(self.settings.sandbox).snapshots_each_step

    def _open_journal(self) -> Journal:
        if self.data_dir is None:
            return MemoryJournal()
        directory = journal_in(self.data_dir)
        if self.settings.journal_salvage and directory.is_dir():
            _log_salvage(salvage(directory))
        return IndexedJournal(directory, fsync=self.settings.fsync)

    def _make_sandboxes(self) -> Backend:
        settings, directory = self.settings, self.data_dir
        if directory is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="errata-", ignore_cleanup_errors=True)
            directory = Path(self._scratch.name)
        place = registry.place_of(directory, settings.base, settings.disk_floor_bytes)
        return registry.create(settings.sandbox, place)

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


class _Lazy:
    """The journal's refs, read when the backend iterates: after it noted which layers live sandboxes need.

    Read earlier, a layer whose row is committed and whose sandbox is closed in between would be in neither.
    """

    def __init__(self, refs: Callable[[], set[SnapshotRef]]) -> None:
        self._refs = refs

    def __iter__(self) -> Iterator[SnapshotRef]:
        return iter(self._refs())


def _log_salvage(report: SalvageReport) -> None:
    if not report.is_damaged:
        return
    for found in report.damaged:
        log.error(
            "the journal was damaged: %s at bytes %d to %d of segment %d, which held %s",
            found.what,
            found.begin,
            found.end,
            found.segment,
            found.holds or "nothing that can be read",
        )
    for session in report.sessions:
        log.error("session %s had rows there (it was %s): %s", session.sid, session.status, ", ".join(session.episodes))
    log.error(
        "the journal is repaired: %d sessions are lost, %d rows are whole; the damaged segments are kept in %s",
        len(report.lost),
        report.rows,
        report.originals,
    )


@functools.cache  # once per process: a test makes many applications
def _warn_of_memory() -> None:
    log.warning("the journal is in memory and ends with this process: set ERRATA_DATA_DIR, or give data_dir=")


def _differing(one: Settings, other: Settings) -> str:
    return ", ".join(
        f"{name}={getattr(one, name)!r} and {getattr(other, name)!r}"
        for name in sorted(Settings.model_fields.keys() - {"data_dir", *_OF_THE_DOORS})
        if getattr(one, name) != getattr(other, name)
    )
