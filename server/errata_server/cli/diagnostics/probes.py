"""What ``errata doctor`` asks of a machine; each answer comes from trying, on its file system and as its user."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from errata_protocol.errors import ErrataError

from ...sandbox.base import BackendInfo
from ...sandbox.base_trees.tree import check_owner, find_base
from ...sandbox.host import seccomp
from ...sandbox.host.privileges import why_refused
from ...sandbox.launcher import PROGRAMS
from ...sandbox.namespace.backend import NamespaceBackend
from ...settings import Settings

_TRIALS = 5
_SYNCS = 20
_NAMESPACE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from kernel import CLONE_NEWNET, CLONE_NEWNS, MS_PRIVATE, MS_REC, PR_SET_DUMPABLE, mount, prctl, unshare
from user_namespace import become_root
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    prctl(PR_SET_DUMPABLE, 1)  # or its own files in /proc were root's
become_root()
unshare(CLONE_NEWNS | CLONE_NEWNET)
mount("", "/", "", MS_REC | MS_PRIVATE)
mount("try", "/tmp", "tmpfs", 0, "size=64k")
"""
_FILTER = """
import ctypes, os, sys
code = sys.stdin.buffer.read()
libc = ctypes.CDLL(None, use_errno=True)
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))
kept = ctypes.create_string_buffer(code, len(code))
program = Program(len(code) // 8, ctypes.addressof(kept))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
    sys.exit("the filter cannot be loaded: " + os.strerror(ctypes.get_errno()))
if libc.unshare(0x20000) != -1 or ctypes.get_errno() != 1:
    sys.exit("the filter is loaded and does not refuse")
"""


@dataclass(frozen=True, slots=True)
class SandboxTrial:
    """What came of running `true` in a sandbox.

    Args:
        failure: Why none could be run; empty when it could.
        info: What the backend can do here, None when it does not start.
        seconds: Median time of a command.
        count: Commands behind the median.
        shared_uid: Why commands do not get a host uid each; empty when they do.
    """

    failure: str = ""
    info: BackendInfo | None = None
    seconds: float = 0.0
    count: int = 0
    shared_uid: str = ""


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

    def kernel(self) -> str:
        """Return the kernel's release, e.g. ``6.1.0-18-amd64``."""
        return platform.release()

    def python(self) -> tuple[int, ...]:
        """Return the interpreter's version."""
        return tuple(sys.version_info[:3])

    def uid(self) -> int:
        """Return who the server would be."""
        return os.geteuid()

    def distribution(self, name: str) -> str | None:
        """Return the version of an installed distribution, None where it is not installed."""
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    def try_user_namespace(self) -> str:
        """Enter one as an ordinary user and mount something in it; return why not, empty when it worked."""
        return _run([sys.executable, "-I", "-S", "-c", _NAMESPACE, str(PROGRAMS)])

    def why_refused(self) -> str:
        """Return what most likely refuses user namespaces, and how to change that."""
        return why_refused()

    def try_seccomp(self) -> str:
        """Load the filter in a process and have it refuse a call; return why not, empty when it did."""
        try:
            program = seccomp.program()
        except LookupError as error:
            return str(error)
        return _run([sys.executable, "-I", "-S", "-c", _FILTER], program)

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

    def base(self) -> str:
        """Return id and place of the base tree of new sandboxes.

        Raises:
            SandboxUnavailable: There is none that can be used.
        """
        bases = self._settings.base
        found = find_base("default" if "default" in bases or not bases else next(iter(bases)), bases)
        if self.uid() != 0:
            check_owner(found)
        return f"{found.id} at {found.root}"

    def try_sandbox(self) -> SandboxTrial:
        """Run `true` in a sandbox beside the data directory's own."""
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=self._place(), ignore_cleanup_errors=True) as place:
            backend = NamespaceBackend(Path(place) / "sandboxes", bases=self._settings.base, spare=1)
            try:
                return asyncio.run(_trial(backend))
            except (ErrataError, OSError) as error:
                return SandboxTrial(failure=str(error))

    def open_files(self) -> int:
        """Return how many descriptors the server could have."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

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


async def _trial(backend: NamespaceBackend) -> SandboxTrial:
    try:
        info = await backend.start()
        box = await backend.open()
        times = []
        for _ in range(_TRIALS):
            result = await box.run("true")
            times.append(result.duration_s)
        return SandboxTrial("", info, statistics.median(times), _TRIALS, backend.runners.shared_uid)
    finally:
        await backend.close()


def _run(command: list[str], stdin: bytes = b"") -> str:
    """Run a trial program; return the last line of what it complained about, empty when it ended well."""
    try:
        result = subprocess.run(command, input=stdin, capture_output=True, timeout=30.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return ""
    return result.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"status {result.returncode}"
