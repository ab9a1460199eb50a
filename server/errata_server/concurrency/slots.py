"""`Slots`: a first come, first served semaphore for callers on several event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager


class Slots:
    """A fair semaphore; unlike asyncio's, it is not bound to an event loop.

    Args:
        limit: Number of slots, at least 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"{limit} slots: give at least 1")
        self._free = limit
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def take(self, while_waiting: Callable[[], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """Hold a slot inside the block.

        Args:
            while_waiting: Returns a context manager that is entered during the wait, such as
                `SessionContext.clock_stopped`; not called if a slot is free.
        """
        turn = self._take()
        if turn is not None:
            with while_waiting():
                await self._wait(turn)
        try:
            yield
        finally:
            self._leave()

    def _take(self) -> asyncio.Future[None] | None:
        """Take a free slot and return None; without one, return a future that is resolved with a slot."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._free and not self._waiting:
                self._free -= 1
                return None
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, turn))
            return turn

    async def _wait(self, turn: asyncio.Future[None]) -> None:
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                queued = [waiter for waiter in self._waiting if waiter[1] is turn]
                for waiter in queued:
                    self._waiting.remove(waiter)
            if not queued and turn.done() and not turn.cancelled():
                self._leave()  # the slot had already been assigned
            raise

    def _leave(self) -> None:
        """Pass the slot to the first waiter, or free it."""
        with self._lock:
            while self._waiting:
                loop, turn = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(self._give, turn)
                except RuntimeError:  # that loop is closed, and its waiters are gone
                    continue
                return
            self._free += 1

    def _give(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # cancelled while the slot was passed on
            self._leave()
        else:
            turn.set_result(None)
