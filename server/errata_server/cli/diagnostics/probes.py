"""Measurements for ``errata doctor``: Python, data directory, free space, fsync time, descriptors, port."""

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

from ... import descriptors
from ...settings import Settings

_SYNCS = 20


@dataclass(frozen=True, slots=True)
class Space:
    """Room on the file system of the data directory. ``has_inodes`` is false where it makes them as needed."""

    free_bytes: int
    floor_bytes: int
    free_inodes: int
    has_inodes: bool = True


class Machine:
    """This machine, for a server with ``settings``.

    Args:
        settings: As ``errata serve`` would use.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.data_dir = settings.data_dir or Path(tempfile.gettempdir())

    def python(self) -> tuple[int, ...]:
        """Return the interpreter's version."""
        return tuple(sys.version_info[:3])

    def distribution(self, name: str) -> str | None:
        """Return the version of an installed distribution, None where it is not installed."""
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    def try_data_dir(self) -> str:
        """Make a file where the data directory is or would be; return why not, empty when it worked."""
        place = self._place()
        try:
            with tempfile.TemporaryFile(dir=place):
                return ""
        except OSError as error:
            return f"{self.data_dir}: no file can be made in {place} ({error.strerror})"

    def file_system(self) -> str:
        """Return the type of the file system of the data directory, as the mount table names it."""
        place = self._place().resolve()
        best, kind = Path("/"), "unknown"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            point = Path(left.split()[4].encode().decode("unicode_escape"))
            if place.is_relative_to(point) and len(point.parts) >= len(best.parts):
                best, kind = point, right.split()[0]
        return kind

    def open_files(self) -> int:
        """Return how many descriptors the server could have, which raises the limit as far as it may."""
        return descriptors.reachable()

    def space(self) -> Space:
        """Return the room for the data directory, and the floor that the server keeps."""
        found = os.statvfs(self._place())
        floor = min(self._settings.disk_floor_bytes, found.f_blocks * found.f_frsize // 20)
        return Space(found.f_bavail * found.f_frsize, floor, found.f_favail, found.f_files > 0)

    def fsync_s(self) -> float:
        """Return the median time of an fsync after a small write, seconds."""
        times = []
        with tempfile.TemporaryFile(dir=self._place()) as file:
            for _ in range(_SYNCS):
                file.write(b"x" * 4096)
                file.flush()
                started = time.perf_counter()
                os.fsync(file.fileno())
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    def try_port(self, port: int) -> str:
        """Bind a port of the loopback address; return why not, empty when it is free."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                return (
                    "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror or "refused"
                )
        return ""

    def _place(self) -> Path:
        """Return the data directory, or the nearest one above it that is there."""
        return next(path for path in (self.data_dir.absolute(), *self.data_dir.absolute().parents) if path.is_dir())
