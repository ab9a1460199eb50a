"""The memory, pids and cpu cgroups of commands. Each slot has a directory, which later commands use again.

`find` tries cgroup v2 with both controllers, then the two v1 hierarchies, then uses none. Moving a process between
cgroups is slow, so a runner joins its slot's cgroup before it gets a command, and a command costs at most one write for
each limit that differs from the last command's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from errata_os.division import ALONE, Division

from ..base import Limits

_ROOT = Path("/sys/fs/cgroup")
_LEAF = "errata-server"
"""Cgroup of the server itself in version 2, next to those of sandboxes; the launcher uses the same name."""
_EMPTYING = 8
"""Attempts to reclaim the page cache of a v1 cgroup until a lower limit can be set."""
_SOCKET_SHARE = 4
"""TCP buffers of a v1 slot are limited to the memory limit divided by this."""
_CPU_WEIGHT = {1: 512, 2: 50}
"""CPU weight of all sandboxes together, by cgroup version: half of the default, which the server has, so that its
event loops are scheduled before their commands. The sandboxes of one of several processes have a part of it."""
_LEAST_WEIGHT = {1: 2, 2: 1}


@dataclass(frozen=True, slots=True)
class Counters:
    """Events in a slot since its cgroup was made.

    Args:
        oom_kills: Processes that the kernel killed at the memory limit.
        pids_refused: Forks that failed at the limit of processes.
    """

    oom_kills: int = 0
    pids_refused: int = 0


class Cgroups:
    """The cgroup directories of one data directory.

    Args:
        name: Name of the directory in each hierarchy; the same after a restart.
        version: 2, 1, or 0 if no cgroups can be used.
        memory: The directory in the hierarchy that has the memory controller.
        pids: The directory in the hierarchy that has the pids controller; the same as ``memory`` in version 2.
        note: Why no cgroups can be used; else empty.
        cpu: The directory with the cpu controller, which gives slots equal shares of the CPU; None if there is none.
    """

    def __init__(
        self, name: str, version: int, memory: Path, pids: Path, note: str = "", cpu: Path | None = None
    ) -> None:
        self.name = name
        self.version = version
        self.note = note
        self._memory = memory
        self._pids = pids
        self._cpu = cpu
        self._applied: dict[str, tuple[int, int]] = {}

    @property
    def roots(self) -> list[str]:
        """The directories, one per hierarchy, below which each slot has a directory."""
        places = [self._memory, self._pids, *([self._cpu] if self._cpu else [])]
        return list(dict.fromkeys(str(place) for place in places)) if self.version else []

    @property
    def shares_cpu(self) -> bool:
        """Whether each slot gets the same share of the CPU, however many busy processes it has."""
        return self._cpu is not None

    @property
    def launcher_procs(self) -> list[str]:
        """``cgroup.procs`` files for the launcher, of leaves: v2 forbids processes in a cgroup with children."""
        return [f"{root}/launcher/cgroup.procs" for root in self.roots]

    def has(self, slot: str, limits: Limits) -> bool:
        """Return whether a slot has these limits already; True without cgroups."""
        return not self.version or self._applied.get(slot) == (limits.memory_bytes, limits.pids)

    def apply(self, slot: str, limits: Limits) -> None:
        """Set the limits of a slot unless it has them. May block: a lower memory limit makes the kernel reclaim pages.

        Raises:
            OSError: A limit cannot be set.
        """
        wanted = (limits.memory_bytes, limits.pids)
        if self.has(slot, limits):
            return
        memory, pids = self._memory / slot, self._pids / slot
        _write(pids / "pids.max", limits.pids)
        if self.version == 2:
            _write(memory / "memory.max", limits.memory_bytes)
            _write_if_there(memory / "memory.swap.max", 0)
        else:
            # The limit with swap may never be lower than the one without: so it is lifted first.
            swap = memory / "memory.memsw.limit_in_bytes"
            _write_if_there(swap, -1)
            _write_limit(memory, limits.memory_bytes)
            _write_if_there(swap, limits.memory_bytes)
            # Version 1 counts socket buffers separately, and only if they have a limit: 400 connections held 1.6 GiB.
            _write_if_there(memory / "memory.kmem.tcp.limit_in_bytes", limits.memory_bytes // _SOCKET_SHARE)
        self._applied[slot] = wanted

    def counters(self, slot: str) -> Counters:
        """Return a slot's counters; zeros without cgroups.

        Raises:
            OSError: They cannot be read.
        """
        if not self.version:
            return Counters()
        events = "memory.events" if self.version == 2 else "memory.oom_control"
        return Counters(
            _read_counter(self._memory / slot / events, b"oom_kill "),
            _read_counter(self._pids / slot / "pids.events", b"max "),
        )

    def forget(self) -> None:
        """Forget which limits were set, because a new launcher makes new cgroups."""
        self._applied.clear()

    def remove(self) -> None:
        """Kill the processes in these cgroups and remove them, for at most 10 s per hierarchy.

        Called before a launcher starts and after it has ended. What cannot be removed stays, without an error; a
        directory with another user's process in it is not waited for.
        """
        for root in self.roots:
            directory = Path(root)
            deadline = time.monotonic() + 10.0
            while directory.is_dir() and time.monotonic() < deadline:
                killed, kept = _kill_below(directory)
                if not killed and (_remove_below(directory) or kept):
                    break
                time.sleep(0.01)


def _write(path: Path, value: int) -> None:
    """Write a number to a file of a cgroup."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"%d" % value)
    finally:
        os.close(fd)


