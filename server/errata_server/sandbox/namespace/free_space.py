"""Wakes tasks that wait until a file system has less free space, with one `statvfs` call per tick for all of them.

At 4 GiB/s a command reaches a session's disk limit in 60 ms, so the free space has to be read every few milliseconds;
four hundred commands that each did so would use a third of a CPU.
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
    """Watches the free space of one file system while tasks wait for it.

    Each event loop has its own timer, which runs while the loop has waiters.

    Args:
        directory: A directory on the file system.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waiters: dict[asyncio.AbstractEventLoop, set[_Waiter]] = {}

    async def wait(self, free_bytes: int, free_inodes: int, timeout_s: float) -> None:
        """Wait until the free space or inodes are no more than given, or the time has passed.

        Takes at least one tick (`TICK_S`), and returns at once at the next tick if the directory was removed.

        Args:
            free_bytes: Free space to wait for; -1 to ignore the space.
            free_inodes: Free inodes to wait for; ignored if the file system has no limit on them.
            timeout_s: Longest time to wait, plus up to one tick.
        """
        loop = asyncio.get_running_loop()
        waiter = _Waiter(free_bytes, free_inodes, loop.time() + timeout_s, loop.create_future())
        waiters = self._waiters.get(loop)
        if waiters is None:
            for ended in [other for other in list(self._waiters) if other.is_closed()]:
                del self._waiters[ended]  # its loop was closed between two ticks
            waiters = self._waiters[loop] = set()
            loop.call_later(TICK_S, self._tick, loop)
        waiters.add(waiter)
        try:
            await waiter.woken
        finally:
            waiters.discard(waiter)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the free space, wake the waiters of a loop that it or the time reached, and schedule the next tick."""
        waiters = self._waiters[loop]
        if not waiters:
            del self._waiters[loop]
            return
        loop.call_later(TICK_S, self._tick, loop)
        try:
            space = os.statvfs(self._directory)
        except OSError:  # the directory was removed: all waiters wake and find that out
            free_bytes = free_inodes = -1
        else:
            free_bytes = space.f_bavail * space.f_frsize
            free_inodes = space.f_ffree if space.f_files else 1 << 62
        now = loop.time()
        for waiter in waiters:
            reached = free_bytes <= waiter.free_bytes or free_inodes <= waiter.free_inodes or now >= waiter.deadline
            if reached and not waiter.woken.done():
                waiter.woken.set_result(None)
