"""Shares one connection between all clients of an event loop that have the same connection parameters.

Sharing is safe because a session is addressed by its own random sid and key: clients on one socket cannot reach each
other's sessions, and closing a client ends its own session only. Clients that differ in headers (the token), limits or
timeouts do not share. The last client to leave closes the connection. Event loops do not share connections: a socket
belongs to the loop that opened it.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from websockets.asyncio.client import ClientConnection

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import NotSupported
from errata_protocol.fleet import EXTENSION

from . import background
from .connection import Connection
from .dialing import Dial
from .placing import Places
from .waiting import waits_at


@dataclass(eq=False)
class Lease:
    """A client's share in a connection.

    Args:
        connection: The connection.
        entry: Counts the users of the connection; None for a connection that the caller made and closes.
        beside: Share in the connection by which the member of this one was found; released with it.
    """

    connection: Connection
    entry: _Entry | None = None
    beside: Lease | None = None

    def share(self) -> Lease:
        """Return a lease of the same connection for another client."""
        if self.entry is not None:
            self.entry.users += 1
        return Lease(self.connection, self.entry)

    async def release(self) -> None:
        """End the lease; the last one closes the connection."""
        entry, self.entry = self.entry, None
        beside, self.beside = self.beside, None
        try:
            if entry is not None:
                await entry.leave()
        finally:
            if beside is not None:
                await beside.release()


@dataclass(eq=False)
class _Entry:
    """A shared connection and how many clients use it; ``connection`` is None until it is open."""

    dial: Dial
    entries: dict[Dial, _Entry]
    users: int = 0
    connection: Connection | None = None
    is_plain: bool = False
    places: Places | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def leave(self) -> None:
        self.users -= 1
        if self.users == 0:
            if self.entries.get(self.dial) is self:
                del self.entries[self.dial]
            connection, self.connection = self.connection, None
            places, self.places = self.places, None
            if places is not None:
                await places.aclose()
            if connection is not None:
                await connection.aclose()


_lock = threading.Lock()
_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Dial, _Entry]] = WeakKeyDictionary()


async def join(base_url: str, dial: Dial) -> Lease | ClientConnection | None:
    """Lease the running loop's connection to a server; open it if there is none.

    Args:
        base_url: The server's base URL.
        dial: How its sockets are opened.

    Returns:
        A lease. Where the server does not speak the multiplexed protocol, the plain socket that it accepted instead;
        or None, where another client has found that out and has the socket.

    Raises:
        ConnectionError: The server cannot be reached.
    """
    with _lock:
        entries = _loops.setdefault(asyncio.get_running_loop(), {})
    entry = entries.setdefault(dial, _Entry(dial, entries))
    entry.users += 1
    socket: ClientConnection | None = None
    try:
        async with entry.lock:
            if entry.connection is None and not entry.is_plain:
                with waits_at(base_url).on("a connection", dial.connect_timeout_s):
                    socket = await dial.open(compression="deflate")
                entry.is_plain = socket.subprotocol != PROTOCOL_NAME
                if not entry.is_plain:
                    entry.connection = Connection.on(base_url, dial, socket)
        if entry.connection is not None:
            return Lease(entry.connection, entry)
    except BaseException:
        await entry.leave()
        raise
    await entry.leave()
    return socket


async def join_placed(base_url: str, dial: Dial, group: str) -> Lease | ClientConnection | None:
    """Join the connection to the member at which a new session is to be opened; of a server with one member, do `join`.

    The first connection tells whether there are several members, and is used for the sessions of its own.

    Args:
        base_url: The server's base URL.
        dial: How its sockets are opened.
        group: Name of the sessions that are to be at one member.

    Raises:
        ConnectionError: The server cannot be reached.
        ErrataError: The members cannot be read.
    """
    found = await join(base_url, dial)
    if not isinstance(found, Lease):
        return found
    try:
        offered = (await found.connection.connect()).capabilities
        if offered is None or not offered.offers(EXTENSION) or found.entry is None:
            return found
        if found.entry.places is None:
            found.entry.places = Places(dial)
        shard = await found.entry.places.place(group)
        if shard is None or shard == offered.shard:
            return found
        placed = await join(base_url, replace(dial, shard=shard))
        if not isinstance(placed, Lease):
            if placed is not None:
                await placed.close()
            raise NotSupported(f"member {shard} of {base_url} does not speak {PROTOCOL_NAME}, which another one does")
    except BaseException:
        await found.release()
        raise
    placed.beside = found
    return placed


def _forget_loops() -> None:
    global _lock, _loops
    _lock, _loops = threading.Lock(), WeakKeyDictionary()


async def _close_all(loop: asyncio.AbstractEventLoop) -> None:
    for entry in list(_loops.get(loop, {}).values()):
        if entry.connection is not None:
            await entry.connection.aclose()


background.after_fork(_forget_loops)
background.at_exit(_close_all)