def _write_limit(memory: Path, value: int) -> None:
    """Set a v1 memory limit, reclaiming the page cache of the slot's last command if it exceeds the new limit.

    Raises:
        OSError: EBUSY: too much memory is still in use.
    """
    for _ in range(_EMPTYING):
        try:
            return _write(memory / "memory.limit_in_bytes", value)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        with contextlib.suppress(OSError):  # EBUSY too, while pages are being written back
            _write(memory / "memory.force_empty", 0)
    return _write(memory / "memory.limit_in_bytes", value)


def _write_if_there(path: Path, value: int) -> None:
    """Write a number to a file of a cgroup; ignore errors, because not every kernel has the file."""
    try:
        _write(path, value)
    except OSError:
        pass  # a kernel without swap accounting has no such file


def _read_counter(path: Path, key: bytes) -> int:
    """Return the number behind a key in a cgroup's file; 0 if the key is missing."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for line in os.read(fd, 4096).splitlines():
            if line.startswith(key):
                return int(line[len(key) :])
    finally:
        os.close(fd)
    return 0


def _kill_below(directory: Path) -> tuple[int, int]:
    """Kill every process in the cgroup ``directory`` and its children.

    Returns:
        How many of them were killed or had just ended, and how many stay because they are another user's.
    """
    killed = kept = 0
    for path in [directory, *_children(directory)]:
        try:
            pids = [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
        except OSError:
            continue
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:
                kept += 1
                continue
            killed += 1
    return killed, kept


def _remove_below(directory: Path) -> bool:
    """Remove a cgroup and those of its children that have no processes; return False if any is left."""
    for path in (*_children(directory), directory):
        with contextlib.suppress(OSError):
            path.rmdir()
    return not directory.is_dir()


def _children(directory: Path) -> list[Path]:
    """Return the child cgroups of a cgroup; none if it is gone."""
    try:
        return [child for child in directory.iterdir() if child.is_dir()]
    except OSError:
        return []


def prepare() -> None:
    """Let processes that are forked from this one give limits to their commands, each by itself.

    In version 2 the kernel allows that below a cgroup that has no processes of its own. A process alone moves into a
    leaf when it starts its sandboxes. Of several that share a cgroup none could move the others, so they are born in
    the leaf. What cannot be prepared is left as it is: `find` then says why.
    """
    places = _v2_places(_own_paths())
    if places is not None:
        with contextlib.suppress(OSError):
            _enable_controllers(places[0])
            _enable_cpu(places[0])


def find(name: str, division: Division = ALONE) -> Cgroups:
    """Make a directory for sandboxes in each cgroup hierarchy, in version 2 or else in version 1.

    Directories of this name that an earlier process left are removed, and the processes in them killed. A limit is set
    in a child cgroup as a test, and the sandboxes together get a higher CPU weight.

    Args:
        name: Name of the directories.
        division: Which part of the CPU weight of sandboxes is this process's.

    Returns:
        The cgroups; with version 0 if neither version can be used: `Cgroups.note` then says why.
    """
    own = _own_paths()
    problems = []
    for version, places in ((2, _v2_places(own)), (1, _v1_places(own))):
        if places is None:
            continue
        memory, pids = places[0] / name, places[1] / name
        cpu = _cpu_place(own, version, places[0])
        found = Cgroups(name, version, memory, pids, cpu=cpu and cpu / name)
        try:
            found.remove()
            for root in found.roots:
                if version == 2:
                    _enable_controllers(Path(root).parent)
                Path(root).mkdir(exist_ok=True)
                if version == 2:
                    _enable_controllers(Path(root))
                    _enable_cpu(Path(root))
                (Path(root) / "launcher").mkdir(exist_ok=True)
                (Path(root) / "probe").mkdir(exist_ok=True)
            if cpu is not None:
                weight = division.share(_CPU_WEIGHT[version], _LEAST_WEIGHT[version])
                _write_if_there(cpu / name / ("cpu.weight" if version == 2 else "cpu.shares"), weight)
            found.apply("probe", Limits())
            found.counters("probe")
            return found
        except OSError as error:
            found.remove()
            problems.append(f"v{version}: {error.strerror} ({error.filename})")
    why = "; ".join(problems) or "neither hierarchy has the memory and pids controllers"
    scope = f"systemd-run {'' if os.geteuid() == 0 else '--user '}--scope -p Delegate=yes errata serve ..."
    note = f"no writable cgroup: {why}. Run with /sys/fs/cgroup writable, or in a cgroup of its own: {scope}"
    return Cgroups(name, 0, _ROOT, _ROOT, note)


def _own_paths() -> dict[str, str]:
    """Return the paths of this process's cgroups by controller name; the name of the v2 one is empty."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found.update((controller, path) for controller in controllers.split(","))
    return found


