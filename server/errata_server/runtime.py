"""What all environments served from one data directory share: journal, sandboxes, clock, ids, and its lock."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from errata_protocol.environment import Recovery, SnapshotRef
from errata_protocol.errors import JournalUnavailable, SandboxUnavailable

from .ids import Clock, Ids
from .journal import Journal, MemoryJournal, SessionChange, SqliteJournal
from .sandbox.base import Backend, CollectReport
from .settings import Settings
from .turnstile import Turnstile

log = logging.getLogger("errata.server")

P = ParamSpec("P")
R = TypeVar("R")


class Runtime:
    """Shared resources of one server process and data directory.

    Nothing here needs an ASGI lifespan or belongs to an event loop: `start` runs once, whoever comes first.

    Args:
        settings: How to keep sessions.
        journal: Another journal than the one the settings name.
        sandboxes: Another backend than the one the settings name.
        ids: Source of ids.
        clock: Source of times.

    Raises:
        JournalUnavailable: Another server holds the data directory, or the journal cannot be opened.
    """

    _shared: dict[Path, Runtime] = {}  # noqa: RUF012 - one per process, guarded below
    _shared_guard = threading.Lock()

    def __init__(
        self,
        settings: Settings,
        *,
        journal: Journal | None = None,
        sandboxes: Backend | None = None,
        ids: Ids | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.ids = ids or Ids()
        self.clock = clock or Clock()
        self._lock_fd: int | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._key: Path | None = None
        self._started = False
        self._starting = Turnstile()
        self._start_guard = threading.Lock()
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="errata-read")
        self.enders: list[Callable[[str], Awaitable[bool]]] = []
        self.data_dir: Path | None = None
        if settings.data_dir is not None:
            self.data_dir = settings.data_dir.expanduser().resolve()
            self._lock_fd = _lock(self.data_dir)
        try:
            self.journal = journal or self._open_journal()
        except BaseException:
            self._unlock()
            raise
        self._sandboxes = sandboxes

    @classmethod
    def of(cls, settings: Settings) -> Runtime:
        """Return the runtime of the settings' data directory, made at its first use in this process."""
        if settings.data_dir is None:
            return cls(settings)
        key = settings.data_dir.expanduser().resolve()
        with cls._shared_guard:
            if key not in cls._shared:
                made = cls(settings)
                made._key = key
                cls._shared[key] = made
            return cls._shared[key]

    @property
    def sandboxes(self) -> Backend:
        """The sandbox backend, made when first asked for."""
        with self._start_guard:
            if self._sandboxes is None:
                self._sandboxes = self._make_sandboxes()
            return self._sandboxes

    async def start(self) -> None:
        """Bring a data directory that a dead server left behind in order. Runs once; later calls return at once.

        Sessions that ended with their server are marked so, given-out recoverable ones wait to be attached again, and
        sandbox layers that no committed row names are deleted.
        """
        if self._started:
            return
        async with self._starting:  # whoever comes second waits until the first is done, and tries again if it failed
            if not self._started:
                await self._recover()
                self._started = True

    async def _recover(self) -> None:
        if not self.journal.durable:
            return
        for row in await self.read(self.journal.open_sessions):
            if not row.given_out:
                await self.journal.commit(SessionChange(row.sid, status="closed"))
            elif row.recovery != Recovery.SNAPSHOT:
                await self.journal.commit(SessionChange(row.sid, status="lost"))
        try:
            report = await self.collect()
        except SandboxUnavailable as error:
            log.error("sandboxes of an earlier server cannot be cleaned up: %s", error)
        else:
            if report.layers or report.sandboxes:
                log.info("dropped %d uncommitted layers, %d dead sandboxes", report.layers, report.sandboxes)

    async def collect(self) -> CollectReport:
        """Delete every sandbox layer that no retained journal row names; nothing where there never was a sandbox."""
        left_behind = self.data_dir is not None and (self.data_dir / "sandboxes").exists()
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

    async def read(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking read of the journal off the event loop."""
        if not self.journal.durable:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, lambda: function(*args, **kwargs))

    async def wait_for_journal(self) -> None:
        """Return when a commit could be made durable now; nothing has run yet (PROTOCOL E4).

        Raises:
            JournalUnavailable: It stayed so for ``settings.journal_wait_s``.
        """
        waited = 0.0
        while (trouble := self.trouble()) is not None:
            if waited >= self.settings.journal_wait_s:
                raise JournalUnavailable(
                    f"the journal cannot be written and nothing was run: {trouble}; free space or mend the disk, "
                    "then send the request again",
                    retry_after=5.0,
                )
            await asyncio.sleep(0.1)
            waited += 0.1

    def trouble(self) -> str | None:
        """Say why a commit could not be made durable now; None when all is well."""
        failing = self.journal.failing
        if failing is not None or self.data_dir is None:
            return failing
        try:
            stats = os.statvfs(self.data_dir)
        except OSError as error:
            return f"{self.data_dir}: {error.strerror}"
        free = stats.f_bavail * stats.f_frsize
        floor = min(self.settings.disk_floor_bytes, stats.f_blocks * stats.f_frsize // 20)
        if free < floor:
            return f"{self.data_dir} has {free // 1024} KiB free, {floor // 1024} KiB are kept for the journal"
        return None

    async def close(self) -> None:
        """Stop sandboxes and threads and release the data directory. Idempotent."""
        try:
            if self._sandboxes is not None:
                await self._sandboxes.close()
            self._readers.shutdown()
            self.journal.close()
        finally:
            if self._scratch is not None:
                self._scratch.cleanup()
            if self._key is not None:
                with self._shared_guard:
                    self._shared.pop(self._key, None)
            self._unlock()

    def announce(self, url: str) -> None:
        """Write where this server answers into the data directory, for command-line tools."""
        if self.data_dir is not None:
            (self.data_dir / "server.json").write_text(json.dumps({"url": url, "pid": os.getpid()}))

    def _open_journal(self) -> Journal:
        if self.data_dir is None:
            return MemoryJournal()
        return SqliteJournal(self.data_dir / "journal.db", fsync=self.settings.fsync)

    def _make_sandboxes(self) -> Backend:
        if self.settings.sandbox == "fake":
            from .sandbox.fake import FakeBackend

            return FakeBackend()
        from .sandbox.namespace import NamespaceBackend

        if self.data_dir is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="errata-", ignore_cleanup_errors=True)
            directory = Path(self._scratch.name)
        else:
            directory = self.data_dir
        return NamespaceBackend(directory / "sandboxes", bases=self.settings.base)

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


def _lock(directory: Path) -> int:
    """Take the data directory for this process; the kernel gives it back when the process ends, however it ends."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # transcripts are their owner's
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalUnavailable(
            f"cannot use the data directory {directory}: {error.strerror}; give another --data-dir"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise JournalUnavailable(
            f"the data directory {directory} is in use by process {owner or 'unknown'}: "
            "stop it or give another --data-dir"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def owner_url(directory: Path) -> str | None:
    """Return where the server that holds ``directory`` answers, None if it never said."""
    try:
        found: dict[str, Any] = json.loads((directory / "server.json").read_text())
        return str(found["url"])
    except (OSError, ValueError, KeyError):
        return None
