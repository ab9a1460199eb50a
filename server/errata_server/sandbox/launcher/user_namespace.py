"""Rootless mode: how the launcher and its runners use a user namespace instead of root privileges.

The launcher enters a user namespace in which the server's user is root: enough to mount an overlay and to make the
other namespaces. Only that one user exists there, so a command runs under it too, and every file of the sandbox is its
own. Two things keep it out of what the base tree protects: outside the directories an agent may write, the root is
mounted read-only; and before bash starts, the process enters one more user namespace, in which it holds no capability,
has the uid that commands have in root mode, and whose processes the kernel counts apart (RLIMIT_NPROC).
"""

# pathlib and what it imports would be copied by every fork.
# ruff: noqa: PTH110, PTH114

import ctypes
import os

from kernel import MS_BIND, MS_NODEV, MS_NOSUID, MS_RDONLY, MS_REMOUNT, check, mount, unshare, write_file

CLONE_NEWUSER = 0x10000000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SIGCHLD = 17

# Unlike `kernel.libc` it keeps the interpreter's lock, which has to be held on both sides of a fork.
python = ctypes.PyDLL(None, use_errno=True)


def fork_into(flags):
    """Fork with a child in new namespaces.

    ``unshare``, ``fork`` and the way back with ``setns`` would need power over the pid namespace to come back to.
    """
    values = [ctypes.c_long(value) for value in (SYS_CLONE[os.uname().machine], flags | SIGCHLD, 0, 0, 0, 0)]
    python.PyOS_BeforeFork()
    pid = python.syscall(*values)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    return check(pid, "clone")


def become_root():
    """Enter a user namespace in which this process's user is root, with every capability over it."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
        map_ids(0, uid, 0, gid)
    except OSError as error:
        raise OSError(error.errno, f"user namespace: {error}") from None


def become_agent(uid):
    """Enter a user namespace in which this process's user is ``uid``. Every capability it finds there must go again."""
    unshare(CLONE_NEWUSER)
    map_ids(uid, 0, uid, 0)


def map_ids(uid, outer_uid, gid, outer_gid):
    write_file("/proc/self/setgroups", b"deny")
    write_file("/proc/self/uid_map", b"%d %d 1" % (uid, outer_uid))
    write_file("/proc/self/gid_map", b"%d %d 1" % (gid, outer_gid))


def bind_device(name, path):
    """Put the host's node at ``path``: only root may make one."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    mount(f"/dev/{name}", path, "", MS_BIND)


def protect(writable):
    """Make the mount at the current directory read-only but for some directories and files below it."""
    for path in writable:
        if os.path.exists(path) and not os.path.islink(path):
            mount(path, path, "", MS_BIND)
    mount("", ".", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def unprotect():
    """Make the root writable again, for whoever still has the power."""
    mount("", "/", "", MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV)
