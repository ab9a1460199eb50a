"""``python fake_root.py PROGRAM ARGUMENTS``: runs a package installer, which expects root, as an ordinary user.

The program is root of a user namespace with one uid, so it may mount and chroot, but there is no other uid to give a
file to. A seccomp filter therefore reports success for every change of owner and every device node without doing
anything. The tree does not depend on these calls: in the end all its files belong to the server's user.
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
    FilterProgram,
    mount,
    prctl,
    unshare,
)
from user_namespace import become_root, fork_into

# chown, fchown, lchown, fchownat; mknod, mknodat; setuid, setgid, setreuid, setregid, setgroups, setresuid, setresgid;
# capset. Numbers of x86_64 and aarch64.
SKIPPED_CALLS = {
    "x86_64": (92, 93, 94, 260, 133, 259, 105, 106, 113, 114, 116, 117, 119, 126),
    "aarch64": (55, 54, 33, 146, 144, 145, 143, 159, 147, 149, 91),
}
# BPF instructions; then the filter's two answers, SECCOMP_RET_ERRNO with errno 0 (success) and SECCOMP_RET_ALLOW.
LOAD, JUMP_EQUAL, RETURN, SUCCESS, ALLOW = 0x20, 0x15, 0x06, 0x50000, 0x7FFF0000


def skip_calls() -> None:
    """Install a seccomp filter under which the calls in `SKIPPED_CALLS` return 0 and do nothing."""
    steps = [(LOAD, 0, 0, 0)]
    for number in SKIPPED_CALLS[os.uname().machine]:
        steps += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, SUCCESS)]
    code = b"".join(struct.pack("=HBBI", *step) for step in [*steps, (RETURN, 0, 0, ALLOW)])
    kept = ctypes.create_string_buffer(code, len(code))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(FilterProgram(len(code) // 8, ctypes.addressof(kept))))


def main() -> None:
    """Execute the program in namespaces of its own, and exit with its status; SIGKILL ends it with its parent."""
    become_root()
    unshare(CLONE_NEWNS)
    mount("", "/", "", MS_REC | MS_PRIVATE)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    pid = fork_into(CLONE_NEWPID)
    if pid:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    skip_calls()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
