"""Group commit: one writer, one transaction for all waiting commits, one wake-up per event loop.

Which groups are written, and how their commits are answered, is `GroupWriter._work`, a generator that waits for nothing
itself: a thread drives it here (`ThreadWriter`), a simulated event loop drives it in `errata_server.simulation`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence

from msgspec import Struct

from errata_os.service_threads import ServiceThread
from errata_protocol.errors import ErrataError, JournalUnavailable

from .base import Record, Settled

log = logging.getLogger("errata.journal")

RETRY_S = 0.2
"""Pause between attempts while the store cannot write."""

MAX_GROUP = 1024
"""Commits in one transaction: bounds the memory of a retry and the latency of the first in the group."""


class StoreFailed(Exception):
    """The store could not write for a reason outside of the records: disk full, I/O error. Worth trying again."""


class Pending(Struct, eq=False, gc=False):  # of what it names nothing names it
    """One waiting commit."""

    records: Sequence[Record]
    loop: asyncio.AbstractEventLoop
    settled: Settled
    error: ErrataError | None = None


Write = Callable[[list[Sequence[Record]]], list[ErrataError | None]]
"""Writes groups of records in one transaction; one entry per group: None, or the error that group alone met. Raises
`StoreFailed` to be called again."""

Step = float | list[Sequence[Record]] | None
"""What the driver does next: wait so many seconds at most, wait for a commit (None), or write these groups."""

Work = Generator[Step, "list[ErrataError | None] | None", None]


class GroupWriter(ABC):
    """Turns commits from any event loop into few transactions of a store.

    Args:
        write: The store's `Write`.

    Attributes:
        failing: Why the store cannot write; None while it can.
        written: Called after each transaction of a thread with the number of its commits and its duration in seconds.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self.written: Callable[[int, float], None] = lambda commits, seconds: None
        self._queue: deque[Pending] = deque()
        self._closing = False
        self._in_hand: list[Pending] = []
        self.failing: str | None = None

    @property
    def trouble(self) -> str | None:
        """Why the writing thread failed; None while it runs, or without one."""
        return None

    def submit(
        self,
        records: Sequence[Record],
        settled: Settled,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Make ``records`` durable, then call ``settled`` on this event loop with them and None, or the error.

        Raises:
            JournalUnavailable: The writer was closed before; ``settled`` is not called.
        """
        self._submit(Pending(records, loop or asyncio.get_running_loop(), settled))

    @abstractmethod
    def _submit(self, pending: Pending) -> None:
        """Queue a commit and wake the driver; raise `closed` if the writer was closed."""

    @abstractmethod
    def close(self) -> None:
        """Write what waits and stop. While the store keeps failing, what waits is refused."""

    def _work(self) -> Work:
        while True:
            if not self._queue:
                if self._closing:
                    return
                yield None
                continue
            group = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_GROUP))]
            self._in_hand = group
            yield from self._write_until_durable(group)
            _answer(group)
            self._in_hand = []

    def _write_until_durable(self, group: list[Pending]) -> Work:
        while True:
            try:
                errors = yield [p.records for p in group]
            except StoreFailed as failure:
                if self.failing is None:
                    log.error("journal cannot write, sessions wait: %s", failure)
                self.failing = str(failure)
                if not self._closing:
                    yield RETRY_S
                if self._closing:
                    return _refuse(
                        group, JournalUnavailable(f"the journal could not be written before shutdown: {failure}")
                    )
                continue
            except Exception as failure:  # a defect of the store must not strand the waiting requests
                log.exception("journal write failed")
                return _refuse(group, JournalUnavailable(f"journal write failed: {failure}"))
            if self.failing is not None:
                log.warning("journal writes again")
                self.failing = None
            if errors is None:
                raise RuntimeError("the driver of the writer wrote nothing")
            for pending, error_or_none in zip(group, errors, strict=True):
                pending.error = error_or_none
            return


class ThreadWriter(GroupWriter):
    """Writes on its own thread, because a sync blocks.

    Args:
        write: The store's `Write`, called on the thread.
        name: Thread name.
    """

    def __init__(self, write: Write, name: str = "errata-journal") -> None:
        super().__init__(write)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._asleep = False
        self._thread = ServiceThread(name, self._run, failed=self._refuse_in_hand)

    @property
    def trouble(self) -> str | None:
        return self._thread.trouble

    def _submit(self, pending: Pending) -> None:
        with self._lock:
            if self._closing:
                raise closed()
            self._queue.append(pending)
            if self._asleep:  # else it looks at the queue again before it sleeps
                self._asleep = False
                self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _refuse_in_hand(self, failure: BaseException) -> None:
        """Answer those whose commit was under way when the thread failed; the others are written when it goes on."""
        group, self._in_hand = self._in_hand, []
        _refuse(group, JournalUnavailable(f"the journal's writer failed: {failure!r}"))
        _answer(group)

    def _run(self) -> None:
        work = self._work()
        outcome: list[ErrataError | None] | Exception | None = None
        while (following := advance(work, outcome)) is not None:
            (step,) = following
            outcome = None
            if isinstance(step, list):
                started = time.perf_counter()
                try:
                    outcome = self._write(step)
                except Exception as failure:
                    outcome = failure
                self.written(len(step), time.perf_counter() - started)
            else:
                with self._wake:
                    # Check the queue again: a commit that came since the generator looked has notified no one.
                    if not self._closing and (step is not None or not self._queue):
                        self._asleep = True
                        self._wake.wait(step)
                        self._asleep = False


def advance(work: Work, outcome: list[ErrataError | None] | Exception | None) -> tuple[Step] | None:
    """Give ``work`` what its last step came to, and return its next step in a tuple, or None at its end."""
    try:
        return (work.throw(outcome) if isinstance(outcome, Exception) else work.send(outcome),)
    except StopIteration:
        return None


def closed() -> JournalUnavailable:
    """Return the error of a commit that comes after `GroupWriter.close`."""
    return JournalUnavailable("the journal is closed: the server is shutting down")


def _refuse(group: list[Pending], error: JournalUnavailable) -> None:
    for pending in group:
        pending.error = error


def _answer(group: list[Pending]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Pending]] = {}
    for pending in group:
        by_loop.setdefault(pending.loop, []).append(pending)
    for loop, pendings in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, pendings)
        except RuntimeError:  # that loop is closed, so no one waits there; the rows are durable
            log.debug("a commit's event loop was closed before its answer")


def _resolve(pendings: list[Pending]) -> None:
    for pending in pendings:
        try:
            pending.settled(pending.records, pending.error)
        except Exception:  # a defect of one who waited must not strand the others
            log.exception("what followed a commit failed")
