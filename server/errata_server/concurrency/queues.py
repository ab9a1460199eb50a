"""A socket's queues: `Inbox` (bounded), `Arrivals` (unbounded) and `Gate` (an event), without memory while unused.

Nothing is made here before it is needed: of 10,000 sockets nearly all wait for their client, and an empty deque takes
700 bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Hands items from one task to one other, in order; asyncio.Queue costs four times as much, and once each step.

    Args:
        most: The first task waits while so many items are not taken.
        most_bytes: Likewise while they would be larger together; one alone may be of any size.
    """

    __slots__ = ("_arrived", "_bytes", "_items", "_loop", "_most", "_most_bytes", "_taken")

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # asked once: on Python 3.11 that is a system call
        self._items: list[tuple[T | None, int]] = []
        self._arrived: asyncio.Future[None] | None = None
        self._taken: asyncio.Future[None] | None = None

    async def put(self, item: T, size_bytes: int) -> None:
        """Put ``item`` in when there is room."""
        while len(self._items) >= self._most or (self._bytes and self._bytes + size_bytes > self._most_bytes):
            self._taken = self._future()
            await self._taken
        self._bytes += size_bytes
        self._items.append((item, size_bytes))
        _wake(self._arrived)

    def _future(self) -> asyncio.Future[None]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.create_future()

    def end(self) -> None:
        """Say that nothing more comes, whether there is room or not."""
        self._items.append((None, 0))
        _wake(self._arrived)

    async def take(self) -> T | None:
        """Return the next item, None at the end."""
        while not self._items:
            self._arrived = self._future()
            await self._arrived
        item, size_bytes = self._items.pop(0)
        self._bytes -= size_bytes
        _wake(self._taken)
        return item


class Arrivals(Generic[T]):
    """What of asyncio.Queue an ASGI server uses."""

    __slots__ = ("_items", "_loop", "_takers")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[T] | None = None  # while there are any: they may be thousands, of a socket that floods
        self._takers: list[asyncio.Future[None]] | None = None  # while there are any, in the order they came

    def put_nowait(self, item: T) -> None:
        """Put ``item`` in; there always is room."""
        if self._items is None:
            self._items = deque()
        self._items.append(item)
        self._wake_one()

    def empty(self) -> bool:
        """Say whether nothing is there."""
        return self._items is None

    async def get(self) -> T:
        """Return the next item when there is one."""
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
    """What of asyncio.Event an ASGI server uses; open at first."""

    __slots__ = ("_loop", "_opened")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._opened: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Open it."""
        opened, self._opened = self._opened, None
        _wake(opened)

    def clear(self) -> None:
        """Close it."""
        if self._opened is None:
            self._opened = self._loop.create_future()

    def is_set(self) -> bool:
        """Say whether it is open."""
        return self._opened is None

    async def wait(self) -> None:
        """Return once it is open."""
        if self._opened is not None:
            await asyncio.shield(self._opened)  # others wait for it too


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
