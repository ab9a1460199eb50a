"""The lease of a data directory: a file of 24 bytes on the server's own box, written by its keeper (decision 210).

The keeper renews the lease at a registry and writes here until when it lasts; the server looks before it acknowledges.
Both map the file, so a look costs no system call but that of the clock. The checksum has the boot's id in it: a value
that is half written, and one of an earlier boot, whose clock was another, are no leases.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import time
import zlib
from pathlib import Path

from errata_protocol.errors import JournalUnavailable

_FORM = struct.Struct("<QQQ")
_BODY = struct.Struct("<QQ")
_LOOKS = 100
"""So many times a value that is being written is looked at again; then it counts as none."""


def now_ns() -> int:
    """Return the time by which leases are counted, in ns; it goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the random id of this boot of this box, which the kernel draws."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


class LeaseWriter:
    """The keeper's end of a lease file.

    Args:
        path: Path of the file, on the box of the server and of no other; made if missing, without a lease in it.

    Raises:
        OSError: It cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self._seed = _boot()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _FORM.size)
            self._map = mmap.mmap(descriptor, _FORM.size)
        finally:
            os.close(descriptor)

    def grant(self, epoch: int, until_ns: int) -> None:
        """Write a lease.

        Args:
            epoch: Epoch of the registry's grant.
            until_ns: When it ends, by `now_ns`: the length of the lease after that clock was read, which the keeper
                does before it asks the registry.
        """
        self._map[:] = _FORM.pack(epoch, until_ns, _check(epoch, until_ns, self._seed))

    def close(self) -> None:
        """Close the file; what it says stays."""
        self._map.close()


class Lease:
    """The server's end of a lease file. Any thread may look.

    Args:
        path: Path of the file.

    Attributes:
        epoch: Epoch of the lease when this was made.

    Raises:
        JournalUnavailable: There is no such file, or it has no lease of this boot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seed = _boot()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise JournalUnavailable(f"cannot open the lease {path}: {error.strerror}; its keeper writes it") from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != _FORM.size:
                raise JournalUnavailable(
                    f"{path} is no lease, which is a file of {_FORM.size} bytes: name the one that the keeper writes"
                )
            self._map = mmap.mmap(descriptor, _FORM.size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        value = self._read()
        if value is None:
            raise JournalUnavailable(f"{path} has no lease of this boot: its keeper has to take one first")
        self.epoch = value[0]

    def is_valid(self) -> bool:
        """Return whether the directory is still this server's."""
        value = self._read()
        return value is not None and value[0] == self.epoch and now_ns() < value[1]

    def is_lost(self) -> bool:
        """Return whether the keeper has a later lease, so that this one does not come back."""
        value = self._read()
        return value is not None and value[0] != self.epoch

    def left_s(self) -> float:
        """Return the seconds until it ends; 0 when it has."""
        value = self._read()
        return max(0.0, (value[1] - now_ns()) / 1e9) if value is not None and value[0] == self.epoch else 0.0

    def _read(self) -> tuple[int, int] | None:
        for _ in range(_LOOKS):
            epoch, until_ns, check = _FORM.unpack_from(self._map)
            if check == _check(epoch, until_ns, self._seed):
                return epoch, until_ns
        return None


def _check(epoch: int, until_ns: int, seed: int) -> int:
    return 1 << 32 | zlib.crc32(_BODY.pack(epoch, until_ns), seed)  # never 0: a file of zeros has no lease


def _boot() -> int:
    return zlib.crc32(boot_id().encode())
