"""What the machine is, and what its disk is."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import version
from pathlib import Path

from .report import Machine

IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
PACKAGES = ("openenv-errata", "openenv", "uvicorn", "uvloop", "websockets", "pydantic", "msgspec", "apsw")


def file_system(directory: Path, mounts: str | None = None) -> str:
    """Return the kind of file system that a directory lies on.

    Args:
        directory: Which.
        mounts: Text of ``/proc/mounts``; this process's own by default.
    """
    best = ("", "unknown")
    for line in (Path("/proc/mounts").read_text() if mounts is None else mounts).splitlines():
        _, mounted, kind, *_ = line.split()
        mounted = mounted.replace("\\040", " ")
        if directory.resolve().is_relative_to(mounted) and len(mounted) >= len(best[0]):
            best = (mounted, kind)
    return best[1]


def describe(directory: Path, load_before: float) -> Machine:
    """Return this machine's facts, and its load since the run began."""
    cpus = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=cpus[0] if cpus else platform.machine(),
        cores=os.cpu_count() or 0,
        memory_gib=round(pages / 1024**3, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        versions={name: version(name) for name in PACKAGES},
        data_dir=str(directory),
        file_system=file_system(directory),
        load_average_before=round(load_before, 2),
        load_average_after=round(os.getloadavg()[0], 2),
    )


def allow_descriptors() -> int:
    """Raise this process's limit of open files, which its children inherit, as far as may be; return it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
