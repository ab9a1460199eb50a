"""`Disk`: the file operations that segments need (append, fsync, read, rename); `DirectoryDisk` does them on a
directory.

What is written is not there after a power loss until it was synced; neither is a file's name until `Disk.sync_names`.
Every call may raise OSError, as the operating system does. `errata_server.simulation.SimulatedDisk` is the fake: it
tears and loses what was not synced.
"""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self


class Disk(ABC):
    """One directory of files that only grow, or are cut at the end."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files, sorted."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file whole."""

    @abstractmethod
    def read_at(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Return ``size_bytes`` of a file from ``offset`` on, or what there is of them. Any thread may call this."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Append ``data`` to a file; create the file if it is missing. Not durable before `sync`. After an error, the
        file may have a part of ``data``."""

    def append_synced(self, name: str, data: bytes) -> None:
        """`append` and `sync`, where there is no way to do both at once; raises as either does."""
        self.append(name, data)
        self.sync(name)

    @abstractmethod
    def rewrite(self, name: str, offset: int, data: bytes) -> None:
        """Write ``data`` where the same bytes stand already, and sync: they are durable then, whatever became of an
        earlier sync of theirs."""

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
    def rename(self, name: str, to: str) -> None:
        """Give a file another name, in one step and in place of a file that had it."""

    @abstractmethod
    def link_from(self, other: Self, name: str) -> None:
        """Give a file of another directory on the same file system a further name, the same one, here.

        Raises:
            OSError: The file system has no such links, or this directory has a file of that name.
        """

    @abstractmethod
    def sync_names(self) -> None:
        """Make it durable which files exist."""

    @abstractmethod
    def free(self) -> tuple[int, int]:
        """Return free and total bytes of the file system."""


MAX_OPEN = 32
"""Files that a `DirectoryDisk` keeps open."""

LOOK_S = 0.01
"""How long a figure of free space is reused: asking the kernel before each step would cost too much."""


class DirectoryDisk(Disk):
    """A directory of the machine.

    Keeps up to `MAX_OPEN` files open: beside a busy event loop each system call waits up to 5 ms for the interpreter
    lock when it returns, so a step should make one and not four.

    Args:
        directory: Where.
        make: Whether to make it with its parents if it is missing, for its owner alone.
    """

    def __init__(self, directory: Path, *, make: bool = True) -> None:
        self._directory = directory
        self._space: tuple[float, tuple[int, int]] | None = None
        self._open: dict[tuple[str, bool], io.FileIO] = {}
        self._open_lock = threading.Lock()
        if make:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._directory.iterdir() if path.is_file())

    def read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def read_at(self, name: str, offset: int, size_bytes: int) -> bytes:
        file = self._file(
            name
        )  # this reference keeps it open during the read: another thread may drop it from the cache
        return os.pread(file.fileno(), size_bytes, offset)

    def size(self, name: str) -> int:
        return (self._directory / name).stat().st_size

    def append(self, name: str, data: bytes) -> None:
        self._append(name, data, 0)

    def rewrite(self, name: str, offset: int, data: bytes) -> None:
        fd = os.open(self._directory / name, os.O_WRONLY | os.O_CLOEXEC)  # not for appending, or it would append
        try:
            rest = memoryview(data)
            while rest:
                written = os.pwrite(fd, rest, offset)
                rest, offset = rest[written:], offset + written
            os.fsync(fd)
        finally:
            os.close(fd)

    def append_synced(self, name: str, data: bytes) -> None:
        try:
            self._append(name, data, os.RWF_DSYNC)  # one call in place of two, and so one wait for the interpreter
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            super().append_synced(name, data)  # a file system that has no such write, such as FUSE before Linux 6

    def _append(self, name: str, data: bytes, flags: int) -> None:
        file = self._file(name, writing=True)
        rest = memoryview(data)
        while rest:
            # At its end, wherever that is: the file was opened for appending.
            rest = rest[os.pwritev(file.fileno(), [rest], 0, flags) :]

    def truncate(self, name: str, size_bytes: int) -> None:
        os.truncate(self._directory / name, size_bytes)

    def sync(self, name: str) -> None:
        file = self._file(name, writing=True)
        os.fdatasync(file.fileno())  # the new size too, which reading needs; not its times

    def remove(self, name: str) -> None:
        self._forget(name)
        (self._directory / name).unlink()

    def rename(self, name: str, to: str) -> None:
        (self._directory / name).rename(self._directory / to)
        self._forget(name, to)

    def link_from(self, other: Self, name: str) -> None:
        os.link(other._directory / name, self._directory / name)

    def sync_names(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self) -> tuple[int, int]:
        now = time.monotonic()
        if self._space is None or now - self._space[0] > LOOK_S:
            stats = os.statvfs(self._directory)
            self._space = (now, (stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize))
        return self._space[1]

    def _file(self, name: str, *, writing: bool = False) -> io.FileIO:
        """Return an open file. It stays open as long as something refers to it, also when it leaves the cache."""
        with self._open_lock:
            file = self._open.pop((name, writing), None)
            if file is None:
                path = self._directory / name
                file = io.FileIO(path, "ab", opener=_private) if writing else io.FileIO(path, "rb")
                while len(self._open) >= MAX_OPEN:
                    del self._open[next(iter(self._open))]
            self._open[name, writing] = file  # at the end: the one that was used longest ago goes first
            return file

    def _forget(self, *names: str) -> None:
        with self._open_lock:
            for name in names:
                self._open.pop((name, False), None)
                self._open.pop((name, True), None)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
