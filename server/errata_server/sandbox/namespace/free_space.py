"""Wakes whoever waits for a file system to lose space, by one `statvfs` every few milliseconds for all of them.

A disk that takes 4 GiB/s fills a session's cap in 60 ms, so somebody has to look that often; four hundred commands that
each did would take a third of a processor.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

TICK_S = 0.005


@dataclass(eq=False, slots=True)
class _Waiter:
    free_bytes: int
    free_inodes: int
    deadline: float
    woken: asyncio.Future[None]


class FreeSpace:
    """The free space of one file system, looked at while anybody waits.

    Each event loop ticks for its own waiters, and not at all without any.

    Args:
        place: A directory on it.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._waiters: dict[asyncio.AbstractEventLoop, set[_Waiter]] = {}

    async def wait(self, free_bytes: int, free_inodes: int, timeout_s: float) -> None:
        """Return when no more is free than this, or after some time; never sooner than one tick.

        Args:
            free_bytes: Space; -1 for whatever is left.
            free_inodes: Likewise; not looked at where the file system has no bound on them.
            timeout_s: When to return at the latest, up to a tick more.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(free_bytes, free_inodes, loop.time() + timeout_s, loop.create_future())
        waiters = self._waiters.get(loop)
        if waiters is None:
            for ended in [other for other in list(self._waiters) if other.is_closed()]:
                del self._waiters[ended]  # stopped between two ticks
            waiters = self._waiters[loop] = set()
            loop.call_later(TICK_S, self._tick, loop)
        waiters.add(waiter)
        try:
            await waiter.woken
        finally:
            waiters.discard(waiter)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        waiters = self._waiters[loop]
        if not waiters:
            del self._waiters[loop]
            return
        loop.call_later(TICK_S, self._tick, loop)
        try:
            space = os.statvfs(self._place)
        except OSError:  # the directory is gone: whoever waits has to find out
            free_bytes = free_inodes = -1
        else:
            free_bytes = space.f_bavail * space.f_frsize
            free_inodes = space.f_ffree if space.f_files else 1 << 62
        now = loop.time()
        for waiter in waiters:
            reached = free_bytes <= waiter.free_bytes or free_inodes <= waiter.free_inodes or now >= waiter.deadline
            if reached and not waiter.woken.done():
                waiter.woken.set_result(None)
