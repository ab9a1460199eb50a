"""`Places`: chooses a member of the server for new sessions (PROTOCOL F6)."""

from __future__ import annotations

import asyncio

from errata_protocol.shards import Placement

from ..fleet import Endpoint, Fleet
from ..fleet.losses import FRESH_S
from .dialing import Dial


class Places:
    """The members of one server, for all clients of an event loop that share connections to it.

    Args:
        dial: How sockets of the server are opened, at any member.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._fleet = Fleet.of(dial.ws_url.removesuffix("/ws"), headers=dict(dial.headers))
        self._endpoints: list[Endpoint] = []
        self._until = float("-inf")
        self._reading = asyncio.Lock()

    async def place(self, group: str) -> str | None:
        """Return the shard where a new session is to be opened; None where no member of this address can be chosen.

        Args:
            group: Name of the sessions that are to be at one member.

        Raises:
            ConnectionError: No member can be reached.
            ErrataError: The members cannot be read.
        """
        clock = asyncio.get_running_loop().time
        async with self._reading:  # so that a thousand clients that open at once read them once
            if clock() >= self._until:
                self._endpoints = await self._fleet.endpoints()
                self._until = clock() + FRESH_S
        up = [
            one.shard
            for one in self._endpoints
            if one.shard is not None and one.state == "up" and one.ws_url == self._dial.url_at(one.shard)
        ]
        return Placement(dict.fromkeys(up, 1.0)).place(group) if up else None

    async def aclose(self) -> None:
        """Close what is open."""
        await self._fleet.aclose()
