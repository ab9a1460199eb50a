"""The memory, pids and cpu cgroups of commands: found at start, one directory a slot, used again by the next command.

Probed in this order: cgroup v2 with both controllers, v1 hierarchies of both, none. Moving a process between cgroups is
slow, so a runner joins its slot's before it is lent, and a command costs at most a write per limit that differs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from ..base import Limits

_ROOT = Path("/sys/fs/cgroup")
_LEAF = "errata-server"
"""Where the server itself goes in version 2, beside the places of sandboxes; the launcher knows the name too."""
_EMPTYING = 8
_SOCKET_SHARE = 4
_CPU_WEIGHT = {1: 8 * 1024, 2: 8 * 100}
"""Of all sandboxes together, eight times that of an ordinary process: they are many, and with the weight of one a
trivial command took twice as long on a busy machine."""


@dataclass(frozen=True, slots=True)
class Counters:
    """How often the kernel stopped processes of a slot, since it was made."""

    oom_kills: int = 0
    pids_refused: int = 0


class Cgroups:
    """The cgroup directories of one data directory.

    Args:
        name: Name of our directory in each hierarchy; the same after a restart.
        version: 2, 1, or 0 where there is none.
        memory: Our directory in the hierarchy that has the memory controller.
        pids: Likewise for pids; the same directory in version 2.
        note: Why there is none, empty otherwise.
        cpu: Likewise for cpu, which shares the processors out evenly between slots; None where it cannot be had.
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
        """Directories below which a slot has its own."""
        places = [self._memory, self._pids, *([self._cpu] if self._cpu else [])]
        return list(dict.fromkeys(str(place) for place in places)) if self.version else []

    @property
    def shares_cpu(self) -> bool:
        """Whether a slot full of busy processes gets no more of the processors than another."""
        return self._cpu is not None

    @property
    def launcher_procs(self) -> list[str]:
        """The files the launcher writes itself into: a leaf, because v2 allows no process beside children."""
        return [f"{root}/launcher/cgroup.procs" for root in self.roots]

    def has(self, slot: str, limits: Limits) -> bool:
        """Say whether a slot has these limits already."""
        return not self.version or self._applied.get(slot) == (limits.memory_bytes, limits.pids)

    def apply(self, slot: str, limits: Limits) -> None:
        """Set the limits of a slot, where they differ from what it has. May block: less memory means reclaim."""
        wanted = (limits.memory_bytes, limits.pids)
        if self.has(slot, limits):
            return
        memory, pids = self._memory / slot, self._pids / slot
        _write(pids / "pids.max", limits.pids)
        if self.version == 2:
            _write(memory / "memory.max", limits.memory_bytes)
            _write_if_there(memory / "memory.swap.max", 0)
        else:
            # The limit with swap may never be below the one without, whichever way both move.
            swap = memory / "memory.memsw.limit_in_bytes"
            _write_if_there(swap, -1)
            _write_limit(memory, limits.memory_bytes)
            _write_if_there(swap, limits.memory_bytes)
            # Version 1 counts socket buffers apart, and not at all without a limit: 400 connections held 1.6 GiB.
            _write_if_there(memory / "memory.kmem.tcp.limit_in_bytes", limits.memory_bytes // _SOCKET_SHARE)
        self._applied[slot] = wanted

    def counters(self, slot: str) -> Counters:
        """Read a slot's counters."""
        if not self.version:
            return Counters()
        events = "memory.events" if self.version == 2 else "memory.oom_control"
        return Counters(
            _read_counter(self._memory / slot / events, b"oom_kill "),
            _read_counter(self._pids / slot / "pids.events", b"max "),
        )

    def forget(self) -> None:
        """Forget what was applied: a new launcher starts."""
        self._applied.clear()

    def remove(self) -> None:
        """Kill what runs in our cgroups and remove them. Called before a launcher starts and after it ended."""
        for root in self.roots:
            directory = Path(root)
            deadline = time.monotonic() + 10.0
            while directory.is_dir() and time.monotonic() < deadline:
                if not _kill_below(directory) and _remove_below(directory):
                    break
                time.sleep(0.01)


def _write(path: Path, value: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"%d" % value)
    finally:
        os.close(fd)


def _write_limit(memory: Path, value: int) -> None:
    """Set a v1 memory limit. Pages of files that the slot's last command wrote still count, and may be in the way."""
    for _ in range(_EMPTYING):
        try:
            return _write(memory / "memory.limit_in_bytes", value)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        with contextlib.suppress(OSError):  # EBUSY here too, while pages are being written back
            _write(memory / "memory.force_empty", 0)
    return _write(memory / "memory.limit_in_bytes", value)


def _write_if_there(path: Path, value: int) -> None:
    try:
        _write(path, value)
    except OSError:
        pass  # a kernel without swap accounting has no such file


def _read_counter(path: Path, key: bytes) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for line in os.read(fd, 4096).splitlines():
            if line.startswith(key):
                return int(line[len(key) :])
    finally:
        os.close(fd)
    return 0


def _kill_below(directory: Path) -> int:
    """Kill every process in ``directory`` and below; return how many there were."""
    count = 0
    for path in [directory, *(child for child in directory.iterdir() if child.is_dir())]:
        try:
            pids = [int(pid) for pid in (path / "cgroup.procs").read_text().split()]
        except OSError:
            continue
        for pid in pids:
            count += 1
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return count


def _remove_below(directory: Path) -> bool:
    try:
        for child in directory.iterdir():
            if child.is_dir():
                child.rmdir()
        directory.rmdir()
    except OSError:
        return False
    return True


def find(name: str) -> Cgroups:
    """Return the cgroups to use on this machine, with nothing made yet but our directory.

    Args:
        name: Name of our directory.
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
            # What a dead owner left there must be gone before anything else.
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
                _write_if_there(cpu / name / ("cpu.weight" if version == 2 else "cpu.shares"), _CPU_WEIGHT[version])
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
    """Return this process's cgroup by controller; v2's under the empty name."""
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found.update((controller, path) for controller in controllers.split(","))
    return found


def _v2_places(own: dict[str, str]) -> tuple[Path, Path] | None:
    place = _ROOT / own.get("", "/").lstrip("/")
    if not (place / "cgroup.procs").exists():
        place = _ROOT  # as in version 1: the host's path, in a container
    if place.name == _LEAF:
        place = place.parent  # an earlier start moved us; the places of sandboxes stay where they were
    try:
        controllers = (place / "cgroup.controllers").read_text().split()
    except OSError:
        return None
    return (place, place) if {"memory", "pids"} <= set(controllers) else None


def _v1_places(own: dict[str, str]) -> tuple[Path, Path] | None:
    places = tuple(_ROOT / name / own.get(name, "/").lstrip("/") for name in ("memory", "pids"))
    if not all((place / "cgroup.procs").exists() for place in places):
        # In a container /proc/self/cgroup may name the host's path while only the container's own is mounted.
        places = tuple(_ROOT / name for name in ("memory", "pids"))
    return (places[0], places[1]) if all((place / "cgroup.procs").exists() for place in places) else None


def _cpu_place(own: dict[str, str], version: int, memory: Path) -> Path | None:
    """Return where the cpu controller is; in v2 the tree we use anyway, if it is handed down to us there."""
    if version == 2:
        return memory if "cpu" in (memory / "cgroup.controllers").read_text().split() else None
    for place in (_ROOT / "cpu" / own.get("cpu", "/").lstrip("/"), _ROOT / "cpu"):
        if os.access(place / "cgroup.procs", os.W_OK):
            return place
    return None


def _enable_cpu(place: Path) -> None:
    """Hand cpu down, too, if possible: unlike memory and pids, commands can do without it."""
    for level in (place.parent, place):
        with contextlib.suppress(OSError):
            (level / "cgroup.subtree_control").write_text("+cpu")


def _enable_controllers(place: Path) -> None:
    """Hand memory and pids down to the children of ``place``.

    A v2 cgroup with processes of its own cannot (but the real root); then its processes move into a leaf, if all of
    them are this one or its ancestors and children: in a container they are, in a shared login session they are not.

    Raises:
        OSError: The controllers cannot be had here.
    """
    control = place / "cgroup.subtree_control"
    if {"memory", "pids"} <= set(control.read_text().split()):
        return
    try:
        control.write_text("+memory +pids")
    except OSError:
        pids = [int(pid) for pid in (place / "cgroup.procs").read_text().split()]
        ours = {os.getpid(), *_ancestors(os.getpid())}
        if any(pid not in ours and os.getpid() not in _ancestors(pid) for pid in pids):
            raise
        leaf = place / _LEAF
        leaf.mkdir(exist_ok=True)
        for pid in pids:
            (leaf / "cgroup.procs").write_text(str(pid))
        control.write_text("+memory +pids")


def _ancestors(pid: int) -> list[int]:
    """Return the parents of a process up to the first of its pid namespace."""
    found: list[int] = []
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[1])
        except OSError:
            break
        found.append(pid)
    return found
