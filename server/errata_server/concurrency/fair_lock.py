"""`FairLock`: a first come, first served lock for several event loops. Its holder gets a `Held`, which functions that
need the lock take as an argument."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from types import TracebackType


class Held:
    """Proof that a `FairLock` is held; only the lock creates one.

    A function that takes a ``Held`` may only be called by the holder of the lock. It has no state.
    """

    __slots__ = ()


_HELD = Held()


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

    def try_acquire(self) -> Held | None:
        """Acquire the lock if it is free, else return None; the caller calls `release`."""
        return _HELD if self._held.acquire(False) else None

    async def acquire(self) -> Held:
        """Wait for the lock behind all earlier waiters; the caller calls `release`."""
        with _GUARD:
            if self._held.acquire(False):
                return _HELD
            loop = asyncio.get_running_loop()
            passed: asyncio.Future[None] = loop.create_future()
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append((loop, passed))
        try:
            await passed
        except asyncio.CancelledError:
            if passed.done() and not passed.cancelled():
                self.release(_HELD)  # the lock had already been passed to this waiter
            raise
        return _HELD

    def release(self, held: Held) -> None:
        """Release the lock, which the caller has to hold; the first waiter, if there is one, acquires it."""
        if self._waiting:
            self._pass_on()
            return
        self._held.release()
        if self._waiting and self._held.acquire(False):  # a waiter was added between the check and the release
            self._pass_on()

    async def __aenter__(self) -> Held:
        return await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release(_HELD)

    def _pass_on(self) -> None:
        """Pass the held lock to the first waiter whose loop is open; release it if there is none."""
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
            self.release(_HELD)
        else:
            passed.set_result(None)


_GUARD = threading.Lock()
"""Held briefly while a waiter is added to, or removed from, the queue of any `FairLock`."""
