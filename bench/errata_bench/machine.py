"""Describes the machine, its disk and a second interpreter; raises the limit of open files."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
from importlib.metadata import version
from pathlib import Path

import errata_server

from .report import Interpreter, Machine

IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
PACKAGES = ("openenv-errata", "openenv", "uvicorn", "uvloop", "websockets", "pydantic", "msgspec", "apsw")


def file_system(directory: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that holds a directory.

    Args:
        directory: The directory.
        mounts: Text of ``/proc/mounts``; that of this process by default.
    """
    best = ("", "unknown")
    for line in (Path("/proc/mounts").read_text() if mounts is None else mounts).splitlines():
        _, mounted, kind, *_ = line.split()
        mounted = mounted.replace("\\040", " ")
        if directory.resolve().is_relative_to(mounted) and len(mounted) >= len(best[0]):
            best = (mounted, kind)
    return best[1]


def describe(directory: Path, load_before: float) -> Machine:
    """Return the description of this machine, with its load before the run and now."""
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


def interpreter(python: Path) -> Interpreter:
    """Return the description of a second interpreter.

    Raises:
        ValueError: It does not start, has no Errata, or has the same installation as this interpreter.
    """
    program = (
        "import json, platform; from importlib.metadata import version; import errata_server;"
        'print(json.dumps([platform.python_version(), version("openenv-errata"), errata_server.__file__]))'
    )
    try:
        # -P: the current directory may hold a package of that name.
        made = subprocess.run([python, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"--against {python} does not start: {error}") from error
    if made.returncode:
        why = made.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"--against {python} cannot import Errata ({why}): {python} -m pip install CHECKOUT")
    release, errata, file = json.loads(made.stdout)
    location = Path(file).resolve().parent
    if location == Path(errata_server.__file__).resolve().parent:
        raise ValueError(f"--against {python} has the same installation, {location}: give another checkout's")
    return Interpreter(executable=str(python), python=release, errata=errata, location=str(location))


def allow_descriptors() -> int:
    """Raise this process's limit of open files to the hard limit; child processes inherit it. Return it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
