"""`SharedBuilds`: what is expensive to make is made once, for all sessions that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")


class SharedBuilds(Generic[KeyT, T]):
    """Values by key, each made at its first use.

    Args:
        keep: Whether a value is kept after it was made. If not, only callers that wait at the same time share it.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._made: dict[KeyT, T] = {}
        self._making: dict[tuple[KeyT, asyncio.AbstractEventLoop], asyncio.Task[T]] = {}

    async def get(self, key: KeyT, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the value of ``key``.

        Args:
            key: Name of everything that the value depends on.
            make: Function whose coroutine makes the value. Its exceptions go to all callers that wait for it, and the
                next call makes the value again.
        """
        if key in self._made:
            return self._made[key]
        # A task of its own, because the first caller may be cancelled while others wait; each loop has its own, because
        # an awaited task belongs to one.
        owner = (key, asyncio.get_running_loop())
        if owner not in self._making:
            making = asyncio.ensure_future(make())
            making.add_done_callback(self._ended(owner))
            self._making[owner] = making
        return await asyncio.shield(self._making[owner])

    def forget(self, key: KeyT) -> None:
        """Forget the value of ``key``; the next `get` makes another."""
        self._made.pop(key, None)

    def forget_value(self, value: T) -> None:
        """Forget ``value`` under every key."""
        self._made = {key: made for key, made in self._made.items() if made != value}

    def _ended(self, owner: tuple[KeyT, asyncio.AbstractEventLoop]) -> Callable[[asyncio.Task[T]], None]:
        def ended(making: asyncio.Task[T]) -> None:
            self._making.pop(owner, None)
            if self._keep and not making.cancelled() and making.exception() is None:
                self._made[owner[0]] = making.result()

        return ended
