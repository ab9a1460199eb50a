"""The tests that `checks` uses: each tries an operation on this machine as the server's user."""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from errata_protocol.errors import ErrataError

from ..base import BackendConfig, BackendInfo
from ..base_trees.tree import check_owner, find_base
from ..host import seccomp
from ..host.privileges import why_refused
from ..launcher import PROGRAMS
from .backend import NamespaceBackend

_TRIALS = 5
_NAMESPACE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from kernel import CLONE_NEWNET, CLONE_NEWNS, MS_PRIVATE, MS_REC, PR_SET_DUMPABLE, mount, prctl, unshare
from user_namespace import become_root
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    prctl(PR_SET_DUMPABLE, 1)  # or root would own this process's files in /proc
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
    """The result of running `true` in a sandbox.

    Args:
        failure: Why no command could be run; empty if it could.
        info: What the backend can do here; None if it does not start.
        seconds: Median time of a command.
        count: Number of commands that were timed.
        shared_uid: Why commands share one host uid; empty if each has its own.
    """

    failure: str = ""
    info: BackendInfo | None = None
    seconds: float = 0.0
    count: int = 0
    shared_uid: str = ""


class Probes:
    """The tests of this machine for a namespace backend.

    Args:
        config: The operator's choices.
    """

    def __init__(self, config: BackendConfig) -> None:
        self._config = config

    def kernel(self) -> str:
        """Return the kernel's release, e.g. ``6.1.0-18-amd64``."""
        return platform.release()

    def uid(self) -> int:
        """Return the effective uid, under which a server would run."""
        return os.geteuid()

    def try_user_namespace(self) -> str:
        """Enter a user namespace as an ordinary user and mount a tmpfs in it; return the error, "" if it worked."""
        return _run([sys.executable, "-I", "-S", "-c", _NAMESPACE, str(PROGRAMS)])

    def why_refused(self) -> str:
        """Return the most likely reason why user namespaces are refused, and how to change that."""
        return why_refused()

    def try_seccomp(self) -> str:
        """Load the seccomp filter in a process and check that it refuses a call; return the error, "" if it worked."""
        try:
            program = seccomp.program()
        except LookupError as error:
            return str(error)
        return _run([sys.executable, "-I", "-S", "-c", _FILTER], program)

    def base(self) -> str:
        """Return id and directory of the base tree that new sandboxes use.

        Raises:
            SandboxUnavailable: There is no usable base tree.
        """
        bases = self._config.bases
        found = find_base("default" if "default" in bases or not bases else next(iter(bases)), bases)
        if self.uid() != 0:
            check_owner(found)
        return f"{found.id} at {found.root}"

    def try_sandbox(self) -> SandboxTrial:
        """Run `true` in a sandbox, in a temporary directory next to the backend's directory."""
        with tempfile.TemporaryDirectory(
            prefix="doctor-", dir=self._config.nearest(), ignore_cleanup_errors=True
        ) as made:
            backend = NamespaceBackend(Path(made) / "sandboxes", bases=self._config.bases, spare=1)
            try:
                return asyncio.run(_trial(backend))
            except (ErrataError, OSError) as error:
                return SandboxTrial(failure=str(error))


async def _trial(backend: NamespaceBackend) -> SandboxTrial:
    """Start a backend, run `true` five times and close it."""
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
    """Run a program for at most 30 s; return the last line of its standard error, or "" if its exit status is 0."""
    try:
        result = subprocess.run(command, input=stdin, capture_output=True, timeout=30.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return ""
    return result.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"status {result.returncode}"
