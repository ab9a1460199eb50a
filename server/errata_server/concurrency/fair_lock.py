"""`Turnstile`: a fair lock for several event loops; one request of a session at a time, in order of arrival."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from types import TracebackType


class Turnstile:
    """A fair lock that is not bound to an event loop.

    asyncio.Lock belongs to the loop of its first contended wait; a session outlives loops (each request of a
    TestClient brings its own) and is reached through several doors.
    """

    __slots__ = ("_turn", "_waiting")

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held by whoever has the turn
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None  # most have none

    @property
    def busy(self) -> bool:
        """Somebody holds it."""
        return self._turn.locked()

    def take(self) -> bool:
        """Hold it and return True if nobody does; whoever took it calls `leave`."""
        return self._turn.acquire(False)

    def leave(self) -> None:
        """Let the next one in."""
        if self._waiting:
            self._pass_on()
            return
        self._turn.release()
        if self._waiting and self._turn.acquire(False):  # somebody came since the first look and found it held
            self._pass_on()

    async def __aenter__(self) -> None:
        with _GUARD:
            if self._turn.acquire(False):
                return
            loop = asyncio.get_running_loop()
            turn: asyncio.Future[None] = loop.create_future()
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append((loop, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the turn had come already
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _pass_on(self) -> None:
        """Give the turn, which is held, to the first who waits; leave it where nobody does any more."""
        with _GUARD:
            while self._waiting:
                loop, turn = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(self._give, turn)
                except RuntimeError:  # that loop is closed and nobody waits on it any more
                    continue
                return
            self._turn.release()

    def _give(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # cancelled while the hand-over was on its way
            self.leave()
        else:
            turn.set_result(None)


_GUARD = threading.Lock()
"""Held while somebody is added to those who wait, or the first of them is taken out; for a moment, by anybody."""