def _v2_places(own: dict[str, str]) -> tuple[Path, Path] | None:
    """Return the parent cgroups for memory and pids in v2, which are the same; None if a controller is missing."""
    place = _ROOT / own.get("", "/").lstrip("/")
    if not (place / "cgroup.procs").exists():
        place = _ROOT  # as in version 1: the host's path, in a container
    if place.name == _LEAF:
        place = place.parent  # an earlier start moved this process; sandboxes use the parent as before
    try:
        controllers = (place / "cgroup.controllers").read_text().split()
    except OSError:
        return None
    return (place, place) if {"memory", "pids"} <= set(controllers) else None


def _v1_places(own: dict[str, str]) -> tuple[Path, Path] | None:
    """Return the parent cgroups for memory and pids in v1; None if one is not mounted."""
    places = tuple(_ROOT / name / own.get(name, "/").lstrip("/") for name in ("memory", "pids"))
    if not all((place / "cgroup.procs").exists() for place in places):
        # In a container /proc/self/cgroup may have paths of the host, while only the container's cgroup is mounted.
        places = tuple(_ROOT / name for name in ("memory", "pids"))
    return (places[0], places[1]) if all((place / "cgroup.procs").exists() for place in places) else None


def _cpu_place(own: dict[str, str], version: int, memory: Path) -> Path | None:
    """Return the parent cgroup for the cpu controller, None without one; in v2 it is ``memory``, if enabled there."""
    if version == 2:
        return memory if "cpu" in (memory / "cgroup.controllers").read_text().split() else None
    for place in (_ROOT / "cpu" / own.get("cpu", "/").lstrip("/"), _ROOT / "cpu"):
        if os.access(place / "cgroup.procs", os.W_OK):
            return place
    return None


def _enable_cpu(place: Path) -> None:
    """Enable the cpu controller for the children of a v2 cgroup if possible; it is optional, so errors are ignored."""
    for level in (place.parent, place):
        with contextlib.suppress(OSError):
            (level / "cgroup.subtree_control").write_text("+cpu")


def _enable_controllers(place: Path) -> None:
    """Enable the memory and pids controllers for the children of a v2 cgroup.

    The kernel refuses that for a cgroup with processes, except the root. Then its processes are moved into a leaf, but
    only if all are this process, its ancestors or its descendants: so in a container, not in a shared login session.

    Raises:
        OSError: The controllers cannot be enabled.
    """
    control = place / "cgroup.subtree_control"
    if {"memory", "pids"} <= set(control.read_text().split()):
        return
    try:
        control.write_text("+memory +pids")
    except OSError:
        pids = [int(pid) for pid in (place / "cgroup.procs").read_text().split()]
        related = {os.getpid(), *_ancestors(os.getpid())}
        if any(pid not in related and os.getpid() not in _ancestors(pid) for pid in pids):
            raise
        leaf = place / _LEAF
        leaf.mkdir(exist_ok=True)
        for pid in pids:
            (leaf / "cgroup.procs").write_text(str(pid))
        control.write_text("+memory +pids")


def _ancestors(pid: int) -> list[int]:
    """Return the ancestors of a process, up to pid 1 of the pid namespace."""
    found: list[int] = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[1])
        except OSError:
            break
        found.append(pid)
    return found
