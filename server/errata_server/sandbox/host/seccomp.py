"""The seccomp filter of every process in a sandbox, assembled as raw BPF without a library.

The processes have no privileges, so most refused calls would fail anyway. The filter keeps unprivileged code from
rarely used kernel code (user namespaces, io_uring, bpf, keyrings), and from AF_VSOCK, which reaches the hypervisor from
any network namespace.
"""

from __future__ import annotations

import errno
import platform
import struct

# <linux/audit.h>, <linux/filter.h>, <linux/seccomp.h>
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_SET = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_JUMP_GREATER_EQUAL = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NR, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data; the low half of the first argument
_X32_BIT = 0x40000000

_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK

# name: (x86_64, aarch64); None where the architecture has no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
}

# Refused with ENOSYS, so that libraries fall back to an older call.
_ABSENT: dict[str, tuple[int, int]] = {
    "clone3": (435, 435),  # its flags are behind a pointer, which a filter cannot read
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
# Refused with EOPNOTSUPP: 150 calls would fill a disk between two counts of what a session uses. posix_fallocate then
# falls back to writing zeros, which is slow enough for the count to notice in time.
_UNSUPPORTED: dict[str, tuple[int, int]] = {"fallocate": (285, 47)}
_CLONE = (56, 220)
_SOCKET = (41, 198)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def program(machine: str | None = None) -> bytes:
    """Return the filter as the bytes of an array of ``struct sock_filter``.

    Args:
        machine: ``x86_64`` or ``aarch64``; None for this machine's architecture.

    Raises:
        LookupError: There is no filter for this architecture.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise LookupError(f"no system call filter for {machine}, only for {' and '.join(_AUDIT_ARCH)}")
    column = list(_AUDIT_ARCH).index(machine)
    refuse, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [
        _op(_LOAD, _ARCH),
        _op(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, absent),  # a 32-bit call on a 64-bit kernel has other numbers
        _op(_LOAD, _NR),
    ]
    if machine == "x86_64":
        code += [_op(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1), _op(_RETURN, absent)]
    for action, table in ((refuse, _REFUSED), (absent, _ABSENT), (_ERRNO | errno.EOPNOTSUPP, _UNSUPPORTED)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                code += [_op(_JUMP_EQUAL, number, 0, 1), _op(_RETURN, action)]
    code += [
        _op(_JUMP_EQUAL, _CLONE[column], 0, 4),
        _op(_LOAD, _ARG0),
        _op(_JUMP_SET, _NEW_NAMESPACES, 0, 1),
        _op(_RETURN, refuse),
        _op(_RETURN, _ALLOW),
        _op(_JUMP_EQUAL, _SOCKET[column], 0, len(_FAMILIES) + 2),
        _op(_LOAD, _ARG0),
    ]
    code += [_op(_JUMP_EQUAL, family, len(_FAMILIES) - at, 0) for at, family in enumerate(_FAMILIES)]
    code += [_op(_RETURN, _ERRNO | errno.EAFNOSUPPORT), _op(_RETURN, _ALLOW)]
    return b"".join(code)
