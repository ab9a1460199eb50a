"""The processes of a server with several workers, as the kernel names them."""

from __future__ import annotations

import time
from pathlib import Path

LOOKS = 12_000
PAUSE_S = 0.01


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children, those of its first thread, in the order of their starts."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker_of(directory: Path) -> int:
    """Return the process id of the worker that holds a data directory's lock, once one does."""
    inode = (directory / "lock").stat().st_ino
    for _ in range(LOOKS):
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        for fields in locks:
            if fields[5].endswith(f":{inode}"):
                return int(fields[4])
        time.sleep(PAUSE_S)
    raise AssertionError(f"no process holds the lock of {directory}")
