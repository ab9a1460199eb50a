"""System calls that the launcher and its runners need and that Python has no functions for.

These programs import it as a top-level module. It imports few modules, and not `pathlib`: every fork copies the memory
of what was imported. Every function here raises OSError, with the call and the errno in its text, if the call fails.
"""

import _socket
import ctypes
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWUSER = 0x20000000, 0x40000000, 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_MOVE = 1, 2, 4, 8, 32, 4096, 8192
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 15, 22, 24, 38
PR_SET_DUMPABLE, PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP = 4, 28, 4
# The same numbers on x86_64 and aarch64.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_OPENAT2, SYS_MOUNT_SETATTR = 428, 429, 437, 442
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_IDMAP = 1, 2, 4, 0x100000
RESOLVE_NO_MAGICLINKS = 2


libc = ctypes.CDLL(None, use_errno=True)


class FilterProgram(ctypes.Structure):
    """``struct sock_fprog``: a BPF program for PR_SET_SECCOMP."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def check(result: int, what: str) -> int:
    """Return what a system call returned; raise OSError, its text starting with ``what``, if that is -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: "str | bytes", target: "str | bytes", kind: str, flags: int = 0, data: str = "") -> None:
    """Call mount(2). ``kind`` is the type of the file system, empty for a bind mount or a change of flags."""
    result = libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data)
    )
    check(result, f"mount {kind or source!s} on {target!s}")


def clone_id_mapped(path: "str | Path", userns: int, attributes: int = 0) -> int:
    """Return a descriptor of a detached id-mapped mount of ``path``.

    Args:
        path: A directory.
        userns: Descriptor of the user namespace whose mapping the mount uses.
        attributes: Further ``MOUNT_ATTR_*`` flags.

    Raises:
        OSError: The kernel or the file system of ``path`` has no id-mapped mounts (EINVAL), or the call failed.
    """
    fd = check(
        libc.syscall(
            ctypes.c_long(SYS_OPEN_TREE),
            ctypes.c_long(AT_FDCWD),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.c_long(OPEN_TREE_CLONE | os.O_CLOEXEC),
        ),
        f"open_tree {path}",
    )
    wanted = (ctypes.c_uint64 * 4)(MOUNT_ATTR_IDMAP | attributes, 0, 0, userns)
    try:
        check(
            libc.syscall(
                ctypes.c_long(SYS_MOUNT_SETATTR),
                ctypes.c_long(fd),
                ctypes.c_char_p(b""),
                ctypes.c_long(AT_EMPTY_PATH),
                wanted,
                ctypes.c_long(ctypes.sizeof(wanted)),
            ),
            f"id-mapped mount of {path}",
        )
    except OSError:
        os.close(fd)
        raise
    return fd


def mount_id_mapped(path: str, target: str, userns: int, attributes: int = 0) -> None:
    """Mount ``path`` on ``target`` with the id mapping of a user namespace; see `clone_id_mapped`."""
    fd = clone_id_mapped(path, userns, attributes)
    try:
        check(
            libc.syscall(
                ctypes.c_long(SYS_MOVE_MOUNT),
                ctypes.c_long(fd),
                ctypes.c_char_p(b""),
                ctypes.c_long(AT_FDCWD),
                ctypes.c_char_p(os.fsencode(target)),
                ctypes.c_long(MOVE_MOUNT_F_EMPTY_PATH),
            ),
            f"move_mount to {target}",
        )
    finally:
        os.close(fd)


def unshare(flags: int) -> None:
    """Move this process into new namespaces, given as ``CLONE_NEW*`` flags."""
    check(libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd: int, kind: int) -> None:
    """Move this process into the namespace of a descriptor, whose type is the ``CLONE_NEW*`` flag ``kind``."""
    check(libc.setns(fd, kind), f"setns {kind:#x}")


def prctl(option: int, *values: "Any") -> None:
    """Call prctl(2) with up to four arguments; missing ones are 0."""
    padded = [ctypes.c_ulong(v) if isinstance(v, int) else v for v in (*values, 0, 0, 0, 0)[:4]]
    check(libc.prctl(option, *padded), f"prctl {option}")


def write_file(path: str, data: bytes) -> None:
    """Write ``data`` to an existing file in one call, as files of /proc and cgroups want it."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def send(sock: _socket.socket, message: "tuple[Any, ...]", fds: "Sequence[int]" = ()) -> None:
    """Send a marshalled message as one packet, with copies of descriptors."""
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds))]
    sock.sendmsg([marshal.dumps(message)], ancillary if fds else [])
