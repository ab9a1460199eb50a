"""Watches what a running command takes from the disk, for its limits and for the server's reserve.

Counting names costs a walk, so it is done when it may matter. Between two counts one `statvfs` every few milliseconds
tells how much of the whole disk went meanwhile (`free_space`); all of it may be this command's, so the next count comes
when half of what was left to its limit is gone. What other writers free hides some of it; a count every 0.3 s does not
ask.

Some of what a command holds cannot be measured (`held_files.Held`). Of a command that has such files in two looks in a
row, everything counts that went from the disk since it began and is no known command's (`Growth`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..base import LimitHit, Limits
from ..files import as_owner
from ..files.walk import Usage, usage
from .free_space import TICK_S, FreeSpace
from .held_files import held_files

_FASTEST_INODES_PER_S = 100_000
_LATEST_S = 0.3
_REST = 4
"""After a count that took long, so many times as long passes before the next one that nothing calls for."""
_CLOCK_S = 0.02
"""Times of files are the kernel's last tick's."""
_AMPLE = 2
"""With less than so many reserves free, it is counted who grows: there is no time for it once the reserve has begun."""
_UNEXPLAINED = 8
"""Less than this part of a limit is not taken for a command's: the journal and other programs write too."""


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
    def is_ample(self) -> bool:
        """The reserve is far."""
        return self.free_bytes > _AMPLE * self.reserve_bytes and (
            self.free_inodes is None or self.free_inodes > _AMPLE * self.reserve_inodes
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


class Growth:
    """What the sandboxes of one backend are known to have added to its disk since the backend was made.

    A command that holds files nobody can measure is charged with what went from the disk and is not in here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = 0
        self._watches: set[DiskWatch] = set()

    @property
    def known_bytes(self) -> int:
        """Space that was added, less what was removed."""
        return self._known

    def add(self, size_bytes: int) -> None:
        """Note that a sandbox added so much; below 0 for what was removed."""
        with self._lock:
            self._known += size_bytes

    def watched(self, watch: DiskWatch) -> None:
        """A command begins."""
        with self._lock:
            self._watches.add(watch)

    def ended(self, watch: DiskWatch) -> None:
        """A command has ended and its sandbox was counted."""
        with self._lock:
            self._watches.discard(watch)

    def refresh(self, but: DiskWatch) -> None:
        """Count what every other running command holds by now; blocks."""
        with self._lock:
            others = self._watches - {but}
        for watch in others:
            with contextlib.suppress(OSError):  # it has ended, and so has its sandbox
                watch.measure()


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a command found.

    Args:
        used: What it holds and can be measured.
        is_partial: It holds more.
    """

    used: Usage
    is_partial: bool


class DiskWatch:
    """Watches one command.

    Args:
        upper: The session's writable directory.
        limits: The session's limits.
        before: What ``upper`` held when the command began.
        reserve_bytes: Space that is kept for the server.
        init: Host pid of the command's pid 1.
        counting: Where the counting is done.
        growth: Of the backend.
        space: Of the file system of ``upper``.
    """

    def __init__(
        self,
        upper: Path,
        limits: Limits,
        before: Usage,
        reserve_bytes: int,
        init: int,
        counting: Executor,
        growth: Growth,
        space: FreeSpace,
    ) -> None:
        self._upper = upper
        self._limits = limits
        self._before = before
        self._reserve_bytes = reserve_bytes
        self._init = init
        self._counting = counting
        self._growth = growth
        self._space = space
        self._most_bytes = max(limits.disk_bytes, before.size_bytes)
        self._most_entries = max(limits.inodes, before.entries)
        self._began_ns = time.time_ns() - int(_CLOCK_S * 1e9)
        self._noted = before.allocated_bytes
        self._ended = False
        self._lock = threading.Lock()
        self._known_before = growth.known_bytes
        self._room = Room.of(upper, reserve_bytes)
        growth.watched(self)

    async def run(self) -> LimitHit | Literal["full"]:
        """Return once the command is beyond a limit of its own, or has filled the server's disk (``full``)."""
        loop = asyncio.get_running_loop()
        room = last = self._room
        used, counted_at, took = self._before, loop.time(), 0.0
        was_partial = suspected = False
        while True:
            await self._space.wait(*self._next_look(last, used), TICK_S if suspected else self._pause(room, last, used))
            room = Room.of(self._upper, self._reserve_bytes)
            waited = loop.time() - counted_at
            due = suspected or self._due(room, last, used)
            if room.full and self._has_grown(used):
                return "full"  # what it had at the last count is enough; the disk may be full before the next one ends
            if waited < (took if due else max(_LATEST_S, _REST * took)):
                continue
            started = loop.time()
            try:
                look = await loop.run_in_executor(self._counting, self.measure)
                used, suspected = look.used, False
                if look.is_partial and (hidden := self._unexplained()):
                    if was_partial:
                        used = self._with(look.used, hidden)
                        if over(used, self._limits, self._before) is not None:
                            # Not for what others wrote since they were counted last.
                            await loop.run_in_executor(self._counting, self._growth.refresh, self)
                            used = self._with(look.used, self._unexplained())
                    else:
                        suspected = True
                was_partial = look.is_partial
            except OSError:
                continue  # looked at again; the count at the end is the one that has to work
            if (hit := over(used, self._limits, self._before)) is not None:
                return hit
            # Whoever hid from the count what it took is still not to have the other half.
            if room.full and (self._has_grown(used) or room.scarce):
                return "full"
            last, counted_at = room, loop.time()
            took = counted_at - started

    def measure(self) -> Look:
        """Count what the command holds, and note it in `Growth`; blocks.

        Raises:
            OSError: The directory cannot be read.
        """
        most_entries, most_bytes = self._most_entries, self._most_bytes
        named = as_owner.call(usage, self._upper, max_entries=most_entries, max_bytes=most_bytes)
        held = held_files(self._init, self._began_ns)
        self._note(named.allocated_bytes + held.size_bytes)
        total = named.size_bytes + held.size_bytes
        return Look(Usage(named.entries, total, named.whiteouts), held.is_partial)

    def end(self, used: Usage) -> None:
        """Take what was counted once all processes had ended; what ``upper`` held before, where nothing could be."""
        with self._lock:
            self._ended = True
        self._growth.ended(self)
        if used is not self._before:
            self._growth.add(used.allocated_bytes - self._noted)

    def _note(self, allocated: int) -> None:
        with self._lock:
            if self._ended:  # by another's refresh, which began before
                return
            self._growth.add(allocated - self._noted)
            self._noted = allocated

    def _unexplained(self) -> int:
        """Return what went from the disk since the command began and no count of a sandbox found; 0 if it is little."""
        gone = self._room.free_bytes - Room.of(self._upper, self._reserve_bytes).free_bytes
        unexplained = gone - (self._growth.known_bytes - self._known_before)
        return unexplained if unexplained > self._most_bytes // _UNEXPLAINED else 0

    def _with(self, used: Usage, hidden: int) -> Usage:
        return Usage(used.entries, used.size_bytes + hidden, used.whiteouts)

    def _has_grown(self, used: Usage) -> bool:
        return used.size_bytes > self._before.size_bytes or used.entries > self._before.entries

    def _left(self, room: Room, last: Room, used: Usage) -> tuple[int, int]:
        """Return bytes and inodes to the limit if all that went from the disk since ``last`` is the command's."""
        taken = max(0, last.free_bytes - room.free_bytes)
        made = max(0, (last.free_inodes or 0) - (room.free_inodes or 0))
        return self._most_bytes - used.size_bytes - taken, self._most_entries - used.entries - made

    def _due(self, room: Room, last: Room, used: Usage) -> bool:
        size, entries = self._left(room, last, used)
        return (
            room.full
            or last.is_ample > room.is_ample
            or size * 2 <= self._most_bytes - used.size_bytes
            or entries * 2 <= (self._most_entries - used.entries)
        )

    def _next_look(self, last: Room, used: Usage) -> tuple[int, int]:
        """Return the free bytes and inodes at which half of the rest to a limit may be gone, or the reserve is near.

        Args:
            last: What was free when ``used`` was counted.
            used: What the command held.
        """
        free_bytes = last.free_bytes - (self._most_bytes - used.size_bytes + 1) // 2
        free_inodes = (last.free_inodes or 0) - (self._most_entries - used.entries + 1) // 2
        reserves = _AMPLE if last.is_ample else 1
        return max(free_bytes, reserves * last.reserve_bytes), max(free_inodes, reserves * last.reserve_inodes)

    def _pause(self, room: Room, last: Room, used: Usage) -> float:
        """Return after how many seconds to look in any case: not every file system counts its inodes."""
        _, entries = self._left(room, last, used)
        return min(max(entries / _FASTEST_INODES_PER_S, TICK_S), _LATEST_S)
