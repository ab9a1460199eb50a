"""``python fake_root.py PROGRAM ARGUMENTS``: runs a package installer, which expects root, as an ordinary user.

It is root of a user namespace with one uid, so it may mount and change its root, but there is nobody to give a file to.
A system call filter therefore answers "done" to every change of owner and every device node, and nothing is done: what
package scripts do with them makes no difference to a tree whose files all belong to the server's user in the end.
"""

# Started without the server's import path, as the launcher is.
# ruff: noqa: PTH100, PTH120

import ctypes
import os
import signal
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from kernel import (
    CLONE_NEWNS,
    CLONE_NEWPID,
    MS_PRIVATE,
    MS_REC,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    mount,
    prctl,
    unshare,
)
from user_namespace import become_root, fork_into

# chown, fchown, lchown, fchownat; mknod, mknodat; setuid, setgid, setreuid, setregid, setgroups, setresuid, setresgid;
# capset. Numbers of x86_64 and aarch64.
PRETENDED = {
    "x86_64": (92, 93, 94, 260, 133, 259, 105, 106, 113, 114, 116, 117, 119, 126),
    "aarch64": (55, 54, 33, 146, 144, 145, 143, 159, 147, 149, 91),
}
LOAD, JUMP_EQUAL, RETURN, DONE, ALLOW = 0x20, 0x15, 0x06, 0x50000, 0x7FFF0000


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def pretend():
    steps = [(LOAD, 0, 0, 0)]
    for number in PRETENDED[os.uname().machine]:
        steps += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, DONE)]
    code = b"".join(struct.pack("=HBBI", *step) for step in [*steps, (RETURN, 0, 0, ALLOW)])
    kept = ctypes.create_string_buffer(code, len(code))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program(len(code) // 8, ctypes.addressof(kept))))


def main():
    become_root()
    unshare(CLONE_NEWNS)
    mount("", "/", "", MS_REC | MS_PRIVATE)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pid = fork_into(CLONE_NEWPID)
    if pid:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pretend()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
