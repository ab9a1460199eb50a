"""Group commit: one thread, one transaction for all that waits, one wake-up per event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from errata_protocol.errors import ErrataError, JournalUnavailable

from .base import Record

log = logging.getLogger("errata.journal")

RETRY_S = 0.2
"""Pause between attempts while the store cannot write."""

MAX_GROUP = 1024
"""Commits in one transaction: bounds the memory of a retry and the latency of the first in the group."""


class StoreFailed(Exception):
    """The store could not write for a reason outside of the records: disk full, I/O error. Worth trying again."""


@dataclass(slots=True)
class Pending:
    """One waiting commit."""

    records: Sequence[Record]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    error: ErrataError | None = field(default=None)


class GroupWriter:
    """Turns commits from any event loop into few transactions of a store.

    Args:
        write: Called on the writer thread with groups of records; writes them in one transaction and returns one
            entry per group: None, or the error that group alone met. Raises `StoreFailed` to be called again.
        name: Thread name.
    """

    def __init__(self, write: Callable[[list[Sequence[Record]]], list[ErrataError | None]], name: str) -> None:
        self._write = write
        self._queue: deque[Pending] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.failing: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def commit(self, records: Sequence[Record]) -> None:
        """Wait until ``records`` are durable; cancelling the wait does not take the commit back."""
        loop = asyncio.get_running_loop()
        pending = Pending(records, loop, loop.create_future())
        with self._wake:
            if self._closing:
                raise JournalUnavailable("the journal is closed: the server is shutting down")
            self._queue.append(pending)
            self._wake.notify()
        await pending.future

    def close(self) -> None:
        """Write what waits and stop the thread. While the store keeps failing, what waits is refused."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    return
                group = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_GROUP))]
            self._write_until_durable(group)
            _answer(group)

    def _write_until_durable(self, group: list[Pending]) -> None:
        while True:
            try:
                errors = self._write([p.records for p in group])
            except StoreFailed as failure:
                if self.failing is None:
                    log.error("journal cannot write, sessions wait: %s", failure)
                self.failing = str(failure)
                with self._wake:
                    if not self._closing:
                        self._wake.wait(RETRY_S)
                    if self._closing:
                        error = JournalUnavailable(f"the journal could not be written before shutdown: {failure}")
                        for pending in group:
                            pending.error = error
                        return
                continue
            except Exception as failure:  # a defect of the store must not strand the waiting requests
                log.exception("journal write failed")
                error = JournalUnavailable(f"journal write failed: {failure}")
                for pending in group:
                    pending.error = error
                return
            if self.failing is not None:
                log.warning("journal writes again")
                self.failing = None
            for pending, error_or_none in zip(group, errors, strict=True):
                pending.error = error_or_none
            return


def _answer(group: list[Pending]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Pending]] = {}
    for pending in group:
        by_loop.setdefault(pending.loop, []).append(pending)
    for loop, pendings in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, pendings)
        except RuntimeError:  # that loop is closed: nobody waits there any more, and the rows are durable
            log.debug("a commit's event loop was closed before its answer")


def _resolve(pendings: list[Pending]) -> None:
    for pending in pendings:
        if pending.future.done():
            continue
        if pending.error is None:
            pending.future.set_result(None)
        else:
            pending.future.set_exception(pending.error)
