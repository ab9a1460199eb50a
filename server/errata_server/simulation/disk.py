"""`SimulatedDisk`: a disk in memory. A killed process loses no write; a power loss may lose writes that were not
synced.

After `SimulatedDisk.power_loss` each write since the last sync is kept, lost, or torn at sectors, independently of the
others and drawn from the seed. Names that were made or removed since the last `sync_names` are kept or lost. A failed
sync loses writes for good although reads still return them, as on Linux.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

from ..journal.disk import Disk

SECTOR_BYTES = 512
"""The unit that a disk writes completely or not at all."""


@dataclass(slots=True)
class DiskFaults:
    """Faults of a disk. They may be changed while the disk is in use.

    Args:
        capacity_bytes: Size of the file system; an append beyond it writes what fits and raises ENOSPC.
        eio_writes: Probability that an append writes a part and raises EIO.
        eio_syncs: Probability that a sync raises EIO.
        honours_sync: If False a sync does nothing, as on a disk that lies; to check that a test notices that.
        crash_at: Number of the changing call, counted from 1, at which the machine crashes; None for no crash.
        sync_s: Shortest and longest time of a sync, in virtual seconds.
    """

    capacity_bytes: int = 2**40
    eio_writes: float = 0.0
    eio_syncs: float = 0.0
    honours_sync: bool = True
    crash_at: int | None = None
    sync_s: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class _File:
    """One file: its content on the disk, its content in the page cache, and the changes between them."""

    durable: bytearray = field(default_factory=bytearray)
    cached: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Changes since the last sync, in order: bytes at an offset, or None for a truncation to that size."""


