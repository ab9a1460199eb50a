"""`Places`: chooses a member of the fleet for new sessions (PROTOCOL F6)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from errata_protocol.shards import Placement

from ..fleet.members import Members
from .dialing import Dial

AVOID_S = 30.0
"""How long a member that could not be reached gets no new sessions, seconds."""


class Places:
    """The members of one fleet, for all clients of an event loop that share connections to it.

    Args:
        dial: How sockets of the fleet are opened.
        members: The members; by default those that the server of ``dial`` has.

    Attributes:
        members: The members.
        are_apart: Whether the members have several addresses, so that one may be reached where another is not.
    """

    def __init__(self, dial: Dial, members: Members | None = None) -> None:
        self._own = Members(dial.address, dict(dial.headers)) if members is None else None
        self.members: Members = members or self._own  # type: ignore[assignment]
        self._dial = dial
        self.are_apart = False
        self._avoided: dict[str, float] = {}

    async def place(self, group: str) -> Dial | None:
        """Return how sockets of the member are opened where a new session is to be; None where none can be chosen.

        Args:
            group: Name of the sessions that are to be at one member.

        Raises:
            ConnectionError: No member can be reached.
            ErrataError: The members cannot be read.
        """
        found = await self.members.read()
        self.are_apart = len({one.url for one in found}) > 1
        up = [one.shard for one in found if one.shard is not None and one.state == "up"]
        shards: Collection[str] = [shard for shard in up if not self._is_avoided(shard)]
        return await self.at(Placement(dict.fromkeys(shards, 1.0)).place(group)) if shards else None

    async def at(self, shard: str | None) -> Dial | None:
        """Return how sockets of a member are opened; None where there is no such member, or it is lost."""
        found = await self.members.of(shard)
        return None if found is None or found.state == "lost" else self._dial.at(found)

    def avoid(self, shard: str) -> None:
        """Give a member that could not be reached no new sessions for a while."""
        self._avoided[shard] = asyncio.get_running_loop().time() + AVOID_S

    def _is_avoided(self, shard: str) -> bool:
        until = self._avoided.get(shard)
        return until is not None and asyncio.get_running_loop().time() < until

    async def aclose(self) -> None:
        """Close what is open, unless the connection that ``members`` are of closes it."""
        if self._own is not None:
            await self._own.aclose()
