"""Finds the files without a name that a command's processes hold: no walk of its directory meets these.

A file can be held by a descriptor, a mapping, as a program or as a working directory, of any thread. A descriptor that
is under way in a unix socket is held by nobody who could be asked: its size cannot be measured, only that it is there.
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
_KCMP = {"x86_64": 312, "aarch64": 272}
_KCMP_FILES = 2
_PENDING = re.compile(rb"^scm_fds:\s*([1-9])", re.MULTILINE)
_OF_MEMORY = (b"/memfd:", b"/dev/", b"/SYSV", b"/[aio]")
"""Names of deleted mappings that are no file of a disk. An agent can make none in the root directory of rootless mode,
the only one in which names are looked at."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the processes of a command hold without a name.

    Args:
        size_bytes: Space of what was measured.
        is_partial: There is more that cannot be measured: descriptors under way in a socket; and in rootless mode
            mappings without a descriptor and processes that closed themselves to the server's user.
    """

    size_bytes: int = 0
    is_partial: bool = False


def held_files(init: int, since_ns: int) -> Held:
    """Return what the processes of a command hold without a name, beside the running command.

    Args:
        init: Host pid of the command's pid 1.
        since_ns: When the command began: what changed earlier is a file of a frozen layer, which keeps its name there.
    """
    search = _Search(since_ns)
    for pid, tasks in _below(init):
        search.process(pid, tasks)
        if len(search.found) > _HELD_MAX:
            break
    return Held(sum(search.found.values()), search.is_partial)


class _Search:
    def __init__(self, since_ns: int) -> None:
        self.found: dict[tuple[int, int], int] = {}
        self.is_partial = False
        self._since_ns = since_ns
        # An overlay's files may have yet another device than its directories, so what is memory is left out instead.
        self._memory = {_memory_device()}
        self._has_shared_memory = False
        self._sockets: set[int] = set()

    def process(self, pid: int, tasks: list[int]) -> None:
        if not self._has_shared_memory:  # one mount for all of them
            try:
                self._memory.add(os.stat(f"/proc/{pid}/root/dev/shm").st_dev)  # noqa: PTH116 - a magic link
                self._has_shared_memory = True
            except OSError:
                pass  # it has ended, or no root yet; a thread of it may be there all the same
        first = 0
        for task in tasks:
            place = f"/proc/{pid}/task/{task}"
            # A thread may have descriptors of its own, and the first one may have ended before the others.
            if not first or not _share_files(first, task):
                self._task(place)
                first = first or task

    def _task(self, place: str) -> None:
        for name in ("exe", "cwd"):
            self._look(f"{place}/{name}")
        try:
            descriptors = os.listdir(f"{place}/fd")  # noqa: PTH208
        except PermissionError:
            # Root without CAP_SYS_PTRACE may look at nothing at all, which says nothing of one process.
            self.is_partial |= os.geteuid() != 0
            return
        except OSError:
            return  # it has ended
        for fd in descriptors:
            info = self._look(f"{place}/fd/{fd}")
            if info is not None and stat.S_ISSOCK(info.st_mode) and info.st_ino not in self._sockets:
                self._sockets.add(info.st_ino)
                self.is_partial |= _has_pending(f"{place}/fdinfo/{fd}")
        for start_end, name in _deleted_mappings(place):
            try:
                self._count(os.stat(f"{place.partition('/task')[0]}/map_files/{start_end}"))  # noqa: PTH116
            except PermissionError:
                self.is_partial |= os.geteuid() != 0 and not name.startswith(_OF_MEMORY)
            except OSError:
                continue

    def _look(self, path: str) -> os.stat_result | None:
        try:
            info = os.stat(path)  # noqa: PTH116 - a magic link
        except OSError:
            return None
        self._count(info)
        return info

    def _count(self, info: os.stat_result) -> None:
        is_file = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
        nameless = info.st_nlink == 0 and is_file and info.st_dev not in self._memory
        if nameless and info.st_ctime_ns >= self._since_ns:
            self.found[info.st_dev, info.st_ino] = info.st_blocks * 512


@functools.cache
def _memory_device() -> int:
    fd = os.memfd_create("device")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _below(init: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the pids of all descendants with their threads: all in a pid namespace descend from its first process."""
    todo = [init]
    while todo:
        pid = todo.pop()
        tasks = _tasks(pid)
        for task in tasks:
            try:
                with open(f"/proc/{pid}/task/{task}/children", "rb") as children:  # noqa: PTH123
                    todo.extend(int(child) for child in children.read().split())
            except OSError:
                continue  # ended meanwhile; its children are pid 1's, and met by the next look
        if pid != init:
            yield pid, tasks


def _tasks(pid: int) -> list[int]:
    try:
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except OSError:
        return []


def _share_files(one: int, other: int) -> bool:
    """Say whether two threads have the same descriptors; False where that cannot be known."""
    number = _KCMP.get(platform.machine())
    if number is None:
        return False
    values = [ctypes.c_long(value) for value in (number, one, other, _KCMP_FILES, 0, 0)]
    return bool(_libc().syscall(*values) == 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _has_pending(fdinfo: str) -> bool:
    """Say whether descriptors wait in a socket, or in a connection that nobody accepted yet."""
    try:
        with open(fdinfo, "rb") as file:  # noqa: PTH123
            return _PENDING.search(file.read()) is not None
    except OSError:
        return False


def _deleted_mappings(place: str) -> Iterator[tuple[str, bytes]]:
    """Yield the address range, as ``map_files`` names it, and the former name of each mapping of a deleted file."""
    try:
        with open(f"{place}/maps", "rb") as maps:  # noqa: PTH123
            for line in maps:
                if line.endswith(b" (deleted)\n"):
                    fields = line.split(None, 5)
                    start, end = (int(address, 16) for address in fields[0].split(b"-"))
                    yield f"{start:x}-{end:x}", fields[5]
    except OSError:
        return
