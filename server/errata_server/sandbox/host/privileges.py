"""Decides in which mode the namespace sandbox can run, and names the setting to change if it can run in none.

Root with CAP_SYS_ADMIN uses root mode, an ordinary user rootless mode. Root without that capability can use neither: in
rootless mode commands run as the server's user, and uid 0 may do harm without any capability (it may write to
``/proc/sys``).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal

from errata_protocol.errors import SandboxUnavailable

from . import seccomp

Mode = Literal["root", "rootless"]

_CAP_SYS_ADMIN = 21
_CAP_SYS_RESOURCE = 24
_PROC = Path("/proc")


def mode_of(uid: int) -> Mode:
    """Return the mode of a server that runs as ``uid``."""
    return "root" if uid == 0 else "rootless"


def check_privileges(uid: int | None = None, *, proc: Path = _PROC) -> None:
    """Check what can be read from /proc: whether the sandbox mode of user ``uid`` can work.

    Args:
        uid: Effective uid; None is this process's.
        proc: Where procfs is mounted.

    Raises:
        SandboxUnavailable: It cannot; the message, one line, names what is missing and how to get it.
    """
    uid = os.geteuid() if uid is None else uid
    if uid == 0 and not _capabilities(proc) >> _CAP_SYS_ADMIN & 1:
        raise SandboxUnavailable(
            "root lacks CAP_SYS_ADMIN for the namespace sandbox: run the server as root of the host, in a container "
            "with --privileged (or --cap-add SYS_ADMIN --security-opt seccomp=unconfined), or as an ordinary user"
        )
    if uid != 0 and (switch := closed_switch(proc)):
        raise SandboxUnavailable(f"the rootless sandbox needs user namespaces, and {switch}")
    try:
        seccomp.program()
    except LookupError as error:
        raise SandboxUnavailable(f"the namespace sandbox does not run here: {error}") from error


@functools.cache
def may_raise_limits() -> bool:
    """Return whether this process may raise a hard resource limit; root in many containers may not."""
    return bool(_capabilities(_PROC) >> _CAP_SYS_RESOURCE & 1)


def closed_switch(proc: Path = _PROC) -> str:
    """Return the setting that disables user namespaces for ordinary users and the command to enable them, or ""."""
    if _number(proc / "sys/kernel/unprivileged_userns_clone") == 0:
        return (
            "kernel.unprivileged_userns_clone is 0: run `sysctl -w kernel.unprivileged_userns_clone=1` as root, or "
            "run the server as root"
        )
    if _number(proc / "sys/user/max_user_namespaces") == 0:
        return (
            "user.max_user_namespaces is 0: run `sysctl -w user.max_user_namespaces=10000` as root, or run the "
            "server as root"
        )
    return ""


def why_refused(proc: Path = _PROC) -> str:
    """Return the likely reason why a user namespace, or an operation in one, was refused, and how to change that."""
    if switch := closed_switch(proc):
        return switch
    if _number(proc / "sys/kernel/apparmor_restrict_unprivileged_userns") == 1:
        return (
            "kernel.apparmor_restrict_unprivileged_userns is 1: run "
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` as root, or run the server as root"
        )
    return (
        "a container or a security module refuses them: start the container with --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined, or run the server as root of the "
        "host"
    )


def _number(path: Path) -> int | None:
    """Return the number in a file of /proc; None if it cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # a kernel without this setting


def _capabilities(proc: Path) -> int:
    """Return the effective capabilities of this process as a bit mask; 0 if they cannot be read."""
    try:
        for line in (proc / "self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    except OSError:
        pass  # a process that changed its uid may be unable to read its status; it has no capabilities either
    return 0
