"""One request of a session at a time, in order of arrival, from whatever event loop it comes."""

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

    __slots__ = ("_guard", "_held", "_waiting")

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None  # most have none

    @property
    def busy(self) -> bool:
        """Somebody holds it."""
        return self._held

    def take(self) -> bool:
        """Hold it and return True if nobody does; whoever took it calls `leave`."""
        with self._guard:
            taken, self._held = not self._held, True
        return taken

    def leave(self) -> None:
        """Let the next one in."""
        self._pass_on()

    async def __aenter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
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
                self._pass_on()  # the turn had come already
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._guard:
            while self._waiting:
                loop, turn = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(self._give, turn)
                except RuntimeError:  # that loop is closed and nobody waits on it any more
                    continue
                return
            self._held = False

    def _give(self, turn: asyncio.Future[None]) -> None:
        if turn.done():  # cancelled while the hand-over was on its way
            self._pass_on()
        else:
            turn.set_result(None)
