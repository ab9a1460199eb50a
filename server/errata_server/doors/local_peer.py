"""`is_own_user`: whether the other end of a connection is a process of the server's user, or of root (PROTOCOL F2).

A loopback connection says nothing about who opened it. The kernel knows: each socket has the user that made it, and
`sock_diag(7)` tells it for the socket at the other end. Such a user can read the journal's files anyway.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct

_SOCK_DIAG = 4
"""The netlink protocol ``NETLINK_SOCK_DIAG``, which Python does not name."""

_BY_FAMILY = 20
"""The message ``SOCK_DIAG_BY_FAMILY``, of a request and of its answer."""

_ESTABLISHED = 1
"""The state of a socket that is neither closing nor closed. A closing one has no user, and the kernel says 0 for it."""

_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_ANSWER = struct.Struct("=BBBB48xIIII")
ANSWER_S = 1.0
"""How long the kernel's answer is waited for, seconds; it comes with the request."""

Address = tuple[str, int]


def is_own_user(peer: Address, here: Address) -> bool:
    """Return whether the socket at ``peer``, connected to ``here``, belongs to the server's user or to root.

    Args:
        peer: Address and port of the other end.
        here: Address and port of this end.

    Returns:
        False also where that cannot be found out: the peer is not on this machine or is closing, or the system has no
        ``sock_diag``.
    """
    return user_of(peer, here) in (0, os.getuid())


def user_of(peer: Address, here: Address) -> int | None:
    """Return the user id of the open socket at ``peer`` that is connected to ``here``; None where there is none."""
    if not hasattr(socket, "AF_NETLINK"):
        return None
    try:
        addresses = [_mapped(ipaddress.ip_address(host.partition("%")[0])) for host in (peer[0], here[0])]
    except ValueError:
        return None
    family = socket.AF_INET if addresses[0].version == 4 else socket.AF_INET6
    ends = struct.pack("!HH", peer[1], here[1]) + b"".join(one.packed.ljust(16, b"\0") for one in addresses)
    asked = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ends + b"\0" * 4 + b"\xff" * 8
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(ANSWER_S)
            kernel.send(_HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, 1, 0, 0) + asked)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    _, state, _, _, _, _, _, uid = _ANSWER.unpack_from(answer, _HEADER.size)
    return int(uid) if state == _ESTABLISHED else None


def _mapped(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the IPv4 address of one that is mapped into IPv6, as a socket for both families shows it."""
    return getattr(address, "ipv4_mapped", None) or address
