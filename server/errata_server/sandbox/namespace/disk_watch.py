"""Watches the disk space that a running command uses, for its limits and for the server's reserve.

Counting the files of a sandbox needs a walk of its tree, so it is done only when a limit may have been reached. Between
two counts one `statvfs` every few milliseconds (`free_space`) shows how much of the whole disk was used meanwhile. All
of it may be this command's, so the next count is due when half of what was left to its limit has been used. Other
programs may free space at the same time and hide growth, so there is also a count at least every 0.3 s.

Some of the files that a command holds cannot be measured (`held_files.Held`). If a command has such files in two counts
in a row, all space is charged to it that was used since it began and that no count of a sandbox explains (`Growth`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ..base import LimitHit, Limits
from ..files import as_owner
from ..files.walk import Usage, usage
from .free_space import TICK_S, FreeSpace
from .held_files import held_files

_FASTEST_INODES_PER_S = 100_000
"""The rate at which a command can make files, at most."""
_LATEST_S = 0.3
_REST = 4
"""After a count, at least so many times its duration passes before a count that is not due."""
_CLOCK_S = 0.02
"""Resolution of file times: the kernel's timer tick."""
_AMPLE = 2
"""When less than so many reserves are free, commands are counted: once only the reserve is left there is no time."""
_UNEXPLAINED = 8
"""Unexplained growth below 1/8 of the limit is not charged to a command: the journal and other programs write too."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Free space of a file system, and the part of it that is reserved for the server itself.

    Args:
        free_bytes: Free space.
        free_inodes: Free inodes; None if the file system has no limit on them.
        reserve_bytes: Space that is reserved.
        reserve_inodes: Inodes that are reserved.
    """

    free_bytes: int
    free_inodes: int | None
    reserve_bytes: int
    reserve_inodes: int

    @classmethod
    def of(cls, directory: Path, reserve_bytes: int) -> DiskSpace:
        """Read the free space of the file system of a directory.

        Args:
            directory: A directory.
            reserve_bytes: Space to reserve; at most 5 % of the file system are reserved.

        Raises:
            OSError: The directory does not exist.
        """
        space = os.statvfs(directory)
        return cls(
            space.f_bavail * space.f_frsize,
            space.f_ffree if space.f_files else None,
            min(reserve_bytes, space.f_blocks * space.f_frsize // 20),
            min(10_000, space.f_files // 20),
        )

    @property
    def full(self) -> bool:
        """Whether only the reserve, or less, is free."""
        return self.free_bytes < self.reserve_bytes or (
            self.free_inodes is not None and self.free_inodes < self.reserve_inodes
        )

    @property
    def is_ample(self) -> bool:
        """Whether more than twice the reserve is free."""
        return self.free_bytes > _AMPLE * self.reserve_bytes and (
            self.free_inodes is None or self.free_inodes > _AMPLE * self.reserve_inodes
        )

    @property
    def scarce(self) -> bool:
        """Whether less than half of the reserve is free."""
        return self.free_bytes < self.reserve_bytes // 2 or (
            self.free_inodes is not None and self.free_inodes < self.reserve_inodes // 2
        )

    def __str__(self) -> str:
        inodes = "" if self.free_inodes is None else f" and {self.free_inodes} inodes"
        return f"{self.free_bytes // 1024**2} MiB{inodes} free, {self.reserve_bytes // 1024**2} MiB are kept in reserve"


def exceeded_limit(used: Usage, limits: Limits, before: Usage) -> LimitHit | None:
    """Return the limit that a command exceeded, None if it exceeded none.

    A command of a session that was beyond a limit already may free space, so it exceeds the limit only if it uses more.

    Args:
        used: What the session uses now.
        limits: Its limits.
        before: What it used when the command began.
    """
    if used.size_bytes > max(limits.disk_bytes, before.size_bytes):
        return "disk"
    return "inodes" if used.entries > max(limits.inodes, before.entries) else None


class Growth:
    """The space that the sandboxes of a backend are known to have added to its disk since the backend was made.

    Growth of the disk's usage that this does not explain is charged to commands with files that cannot be measured.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added = self._removed = 0
        self._watches: set[DiskWatch] = set()

    @property
    def known_bytes(self) -> int:
        """Bytes added minus bytes removed."""
        with self._lock:
            return self._added - self._removed

    @property
    def added_bytes(self) -> int:
        """Bytes added, without those removed."""
        return self._added

    @property
    def removed_bytes(self) -> int:
        """Bytes removed; they are recorded after their space is free."""
        return self._removed

    def add(self, size_bytes: int) -> None:
        """Record that a sandbox added so many bytes; negative if it removed them."""
        with self._lock:
            if size_bytes > 0:
                self._added += size_bytes
            else:
                self._removed -= size_bytes

    def add_watch(self, watch: DiskWatch) -> None:
        """Register the watch of a command that begins."""
        with self._lock:
            self._watches.add(watch)

    def remove_watch(self, watch: DiskWatch) -> None:
        """Remove the watch of a command that has ended and whose sandbox was counted."""
        with self._lock:
            self._watches.discard(watch)

    def refresh(self, excluded: DiskWatch) -> None:
        """Count what all running commands but one use now; blocks."""
        with self._lock:
            others = self._watches - {excluded}
        for watch in others:
            with contextlib.suppress(OSError):  # its sandbox was destroyed
                watch.measure()


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of counting what a command uses.

    Args:
        used: What could be measured.
        is_partial: It holds more that cannot be measured.
    """

    used: Usage
    is_partial: bool


class _Look(NamedTuple):
    """The disk at a moment.

    Args:
        removed: `Growth.removed_bytes` just before.
        gone: Bytes less that are free than when the command began.
    """

    removed: int
    gone: int


class DiskWatch:
    """Watches the disk usage of one command.

    Args:
        upper: The session's writable directory.
        limits: The session's limits.
        before: Usage of ``upper`` when the command began.
        reserve_bytes: Space that is reserved for the server.
        init: Host pid of the command's pid 1.
        count_executor: Threads for counting.
        growth: The backend's known growth.
        space: Watches the file system of ``upper``.
        has_begun: Returns whether the command may run. Before that its processes are the server's own, which wait for
            descriptors in a socket; called on a thread.
    """

    def __init__(
        self,
        upper: Path,
        limits: Limits,
        before: Usage,
        reserve_bytes: int,
        init: int,
        count_executor: Executor,
        growth: Growth,
        space: FreeSpace,
        has_begun: Callable[[], bool],
    ) -> None:
        self._upper = upper
        self._limits = limits
        self._before = before
        self._reserve_bytes = reserve_bytes
        self._init = init
        self._count_executor = count_executor
        self._growth = growth
        self._space = space
        self._has_begun = has_begun
        self._most_bytes = max(limits.disk_bytes, before.size_bytes)
        self._most_entries = max(limits.inodes, before.entries)
        self._began_ns = time.time_ns() - int(_CLOCK_S * 1e9)
        self._noted = before.allocated_bytes
        self._ended = False
        self._lock = threading.Lock()
        self._known_before = growth.known_bytes
        self._free_before = DiskSpace.of(upper, reserve_bytes)
        growth.add_watch(self)

    async def run(self) -> LimitHit | Literal["full"]:
        """Wait until the command exceeds a limit, and return that; or ``full`` once it has filled the server's disk."""
        loop = asyncio.get_running_loop()
        free = last = self._free_before
        used, counted_at, took = self._before, loop.time(), 0.0
        was_partial = suspected = False
        while True:
            await self._space.wait(*self._wake_at(last, used), TICK_S if suspected else self._pause(free, last, used))
            free = DiskSpace.of(self._upper, self._reserve_bytes)
            waited = loop.time() - counted_at
            due = suspected or self._due(free, last, used)
            if free.full and self._has_grown(used):
                return "full"  # what it had at the last count is enough; the disk may be full before the next one ends
            if waited < (took if due else max(_LATEST_S, _REST * took)):
                continue
            started = loop.time()
            try:
                measured = await loop.run_in_executor(self._count_executor, self.measure)
                used, suspected = measured.used, False
                if measured.is_partial and (hidden := self._unexplained(self._look())):
                    if was_partial:
                        used = self._with(measured.used, hidden)
                        if exceeded_limit(used, self._limits, self._before) is not None:
                            # Others may have written since they were last counted: do not charge that to this command,
                            # nor what they write and remove while they are counted.
                            look = self._look()
                            await loop.run_in_executor(self._count_executor, self._growth.refresh, self)
                            used = self._with(measured.used, self._unexplained(look))
                    else:
                        suspected = True
                was_partial = measured.is_partial
            except OSError:
                continue  # counted again later; only the count at the end has to succeed
            if (hit := exceeded_limit(used, self._limits, self._before)) is not None:
                return hit
            # Even if the count misses what the command uses, it may not use up the second half of the reserve.
            if free.full and (self._has_grown(used) or free.scarce):
                return "full"
            last, counted_at = free, loop.time()
            took = counted_at - started

    def measure(self) -> Measurement:
        """Count what the command uses and record it in `Growth`; blocks.

        Raises:
            OSError: The directory cannot be read.
        """
        most_entries, most_bytes = self._most_entries, self._most_bytes
        named = as_owner.call(usage, self._upper, max_entries=most_entries, max_bytes=most_bytes)
        has_begun = self._has_begun()
        held = held_files(self._init, self._began_ns)
        self._note(named.allocated_bytes + held.size_bytes)
        total = named.size_bytes + held.size_bytes
        return Measurement(Usage(named.entries, total, named.whiteouts), has_begun and held.is_partial)

    def end(self, used: Usage) -> None:
        """End the watch and record the usage of ``upper`` after all processes have ended.

        Args:
            used: That usage; the one given as ``before`` if it could not be counted.
        """
        with self._lock:
            self._ended = True
        self._growth.remove_watch(self)
        if used is not self._before:
            self._growth.add(used.allocated_bytes - self._noted)

    def _note(self, allocated: int) -> None:
        """Record the disk space that the command uses now in `Growth`, unless the watch has ended."""
        with self._lock:
            if self._ended:  # a refresh by another watch began before the end
                return
            self._growth.add(allocated - self._noted)
            self._noted = allocated

    def _look(self) -> _Look:
        removed = self._growth.removed_bytes  # first: what is removed meanwhile is then missing below, not too much
        return _Look(removed, self._free_before.free_bytes - DiskSpace.of(self._upper, self._reserve_bytes).free_bytes)

    def _unexplained(self, look: _Look) -> int:
        """Return the bytes used on the disk, from the beginning of the command to a look at it, that no count explains.

        What was counted since the look explains them too, and what was removed since does not unexplain any, so this
        is too little rather than too much; 0 if they are few.
        """
        unexplained = look.gone - (self._growth.added_bytes - look.removed - self._known_before)
        return unexplained if unexplained > self._most_bytes // _UNEXPLAINED else 0

    def _with(self, used: Usage, hidden: int) -> Usage:
        return Usage(used.entries, used.size_bytes + hidden, used.whiteouts)

    def _has_grown(self, used: Usage) -> bool:
        return used.size_bytes > self._before.size_bytes or used.entries > self._before.entries

    def _left(self, free: DiskSpace, last: DiskSpace, used: Usage) -> tuple[int, int]:
        """Return how many bytes and inodes are left to the limits if the command used all that the disk lost.

        Args:
            free: What is free now.
            last: What was free when ``used`` was counted.
            used: What the command used then.
        """
        taken = max(0, last.free_bytes - free.free_bytes)
        made = max(0, (last.free_inodes or 0) - (free.free_inodes or 0))
        return self._most_bytes - used.size_bytes - taken, self._most_entries - used.entries - made

    def _due(self, free: DiskSpace, last: DiskSpace, used: Usage) -> bool:
        """Return whether to count: the reserve is reached or near, or half of the rest to a limit may be used."""
        size, entries = self._left(free, last, used)
        return (
            free.full
            or last.is_ample > free.is_ample
            or size * 2 <= self._most_bytes - used.size_bytes
            or entries * 2 <= (self._most_entries - used.entries)
        )

    def _wake_at(self, last: DiskSpace, used: Usage) -> tuple[int, int]:
        """Return the free bytes and inodes at which to wake up: half of the rest to a limit may be used, or the reserve
        is near.

        Args:
            last: What was free when ``used`` was counted.
            used: What the command used then.
        """
        free_bytes = last.free_bytes - (self._most_bytes - used.size_bytes + 1) // 2
        free_inodes = (last.free_inodes or 0) - (self._most_entries - used.entries + 1) // 2
        reserves = _AMPLE if last.is_ample else 1
        return max(free_bytes, reserves * last.reserve_bytes), max(free_inodes, reserves * last.reserve_inodes)

    def _pause(self, free: DiskSpace, last: DiskSpace, used: Usage) -> float:
        """Return the longest time to sleep, in seconds: `statvfs` of some file systems does not show inodes."""
        _, entries = self._left(free, last, used)
        return min(max(entries / _FASTEST_INODES_PER_S, TICK_S), _LATEST_S)
