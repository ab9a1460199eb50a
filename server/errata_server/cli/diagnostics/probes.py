"""The measurements of ``errata doctor``: Python, data directory, free space, fsync time, descriptors, port."""

from __future__ import annotations

import errno
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from errata_os import descriptors

from ...settings import Settings

_SYNCS = 20


@dataclass(frozen=True, slots=True)
class Space:
    """Free space on the file system of the data directory.

    Args:
        free_bytes: Free space.
        floor_bytes: Space that the server keeps free.
        free_inodes: Free inodes.
        has_inodes: The file system has a fixed number of inodes.
    """

    free_bytes: int
    floor_bytes: int
    free_inodes: int
    has_inodes: bool = True


class Machine:
    """Makes measurements on this machine.

    Args:
        settings: The settings that ``errata serve`` would use.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.data_dir = settings.data_dir or Path(tempfile.gettempdir())

    def python(self) -> tuple[int, ...]:
        """Return the version of the Python interpreter: major, minor, micro."""
        return tuple(sys.version_info[:3])

    def distribution(self, name: str) -> str | None:
        """Return the version of an installed distribution; None if it is not installed."""
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    def try_data_dir(self) -> str:
        """Make a file in the data directory or its nearest existing parent; return the error, "" if it worked."""
        directory = self._existing_directory()
        try:
            with tempfile.TemporaryFile(dir=directory):
                return ""
        except OSError as error:
            return f"{self.data_dir}: no file can be made in {directory} ({error.strerror})"

    def file_system(self) -> str:
        """Return the type of the data directory's file system, as in the mount table, e.g. ``ext4``."""
        directory = self._existing_directory().resolve()
        best, kind = Path("/"), "unknown"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            point = Path(left.split()[4].encode().decode("unicode_escape"))
            if directory.is_relative_to(point) and len(point.parts) >= len(best.parts):
                best, kind = point, right.split()[0]
        return kind

    def open_files(self) -> int:
        """Return how many file descriptors a server could have after raising its soft limit."""
        return descriptors.reachable()

    def space(self) -> Space:
        """Return the free space for the data directory, and the space that the server keeps free."""
        found = os.statvfs(self._existing_directory())
        floor = min(self._settings.disk_floor_bytes, found.f_blocks * found.f_frsize // 20)
        return Space(found.f_bavail * found.f_frsize, floor, found.f_favail, found.f_files > 0)

    def fsync_s(self) -> float:
        """Return the median time of 20 fsyncs, each after a write of 4 KiB, in seconds."""
        times = []
        with tempfile.TemporaryFile(dir=self._existing_directory()) as file:
            for _ in range(_SYNCS):
                file.write(b"x" * 4096)
                file.flush()
                started = time.perf_counter()
                os.fsync(file.fileno())
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def try_port(self, port: int) -> str:
        """Bind a port of the loopback address; return the reason if that fails, "" if the port is free."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                return (
                    "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or "refused"
                )
        return ""

    def _existing_directory(self) -> Path:
        """Return the data directory if it exists, else its nearest ancestor that does."""
        return next(path for path in (self.data_dir.absolute(), *self.data_dir.absolute().parents) if path.is_dir())
