"""Finds deleted files that a command's processes still hold open, which a walk of the file tree does not find.

A file can be held by a descriptor, by a mapping, as the program or as the working directory, of any thread. Descriptors
that were sent to a unix socket and not yet received belong to no process: it can be seen that there are some, but not
how large their files are.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

_HELD_MAX = 65_536
"""The search stops after so many files."""
_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_FILES = 2
_PENDING = re.compile(rb"^scm_fds:\s*([1-9])", re.MULTILINE)
_OF_MEMORY = (b"/memfd:", b"/dev/", b"/SYSV", b"/[aio]")
"""Names of deleted mappings that are not files on a disk. Used in rootless mode only, where the agent cannot make files
with such names, because the root directory is read-only."""


@dataclass(frozen=True, slots=True)
class Held:
    """The deleted files that the processes of a command hold open.

    Args:
        size_bytes: Disk space of the files that were found.
        is_partial: There may be more that cannot be measured: descriptors in a unix socket and, in rootless mode,
            mappings without a descriptor and processes that the server's user may not inspect.
    """

    size_bytes: int = 0
    is_partial: bool = False


def held_files(init: int, since_ns: int) -> Held:
    """Return the deleted files that the processes of a running command hold open.

    Args:
        init: Host pid of the command's pid 1.
        since_ns: When the command began, in ns since 1970. Files that were last changed earlier are those of frozen
            layers, where they still have a name; they are left out.
    """
    search = _Search(since_ns)
    for pid, tasks in _below(init):
        search.process(pid, tasks)
        if len(search.found) > _HELD_MAX:
            break
    return Held(sum(search.found.values()), search.is_partial)


class _Search:
    """Searches processes for deleted files; ``found`` has their disk space by device and inode."""

    def __init__(self, since_ns: int) -> None:
        self.found: dict[tuple[int, int], int] = {}
        self.is_partial = False
        self._since_ns = since_ns
        # Files in memory are recognised by their device; those of an overlay may have several, so are not.
        self._memory = {_memory_device()}
        self._has_shared_memory = False
        self._sockets: set[int] = set()

    def process(self, pid: int, tasks: list[int]) -> None:
        """Search all threads of a process, but descriptors that threads share only once."""
        if not self._has_shared_memory:  # one mount for all of them
            try:
                self._memory.add(os.stat(f"/proc/{pid}/root/dev/shm").st_dev)  # noqa: PTH116 - a magic link
                self._has_shared_memory = True
            except OSError:
                pass  # it has ended or has no root yet; it may still have threads
        first = 0
        for task in tasks:
            place = f"/proc/{pid}/task/{task}"
            # Threads need not share their descriptors, and the first thread may have ended before the others.
            if not first or not _share_files(first, task):
                self._task(place)
                first = first or task

    def _task(self, place: str) -> None:
        """Search one thread: its program, working directory, descriptors and mappings."""
        for name in ("exe", "cwd"):
            self._look(f"{place}/{name}")
        try:
            descriptors = os.listdir(f"{place}/fd")  # noqa: PTH208
        except PermissionError:
            # Root without CAP_SYS_PTRACE may inspect no process, so for root this means nothing.
            self.is_partial |= os.geteuid() != 0
            return
        except OSError:
            return  # it has ended
        for fd in descriptors:
            info = self._look(f"{place}/fd/{fd}")
            if info is not None and stat.S_ISSOCK(info.st_mode) and info.st_ino not in self._sockets:
                self._sockets.add(info.st_ino)
                self.is_partial |= _has_pending(f"{place}/fdinfo/{fd}")
        for start_end, former_name in _deleted_mappings(place):
            try:
                self._count(os.stat(f"{place.partition('/task')[0]}/map_files/{start_end}"))  # noqa: PTH116
            except PermissionError:
                self.is_partial |= os.geteuid() != 0 and not former_name.startswith(_OF_MEMORY)
            except OSError:
                continue

    def _look(self, path: str) -> os.stat_result | None:
        """Count the file behind a link of /proc; None if there is none."""
        try:
            info = os.stat(path)  # noqa: PTH116 - a magic link
        except OSError:
            return None
        self._count(info)
        return info

    def _count(self, info: os.stat_result) -> None:
        """Add a file if it is deleted, on a disk, and changed since the command began."""
        is_file = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
        nameless = info.st_nlink == 0 and is_file and info.st_dev not in self._memory
        if nameless and info.st_ctime_ns >= self._since_ns:
            self.found[info.st_dev, info.st_ino] = info.st_blocks * 512


@functools.cache
def _memory_device() -> int:
    """Return the device number of files in memory (memfd)."""
    fd = os.memfd_create("device")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _below(init: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the pids of all descendants of a process, each with its threads.

    Every process of a pid namespace is a descendant of its pid 1.
    """
    todo = [init]
    while todo:
        pid = todo.pop()
        tasks = _tasks(pid)
        for task in tasks:
            try:
                with open(f"/proc/{pid}/task/{task}/children", "rb") as children:  # noqa: PTH123
                    todo.extend(int(child) for child in children.read().split())
            except OSError:
                continue  # it has ended; its children are now pid 1's and will be found by the next search
        if pid != init:
            yield pid, tasks


def _tasks(pid: int) -> list[int]:
    """Return the ids of a process's threads; none if it has ended."""
    try:
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except OSError:
        return []


def _share_files(one: int, other: int) -> bool:
    """Return whether two threads share their descriptors, by kcmp(2); False if that is unknown."""
    number = _KCMP.get(platform.machine())
    if number is None:
        return False
    values = [ctypes.c_long(value) for value in (number, one, other, _KCMP_FILES, 0, 0)]
    return bool(_libc().syscall(*values) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _has_pending(fdinfo: str) -> bool:
    """Return whether descriptors wait in a unix socket or in a connection that was not accepted yet."""
    try:
        with open(fdinfo, "rb") as file:  # noqa: PTH123
            return _PENDING.search(file.read()) is not None
    except OSError:
        return False


def _deleted_mappings(place: str) -> Iterator[tuple[str, bytes]]:
    """Yield the address range, in the form of ``map_files``, and the former name of each mapping of a deleted file."""
    try:
        with open(f"{place}/maps", "rb") as maps:  # noqa: PTH123
            for line in maps:
                if line.endswith(b" (deleted)\n"):
                    fields = line.split(None, 5)
                    start, end = (int(address, 16) for address in fields[0].split(b"-"))
                    yield f"{start:x}-{end:x}", fields[5]
    except OSError:
        return
