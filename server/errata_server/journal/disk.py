"""The disk under an append-only journal: a seam of eight calls, and the real one.

What is written is not there after a power loss until it was synced; neither is a file's name until `Disk.sync_names`.
Every call may raise OSError, as the operating system does. `errata_server.simulation.SimulatedDisk` is the fake: it
tears and loses what was not synced.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path


class Disk(ABC):
    """One directory of files that only grow, or are cut at the end."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files, sorted."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file whole."""

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Write ``data`` at the end of a file, made if there is none. When this raises, some of it may be there."""

    @abstractmethod
    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut a file off behind ``size_bytes``."""

    @abstractmethod
    def sync(self, name: str) -> None:
        """Make what a file holds durable. When this raises, what was written since the last sync may be lost for good,
        whatever a later sync says: write it again."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file."""

    @abstractmethod
    def sync_names(self) -> None:
        """Make files' coming and going durable."""

    @abstractmethod
    def free(self) -> tuple[int, int]:
        """Return free and total bytes of the file system."""


LOOK_S = 0.01
"""How long free space is believed in: asking the kernel gives the interpreter away, which before every step is dear."""


class DirectoryDisk(Disk):
    """A directory of the machine.

    Args:
        directory: Where; made with its parents if missing, for its owner alone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._space: tuple[float, tuple[int, int]] | None = None
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._directory.iterdir() if path.is_file())

    def read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def append(self, name: str, data: bytes) -> None:
        fd = os.open(self._directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)

    def truncate(self, name: str, size_bytes: int) -> None:
        os.truncate(self._directory / name, size_bytes)

    def sync(self, name: str) -> None:
        _sync(self._directory / name, os.O_RDWR, os.fdatasync)  # the new size too, which reading needs; not its times

    def remove(self, name: str) -> None:
        (self._directory / name).unlink()

    def sync_names(self) -> None:
        _sync(self._directory, os.O_RDONLY | os.O_DIRECTORY)

    def free(self) -> tuple[int, int]:
        now = time.monotonic()
        if self._space is None or now - self._space[0] > LOOK_S:
            stats = os.statvfs(self._directory)
            self._space = (now, (stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize))
        return self._space[1]


def _sync(path: Path, flags: int, sync: Callable[[int], None] = os.fsync) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        sync(fd)
    finally:
        os.close(fd)