class SimulatedDisk(Disk):
    """The disk during one boot of a machine; `power_loss` and `process_death` return that of the next boot.

    Args:
        chance: Random numbers for faults.
        faults: The faults; None for a disk without.
        on_crash: Called when ``faults.crash_at`` is reached; that call and all later ones raise EIO.

    Attributes:
        calls: Number of changing calls so far.
    """

    def __init__(
        self,
        chance: random.Random,
        faults: DiskFaults | None = None,
        *,
        on_crash: Callable[[], None] | None = None,
    ) -> None:
        self._chance = chance
        self.faults = faults or DiskFaults()
        self._on_crash = on_crash
        self._files: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._dead = False
        self.calls = 0

    def names(self) -> list[str]:
        self._check()
        return sorted(self._files)

    def read(self, name: str) -> bytes:
        self._check()
        return bytes(self._file(name).cached)

    def read_at(self, name: str, offset: int, size_bytes: int) -> bytes:
        self._check()
        return bytes(self._file(name).cached[offset : offset + size_bytes])

    def size(self, name: str) -> int:
        self._check()
        return len(self._file(name).cached)

    def append(self, name: str, data: bytes) -> None:
        self._check()
        file = self._files.setdefault(name, _File())
        fits = max(0, self.faults.capacity_bytes - sum(len(f.cached) for f in self._files.values()))
        failed = self.faults.eio_writes > 0 and self._chance.random() < self.faults.eio_writes
        written = data[: self._chance.randint(0, len(data))] if failed else data[:fits]
        if written:
            file.pending.append((len(file.cached), written))
            file.cached += written
        self._count()
        if failed:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        if len(written) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    def rewrite(self, name: str, offset: int, data: bytes) -> None:
        self._check()
        file = self._file(name)
        if bytes(file.cached[offset : offset + len(data)]) != data:
            raise AssertionError(f"{name} has other bytes at {offset}: a torn rewrite would lose them")
        file.pending.append((offset, data))
        self._count()
        self.sync(name)

    def truncate(self, name: str, size_bytes: int) -> None:
        self._check()
        file = self._file(name)
        file.pending.append((size_bytes, None))
        del file.cached[size_bytes:]
        self._count()

    def sync(self, name: str) -> None:
        self._check()
        file = self._file(name)
        self._count()  # first: a machine that crashes during a sync has written any part of it
        if self.faults.eio_syncs > 0 and self._chance.random() < self.faults.eio_syncs:
            file.durable = self._survivors(file)
            file.pending.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        if self.faults.honours_sync:
            _apply(file.durable, file.pending)
            file.pending.clear()

    def remove(self, name: str) -> None:
        self._check()
        self._file(name)
        del self._files[name]
        self._count()

    def rename(self, name: str, to: str) -> None:
        self._check()
        file = self._file(name)
        del self._files[name]
        self._files[to] = file
        self._count()

    def link_from(self, other: Self, name: str) -> None:
        self._check()
        if name in self._files:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        self._files[name] = other._file(name)
        self._count()

    def sync_names(self) -> None:
        self._check()
        self._count()
        if self.faults.honours_sync:
            self._durable_names = dict(self._files)

    def free(self) -> tuple[int, int]:
        self._check()
        used = sum(len(f.cached) for f in self._files.values())
        return max(0, self.faults.capacity_bytes - used), self.faults.capacity_bytes

    def sync_time_s(self) -> float:
        """Return a random duration for the next sync, in virtual seconds."""
        least, greatest = self.faults.sync_s
        return self._chance.uniform(least, greatest) if greatest > 0 else 0.0

    def switch_off(self) -> None:
        """Make every later call raise EIO."""
        self._dead = True

    def power_loss(self, on_crash: Callable[[], None] | None = None) -> SimulatedDisk:
        """Switch this disk off and return the disk of the next boot after a power loss; see the module's docstring."""
        survivors = {}
        for name in sorted(self._files.keys() | self._durable_names.keys()):
            now, before = self._files.get(name), self._durable_names.get(name)
            file = now if now is before or self._chance.random() < 0.5 else before
            if now is not before and file is None:
                continue
            if file is not None:
                content = self._survivors(file)
                survivors[name] = _File(content, bytearray(content))
        return self._next(survivors, on_crash)

    def process_death(self, on_crash: Callable[[], None] | None = None) -> SimulatedDisk:
        """Switch this disk off and return the disk of the next boot after ``kill -9``, which loses no write."""
        return self._next(dict(self._files), on_crash)

    def _next(self, files: dict[str, _File], on_crash: Callable[[], None] | None) -> SimulatedDisk:
        self.switch_off()
        disk = SimulatedDisk(self._chance, replace(self.faults, crash_at=None), on_crash=on_crash)
        disk._files = files
        disk._durable_names = dict(files)
        return disk

    def _survivors(self, file: _File) -> bytearray:
        """Return the content of a file after a power loss, drawn at random."""
        found = bytearray(file.durable)
        kept: list[tuple[int, bytes | None]] = []
        for at, data in file.pending:
            if data is None:
                if self._chance.random() < 0.5:
                    kept.append((at, data))
                continue
            fate = self._chance.random()
            if fate < 0.3:
                continue
            if fate < 0.6:
                kept.append((at, data))
                continue
            first = -at % SECTOR_BYTES
            edges = [0, *range(first, len(data), SECTOR_BYTES), len(data)]
            for start, end in pairwise(edges):
                if self._chance.random() < 0.5:
                    kept.append((at + start, data[start:end]))
        _apply(found, kept)
        return found

    def _file(self, name: str) -> _File:
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._files[name]

    def _check(self) -> None:
        if self._dead:
            raise OSError(errno.EIO, "the machine is down")

    def _count(self) -> None:
        """Count a changing call, and crash if it is the one."""
        self.calls += 1
        if self.faults.crash_at is not None and self.calls >= self.faults.crash_at:
            self._dead = True
            if self._on_crash is not None:
                self._on_crash()
            raise OSError(errno.EIO, "the machine is down")


def _apply(content: bytearray, changes: list[tuple[int, bytes | None]]) -> None:
    """Apply changes to a content, in order."""
    for at, data in changes:
        if data is None:
            del content[at:]
        else:
            if len(content) < at:
                content += bytes(at - len(content))  # a hole reads as zeros
            content[at : at + len(data)] = data
