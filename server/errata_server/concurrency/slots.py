"""`Slots`: a semaphore for callers on several event loops, fair by principal and session."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager

Share = tuple[str, str]
"""Principal and session of a caller. Principals that wait take turns, and so do the waiting sessions of each."""

NO_SHARE: Share = ("", "")
"""The share of callers that belong to no session."""

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Slots:
    """A fair semaphore; unlike asyncio's, it is not bound to an event loop.

    Args:
        limit: Number of slots, at least 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"{limit} slots: give at least 1")
        self._free = limit
        self._waiting = _Turns()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def take(
        self, while_waiting: Callable[[], AbstractContextManager[None]], share: Share = NO_SHARE
    ) -> AsyncIterator[None]:
        """Hold a slot inside the block.

        Args:
            while_waiting: Returns a context manager that is entered during the wait, such as
                `SessionContext.clock_stopped`; not called if a slot is free.
            share: Share of the caller. Callers of one share get slots in order of arrival.
        """
        passed = self._take(share)
        if passed is not None:
            with while_waiting():
                await self._wait(passed, share)
        try:
            yield
        finally:
            self._leave()

    def _take(self, share: Share) -> asyncio.Future[None] | None:
        """Take a free slot and return None; without one, return a future that is resolved with a slot."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free and not self._waiting:
                self._free -= 1
                return None
            passed: asyncio.Future[None] = loop.create_future()
            self._waiting.add(share, (loop, passed))
            return passed

    async def _wait(self, passed: asyncio.Future[None], share: Share) -> None:
        try:
            await passed
        except asyncio.CancelledError:
            with self._lock:
                queued = self._waiting.remove(share, passed)
            if not queued and passed.done() and not passed.cancelled():
                self._leave()  # the slot had already been assigned
            raise

    def _leave(self) -> None:
        """Pass the slot to the next waiter, or free it."""
        with self._lock:
            while self._waiting:
                loop, passed = self._waiting.pop()
                try:
                    loop.call_soon_threadsafe(self._give, passed)
                except RuntimeError:  # that loop is closed, and its waiters are gone
                    continue
                return
            self._free += 1

    def _give(self, passed: asyncio.Future[None]) -> None:
        if passed.done():  # cancelled while the slot was passed on
            self._leave()
        else:
            passed.set_result(None)


class _Turns:
    """Queue of waiters: principals take turns, then the sessions of a principal, then callers in order of arrival."""

    def __init__(self) -> None:
        self._principals: dict[str, dict[str, deque[_Waiter]]] = {}  # both in the order of their next turns
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, share: Share, waiter: _Waiter) -> None:
        """Add a waiter at the end of its share."""
        principal, session = share
        self._principals.setdefault(principal, {}).setdefault(session, deque()).append(waiter)
        self._count += 1

    def pop(self) -> _Waiter:
        """Remove and return the next waiter."""
        principal = next(iter(self._principals))
        sessions = self._principals.pop(principal)
        session = next(iter(sessions))
        queue = sessions.pop(session)
        waiter = queue.popleft()
        if queue:
            sessions[session] = queue
        if sessions:
            self._principals[principal] = sessions
        self._count -= 1
        return waiter

    def remove(self, share: Share, passed: asyncio.Future[None]) -> bool:
        """Remove a waiter that gave up; return False if it was popped before."""
        principal, session = share
        sessions = self._principals.get(principal, {})
        queue = sessions.get(session, deque())
        found = next((waiter for waiter in queue if waiter[1] is passed), None)
        if found is None:
            return False
        queue.remove(found)
        if not queue:
            del sessions[session]
        if not sessions:
            del self._principals[principal]
        self._count -= 1
        return True
