"""A socket's queues: `Inbox` (bounded), `Arrivals` (unbounded) and `Gate` (an event), which allocate lazily.

Of 10,000 sockets nearly all wait for their client, and an empty deque takes 700 bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A bounded queue between one producer and one consumer; at a quarter of asyncio.Queue's cost, paid each step.

    Args:
        most: Most items in the queue; `put` waits while it is full.
        most_bytes: Most bytes in the queue together; a single item may be larger.
    """

    __slots__ = ("_arrived", "_bytes", "_items", "_loop", "_most", "_most_bytes", "_taken")

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # looked up once: that is a system call on Python 3.11
        self._items: list[tuple[T | None, int]] = []
        self._arrived: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None

    async def put(self, item: T, size_bytes: int) -> None:
        """Append ``item``; wait while the queue is full."""
        while len(self._items) >= self._most or (self._bytes and self._bytes + size_bytes > self._most_bytes):
            self._taken = self._future()
            await self._taken
        self._bytes += size_bytes
        self._items.append((item, size_bytes))
        wake(self._arrived)

    def _future(self) -> asyncio.Future[None]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.create_future()

    def end(self) -> None:
        """Append the end marker, even if the queue is full."""
        self._items.append((None, 0))
        wake(self._arrived)

    async def take(self) -> T | None:
        """Wait for the next item and return it; None at the end."""
        while not self._items:
            self._arrived = self._future()
            await self._arrived
        item, size_bytes = self._items.pop(0)
        self._bytes -= size_bytes
        wake(self._taken)
        return item


class Arrivals(Generic[T]):
    """The part of asyncio.Queue that an ASGI server uses."""

    __slots__ = ("_items", "_loop", "_takers")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[T] | None = None  # None while empty; a socket that floods may have thousands
        self._takers: list[asyncio.Future[None]] | None = None  # None while empty; in the order of arrival

    def put_nowait(self, item: T) -> None:
        """Append ``item``; the queue is unbounded."""
        if self._items is None:
            self._items = deque()
        self._items.append(item)
        self._wake_one()

    def empty(self) -> bool:
        """Return whether the queue is empty."""
        return self._items is None

    async def get(self) -> T:
        """Wait for the next item and return it."""
        while self._items is None:
            taker = self._loop.create_future()
            self._takers = [*(self._takers or ()), taker]
            try:
                await taker
            except asyncio.CancelledError:
                if taker.cancelled():
                    self._takers = [other for other in self._takers or () if other is not taker] or None
                elif self._items is not None:
                    self._wake_one()  # it was woken for an item that another can take
                raise
        item = self._items.popleft()
        if not self._items:
            self._items = None
        return item

    def _wake_one(self) -> None:
        while self._takers:
            taker, *rest = self._takers
            self._takers = rest or None
            if not taker.done():
                taker.set_result(None)
                return


class Gate:
    """The part of asyncio.Event that an ASGI server uses; initially set."""

    __slots__ = ("_loop", "_opened")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._opened: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Set the event, and wake its waiters."""
        opened, self._opened = self._opened, None
        wake(opened)

    def clear(self) -> None:
        """Clear the event."""
        if self._opened is None:
            self._opened = self._loop.create_future()

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._opened is None

    async def wait(self) -> None:
        """Wait until the event is set."""
        if self._opened is not None:
            await asyncio.shield(self._opened)  # others wait for it too


def wake(waiting: asyncio.Future[None] | None) -> None:
    """Resolve ``waiting`` with None, unless it is None or already done."""
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
