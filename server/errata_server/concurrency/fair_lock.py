"""`FairLock`: a first come, first served lock for several event loops; holding it is a value, a `Turn`."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from types import TracebackType


class Turn:
    """Proof that a `FairLock` is held; only the lock gives one.

    A function that takes a ``Turn`` may only be called by the holder of the lock. It has no state: all are one object.
    """

    __slots__ = ()


_TURN = Turn()


class FairLock:
    """A fair lock that is not bound to an event loop.

    asyncio.Lock belongs to the loop of its first contended wait; a session outlives loops (each request of a
    TestClient brings its own) and is reached through several doors.
    """

    __slots__ = ("_held", "_waiting")

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None  # most have none

    @property
    def busy(self) -> bool:
        """Whether the lock is held."""
        return self._held.locked()

    def try_acquire(self) -> Turn | None:
        """Acquire the lock if it is free, else return None; the caller calls `release`."""
        return _TURN if self._held.acquire(False) else None

    async def acquire(self) -> Turn:
        """Wait for the lock behind all earlier waiters; the caller calls `release`."""
        with _GUARD:
            if self._held.acquire(False):
                return _TURN
            loop = asyncio.get_running_loop()
            passed: asyncio.Future[None] = loop.create_future()
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append((loop, passed))
        try:
            await passed
        except asyncio.CancelledError:
            if passed.done() and not passed.cancelled():
                self._release()  # the lock had been passed on already
            raise
        return _TURN

    def release(self, turn: Turn) -> None:
        """Let the next waiter in."""
        self._release()

    async def __aenter__(self) -> Turn:
        return await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        if self._waiting:
            self._pass_on()
            return
        self._held.release()
        if self._waiting and self._held.acquire(False):  # a waiter came since the first look and found it held
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass the lock, which is held, to the first waiter; release it when there is none any more."""
        with _GUARD:
            while self._waiting:
                loop, passed = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(self._wake, passed)
                except RuntimeError:  # that loop is closed, and its waiters are gone
                    continue
                return
            self._held.release()

    def _wake(self, passed: asyncio.Future[None]) -> None:
        if passed.done():  # cancelled while the lock was passed on
            self._release()
        else:
            passed.set_result(None)


_GUARD = threading.Lock()
"""Held for a moment while a waiter is added to any lock, or the first one is taken out."""
