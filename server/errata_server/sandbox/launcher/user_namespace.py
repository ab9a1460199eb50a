"""Rootless mode: how the launcher and its runners use a user namespace instead of root privileges.

The launcher enters a user namespace in which the server's user is root: enough to mount an overlay and to make the
other namespaces. Only that one user exists there, so commands run under it too, and it owns every file of a sandbox.
Two things protect what the agent may not change: outside of the directories that the agent may write, the root is
mounted read-only; and before bash starts, the process enters a second user namespace, in which it has no capability
and the same uid as in root mode, and in which the kernel counts its processes separately (RLIMIT_NPROC).
"""

# A fork copies the memory of what was imported, so no pathlib.
# ruff: noqa: PTH110, PTH114

import ctypes
import os

from kernel import MS_BIND, MS_NODEV, MS_NOSUID, MS_RDONLY, MS_REMOUNT, check, mount, unshare, write_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

CLONE_NEWUSER = 0x10000000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SIGCHLD = 17

# Unlike `kernel.libc` it keeps the GIL during a call: it has to be held on both sides of a fork.
python = ctypes.PyDLL(None, use_errno=True)


def fork_into(flags: int) -> int:
    """Fork a child into new namespaces, given as ``CLONE_NEW*`` flags; return as `os.fork` does.

    Calling ``unshare``, ``fork`` and then ``setns`` to return would need CAP_SYS_ADMIN over the original pid namespace.
    """
    values = [ctypes.c_long(value) for value in (SYS_CLONE[os.uname().machine], flags | SIGCHLD, 0, 0, 0, 0)]
    python.PyOS_BeforeFork()
    pid: int = python.syscall(*values)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    return check(pid, "clone")


def become_root() -> None:
    """Enter a new user namespace in which this process's user is root and has every capability.

    Raises:
        OSError: The kernel refuses user namespaces; the text begins with ``user namespace:``.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
        map_ids(0, uid, 0, gid)
    except OSError as error:
        raise OSError(error.errno, f"user namespace: {error}") from None


def become_agent(uid: int) -> None:
    """Enter a new user namespace in which this process's user, root until now, is ``uid``.

    The process has every capability there, and the caller has to drop them.
    """
    unshare(CLONE_NEWUSER)
    map_ids(uid, 0, uid, 0)


def map_ids(uid: int, outer_uid: int, gid: int, outer_gid: int) -> None:
    """Map one uid and one gid of this process's user namespace to those of the namespace around it."""
    write_file("/proc/self/setgroups", b"deny")
    write_file("/proc/self/uid_map", b"%d %d 1" % (uid, outer_uid))
    write_file("/proc/self/gid_map", b"%d %d 1" % (gid, outer_gid))


def bind_device(name: str, path: str) -> None:
    """Bind-mount the host's device ``/dev/name`` at ``path``, a new file: only root of the host may make a node."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mount(f"/dev/{name}", path, "", MS_BIND)


def keep_writable(paths: "Iterable[str]") -> None:
    """Bind-mount paths below the current directory on themselves, so that `make_read_only` does not concern them.

    Such a mount hides mounts below its path, so it has to be made before them.

    Args:
        paths: Directories and files relative to the current directory; missing ones and symlinks are left out.
    """
    for path in paths:
        if os.path.exists(path) and not os.path.islink(path):
            mount(path, path, "", MS_BIND)


def make_read_only() -> None:
    """Make the mount at the current directory read-only; mounts below it stay as they are."""
    mount("", ".", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def make_writable() -> None:
    """Undo `make_read_only` for the mount at ``/``; needs CAP_SYS_ADMIN in the launcher's user namespace."""
    mount("", "/", "", MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)
