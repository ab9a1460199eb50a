"""Shares one connection between all clients of an event loop that have the same connection parameters.

Sharing is safe because a session is addressed by its own random sid and key: clients on one socket cannot reach each
other's sessions, and closing a client ends its own session only. Clients that differ in headers (the token), limits or
timeouts do not share. The last client to leave closes the connection. Event loops do not share connections: a socket
belongs to the loop that opened it.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from websockets.asyncio.client import ClientConnection

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import NotSupported
from errata_protocol.fleet import EXTENSION

from ..fleet.members import Members, lost_error
from . import background
from .connection import Connection
from .dialing import Dial
from .placing import Places
from .waiting import waits_at

MOST_TRIED = 4
"""Most members that are tried for a new session, where one cannot be reached."""


@dataclass(eq=False)
class Lease:
    """A client's share in a connection.

    Args:
        connection: The connection.
        entry: Counts the users of the connection; None for a connection that the caller made and closes.
        beside: The entry by which the member of this one was found, and that is used as long as this one is.
    """

    connection: Connection
    entry: _Entry | None = None
    beside: _Entry | None = None

    def share(self) -> Lease:
        """Return a lease of the same connection for another client."""
        for entry in (self.entry, self.beside):
            if entry is not None:
                entry.users += 1
        return Lease(self.connection, self.entry, self.beside)

    async def release(self) -> None:
        """End the lease; the last one closes the connection."""
        entry, self.entry = self.entry, None
        beside, self.beside = self.beside, None
        try:
            if entry is not None:
                await entry.leave()
        finally:
            if beside is not None:
                await beside.leave()


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


def _entry_of(dial: Dial) -> _Entry:
    """Return the running loop's entry of a connection, which the caller now uses."""
    with _lock:
        entries = _loops.setdefault(asyncio.get_running_loop(), {})
    entry = entries.setdefault(dial, _Entry(dial, entries))
    entry.users += 1
    return entry


async def join(
    base_url: str, dial: Dial, members: Members | None = None, *, waits: bool = False
) -> Lease | ClientConnection | None:
    """Lease the running loop's connection to a server; open it if there is none.

    Args:
        base_url: The server's base URL.
        dial: How its sockets are opened.
        members: The members of the server, where they are known; they stay open while the connection is used.
        waits: Whether the member of ``dial`` is waited for while it is down, in place of an error.

    Returns:
        A lease. Where the server does not speak the multiplexed protocol, the plain socket that it accepted instead;
        or None, where another client has found that out and has the socket.

    Raises:
        ConnectionError: The server cannot be reached.
    """
    entry = _entry_of(dial)
    socket: ClientConnection | None = None
    try:
        async with entry.lock:
            if entry.connection is None and waits:
                entry.connection = Connection.to(base_url, dial)
            if entry.connection is None and not entry.is_plain:
                with waits_at(base_url).on("a connection", dial.connect_timeout_s):
                    socket = await dial.open(compression="deflate")
                entry.is_plain = socket.subprotocol != PROTOCOL_NAME
                if not entry.is_plain:
                    entry.connection = Connection.on(base_url, dial, socket)
        if entry.connection is not None:
            entry.connection.members = entry.connection.members or members
            return Lease(entry.connection, entry)
    except BaseException:
        await entry.leave()
        raise
    await entry.leave()
    return socket


async def join_placed(
    base_url: str, dial: Dial, group: str, shard: str | None = None
) -> Lease | ClientConnection | None:
    """Join the connection to the member at which a session is to be; of a server with one member, do `join`.

    The first connection tells whether there are several members, and is used for the sessions of its own. Where the
    address is that of a list, there is no such connection.

    Args:
        base_url: The server's base URL, or another address of a fleet.
        dial: How its sockets are opened.
        group: Name of the sessions that are to be at one member.
        shard: Name of the member that has the session already; None for a new one.

    Raises:
        ConnectionError: The server, or the member, cannot be reached.
        SessionLost: The member is lost.
        ErrataError: The members cannot be read.
    """
    if not dial.is_of_server:
        entry = _entry_of(dial)
        try:
            if entry.places is None:
                entry.places = Places(dial)
            placed = await _join_member(base_url, entry.places, group, shard)
            if placed is None:
                member = await entry.places.members.of(shard)
                if member is not None and member.state == "lost":
                    raise lost_error(member)
                raise ConnectionError(f"no member of {base_url} is up")
        except BaseException:
            await entry.leave()
            raise
        placed.beside = entry
        return placed
    found = await join(base_url, dial)
    if not isinstance(found, Lease):
        return found
    try:
        known, offered = found.entry, found.connection.capabilities
        if known is None or known.places is None:
            offered = (await found.connection.connect()).capabilities
        if offered is None or not offered.offers(EXTENSION) or known is None:
            return found
        if known.places is None:
            known.places = Places(dial, found.connection.known_members())
        placed = await _join_member(base_url, known.places, group, shard, found)
    except BaseException:
        await found.release()
        raise
    if placed is None:
        return found
    if placed is not found:
        placed.beside, found.entry = known, None
    return placed


async def _join_member(
    base_url: str, places: Places, group: str, shard: str | None, first: Lease | None = None
) -> Lease | None:
    """Join the connection to a member.

    A member at an address of its own that cannot be reached gets no new session: its state may be known late.

    Returns:
        The lease; ``first`` where that is the member's; None where no member can be chosen.
    """
    failed: ConnectionError | None = None
    for _ in range(MOST_TRIED):
        dial = await (places.place(group) if shard is None else places.at(shard))
        if dial is None:
            break
        if first is not None and first.connection.member == dial.shard and dial.member_url is None:
            placed: Lease | ClientConnection | None = first
        else:
            try:
                placed = await join(base_url, dial, places.members, waits=shard is not None)
            except ConnectionError as error:
                if dial.shard is None or not places.are_apart:
                    raise
                places.avoid(dial.shard)
                failed = error
                continue
        if not isinstance(placed, Lease):
            if placed is not None:
                await placed.close()
            raise NotSupported(f"member {dial.shard} of {base_url} does not speak {PROTOCOL_NAME}")
        if shard is None and places.are_apart and not placed.connection.is_open:
            try:
                async with asyncio.timeout(dial.connect_timeout_s):
                    await placed.connection.connect()
            except (ConnectionError, TimeoutError) as error:
                if placed is not first:
                    await placed.release()
                places.avoid(dial.shard or "")
                failed = ConnectionError(f"member {dial.shard} of {base_url} cannot be reached: {error}")
                continue
        return placed
    if first is None and failed is not None:
        raise failed
    return None


def _forget_loops() -> None:
    global _lock, _loops
    _lock, _loops = threading.Lock(), WeakKeyDictionary()


async def _close_all(loop: asyncio.AbstractEventLoop) -> None:
    for entry in list(_loops.get(loop, {}).values()):
        if entry.connection is not None:
            await entry.connection.aclose()


background.after_fork(_forget_loops)
background.at_exit(_close_all)
