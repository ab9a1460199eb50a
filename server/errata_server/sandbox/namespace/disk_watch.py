"""Watches what a running command takes from the disk, for its limits and for the server's reserve.

Counting names costs a walk, so it is done when it may matter. Between two counts one `statvfs` tells how much of the
whole disk went meanwhile; all of it may be this command's, so what is left to its limit shrinks by that, and the next
look comes before the fastest disk could have filled the rest. What other writers free hides some of it; a count every
0.3 s does not ask.
"""

from __future__ import annotations

import asyncio
import functools
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..base import LimitHit, Limits
from ..files import as_owner
from ..files.walk import Usage, usage

_FASTEST_BYTES_PER_S = 2 * 1024**3
_FASTEST_INODES_PER_S = 100_000
_SOONEST_S, _LATEST_S = 0.01, 0.3
_REST = 4
"""After a count that took long, so many times as long passes before the next one that nothing calls for."""
_CLOCK_S = 0.02
"""Times of files are the kernel's last tick's."""
_HELD_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Room:
    """What a file system has left, and what of it is kept for the server itself.

    Args:
        free_bytes: Free space.
        free_inodes: Free inodes; None where the file system has no bound on them.
        reserve_bytes: What is kept of the space.
        reserve_inodes: What is kept of the inodes.
    """

    free_bytes: int
    free_inodes: int | None
    reserve_bytes: int
    reserve_inodes: int

    @classmethod
    def of(cls, place: Path, reserve_bytes: int) -> Room:
        """Look at the file system of ``place``.

        Args:
            place: A directory.
            reserve_bytes: What to keep, at most 5 % of the file system.
        """
        space = os.statvfs(place)
        return cls(
            space.f_bavail * space.f_frsize,
            space.f_ffree if space.f_files else None,
            min(reserve_bytes, space.f_blocks * space.f_frsize // 20),
            min(10_000, space.f_files // 20),
        )

    @property
    def full(self) -> bool:
        """The reserve has begun."""
        return self.free_bytes < self.reserve_bytes or (
            self.free_inodes is not None and self.free_inodes < self.reserve_inodes
        )

    @property
    def scarce(self) -> bool:
        """Half of the reserve is gone, too."""
        return self.free_bytes < self.reserve_bytes // 2 or (
            self.free_inodes is not None and self.free_inodes < self.reserve_inodes // 2
        )

    def __str__(self) -> str:
        inodes = "" if self.free_inodes is None else f" and {self.free_inodes} inodes"
        return f"{self.free_bytes // 1024**2} MiB{inodes} free, {self.reserve_bytes // 1024**2} MiB are kept in reserve"


def over(used: Usage, limits: Limits, before: Usage) -> LimitHit | None:
    """Tell whether a command went beyond a limit; one that began there may clean up.

    Args:
        used: What the session holds.
        limits: Its limits.
        before: What it held when the command began.
    """
    if used.size_bytes > max(limits.disk_bytes, before.size_bytes):
        return "disk"
    return "inodes" if used.entries > max(limits.inodes, before.entries) else None


class DiskWatch:
    """Watches one command.

    Args:
        upper: The session's writable directory.
        limits: The session's limits.
        before: What ``upper`` held when the command began.
        reserve_bytes: Space that is kept for the server.
        init: Host pid of the command's pid 1.
        counting: Where the counting is done.
    """

    def __init__(
        self, upper: Path, limits: Limits, before: Usage, reserve_bytes: int, init: int, counting: Executor
    ) -> None:
        self._upper = upper
        self._limits = limits
        self._before = before
        self._reserve_bytes = reserve_bytes
        self._init = init
        self._counting = counting
        self._most_bytes = max(limits.disk_bytes, before.size_bytes)
        self._most_entries = max(limits.inodes, before.entries)
        self._began_ns = time.time_ns() - int(_CLOCK_S * 1e9)

    async def run(self) -> LimitHit | Literal["full"]:
        """Return once the command is beyond a limit of its own, or has filled the server's disk (``full``)."""
        loop = asyncio.get_running_loop()
        room = last = Room.of(self._upper, self._reserve_bytes)
        used, counted_at, took = self._before, loop.time(), 0.0
        while True:
            await asyncio.sleep(self._pause(room, last, used))
            room = Room.of(self._upper, self._reserve_bytes)
            waited = loop.time() - counted_at
            due = self._due(room, last, used)
            if waited < (took if due else max(_LATEST_S, _REST * took)):
                continue
            started = loop.time()
            try:
                used = await loop.run_in_executor(self._counting, self._count)
            except OSError:
                continue  # looked at again; the count at the end is the one that has to work
            if (hit := over(used, self._limits, self._before)) is not None:
                return hit
            grown = used.size_bytes > self._before.size_bytes or used.entries > self._before.entries
            # Whoever hid from the count what it took is still not to have the other half.
            if room.full and (grown or room.scarce):
                return "full"
            last, counted_at = room, loop.time()
            took = counted_at - started

    def _left(self, room: Room, last: Room, used: Usage) -> tuple[int, int]:
        """Return bytes and inodes to the limit if all that went from the disk since ``last`` is the command's."""
        taken = max(0, last.free_bytes - room.free_bytes)
        made = max(0, (last.free_inodes or 0) - (room.free_inodes or 0))
        return self._most_bytes - used.size_bytes - taken, self._most_entries - used.entries - made

    def _due(self, room: Room, last: Room, used: Usage) -> bool:
        size, entries = self._left(room, last, used)
        return (
            room.full
            or size * 2 <= self._most_bytes - used.size_bytes
            or entries * 2 <= (self._most_entries - used.entries)
        )

    def _pause(self, room: Room, last: Room, used: Usage) -> float:
        size, entries = self._left(room, last, used)
        size = min(size, room.free_bytes - room.reserve_bytes)
        if room.free_inodes is not None:
            entries = min(entries, room.free_inodes - room.reserve_inodes)
        soon = min(size / _FASTEST_BYTES_PER_S, entries / _FASTEST_INODES_PER_S)
        return min(max(soon, _SOONEST_S), _LATEST_S)

    def _count(self) -> Usage:
        most_entries, most_bytes = self._most_entries, self._most_bytes
        named = as_owner.call(usage, self._upper, max_entries=most_entries, max_bytes=most_bytes)
        held = held_bytes(self._init, self._began_ns)
        return Usage(named.entries, named.size_bytes + held, named.whiteouts)


def held_bytes(init: int, since_ns: int) -> int:
    """Return the space of files that have no name any more and that a command's processes hold open or mapped.

    Descriptors under way in a socket are not seen; nor, for a server that is not root, mappings without a descriptor.

    Args:
        init: Host pid of the command's pid 1.
        since_ns: When the command began: what changed earlier is a file of a frozen layer, which keeps its name there.
    """
    found: dict[tuple[int, int], int] = {}
    # An overlay's files may have yet another device than its directories, so what is memory is left out instead.
    memory = {_memory_device()}
    for pid in _below(init):
        try:
            memory.add(os.stat(f"/proc/{pid}/root/dev/shm").st_dev)  # noqa: PTH116 - a magic link
        except OSError:
            continue  # it has ended, or has no root yet
        for path in (*_descriptors(pid), *_mappings(pid)):
            try:
                info = os.stat(path)  # noqa: PTH116
            except OSError:
                continue
            nameless = info.st_nlink == 0 and stat.S_ISREG(info.st_mode) and info.st_dev not in memory
            if nameless and info.st_ctime_ns >= since_ns:
                found[info.st_dev, info.st_ino] = info.st_blocks * 512
        if len(found) > _HELD_MAX:
            break
    return sum(found.values())


@functools.cache
def _memory_device() -> int:
    fd = os.memfd_create("device")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _below(init: int) -> Iterator[int]:
    """Yield the pids of all descendants: everything in a pid namespace descends from its first process."""
    todo = [init]
    while todo:
        pid = todo.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as children:  # noqa: PTH123
                    todo.extend(int(child) for child in children.read().split())
        except OSError:
            pass  # ended meanwhile; its children are pid 1's, and met by the next look
        if pid != init:
            yield pid


def _descriptors(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH208
    except OSError:
        return []


def _mappings(pid: int) -> list[str]:
    found = []
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:  # noqa: PTH123
            for line in maps:
                if line.endswith(b" (deleted)\n"):
                    start, end = (int(address, 16) for address in line.split(b" ", 1)[0].split(b"-"))
                    found.append(f"/proc/{pid}/map_files/{start:x}-{end:x}")
    except OSError:
        pass
    return found
