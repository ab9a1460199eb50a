"""System calls the launcher and its runners need and Python has no names for.

Imported by these programs as a top-level module: they are started without the server's import path, and nothing here
may import more than a few modules of the standard library, because every fork copies what was imported.
"""

# pathlib and what it imports would be copied by every fork.

import _socket
import ctypes
import marshal
import os
import sys

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


def check(result, what):
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source, target, kind, flags=0, data=""):
    result = libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data)
    )
    check(result, f"mount {kind or source} on {target}")


def mapped_clone(path, users, attributes=0):
    """Return a descriptor of a mount of ``path``, attached nowhere, on which owners are seen through ``users``."""
    fd = check(
        libc.syscall(
            ctypes.c_long(SYS_OPEN_TREE),
            ctypes.c_long(AT_FDCWD),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.c_long(OPEN_TREE_CLONE | os.O_CLOEXEC),
        ),
        f"open_tree {path}",
    )
    wanted = (ctypes.c_uint64 * 4)(MOUNT_ATTR_IDMAP | attributes, 0, 0, users)
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


def mount_mapped(path, target, users, attributes=0):
    """Mount ``path`` on ``target``, with owners seen through the user namespace ``users``."""
    fd = mapped_clone(path, users, attributes)
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


def unshare(flags):
    check(libc.unshare(flags), f"unshare {flags:#x}")


def setns(fd, kind):
    check(libc.setns(fd, kind), f"setns {kind:#x}")


def prctl(option, *values):
    padded = [ctypes.c_ulong(v) if isinstance(v, int) else v for v in (*values, 0, 0, 0, 0)[:4]]
    check(libc.prctl(option, *padded), f"prctl {option}")


def write_file(path, data):
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def send(sock, message, fds=()):
    ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds))]
    sock.sendmsg([marshal.dumps(message)], ancillary if fds else [])
