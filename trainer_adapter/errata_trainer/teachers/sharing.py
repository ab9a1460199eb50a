"""Runs equal asynchronous work once for several callers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ResultT = TypeVar("ResultT")


class Shared(Generic[KeyT, ResultT]):
    """Runs work once for all callers that wait for the same key; it is cancelled when no caller waits any more.

    The rollouts of a group begin in the same state, and would pay for the same answer each.
    """

    def __init__(self) -> None:
        self._under_way: dict[KeyT, asyncio.Task[ResultT]] = {}
        self._waiting: Counter[asyncio.Task[ResultT]] = Counter()  # those that were given up are here till they end

    async def get(self, key: KeyT, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Return the result of ``work``, or of the call that is already in flight for ``key``."""
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.get_running_loop().create_task(work())
            task.add_done_callback(lambda ended: self._end(key, ended))
        self._waiting[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                if task.done():
                    del self._waiting[task]
                else:
                    task.cancel()
                    self._leave(key, task)

    async def aclose(self) -> None:
        """Cancel what is in flight and wait for its end."""
        tasks = set(self._waiting) | set(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _end(self, key: KeyT, task: asyncio.Task[ResultT]) -> None:
        self._leave(key, task)
        if not self._waiting[task]:
            del self._waiting[task]

    def _leave(self, key: KeyT, task: asyncio.Task[ResultT]) -> None:
        if self._under_way.get(key) is task:
            del self._under_way[key]
