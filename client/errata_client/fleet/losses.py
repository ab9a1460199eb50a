"""`Losses`: tells whether a session waits for a member that is lost, so that it need not wait until its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from errata_protocol.errors import ErrataError, SessionLost

from .fleet import Fleet

FRESH_S = 5.0
"""Age up to which what is known of the members is used, seconds."""

ASK_S = 5.0
"""How long the members may take to be read, seconds."""


class Losses:
    """The lost members of one server. The members are read only when something is asked, and not again for `FRESH_S`.

    Args:
        address: Base URL of the server; see `Fleet.of`.
        headers: Sent with each request to a member, e.g. the token.
    """

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        self._fleet = Fleet.of(address, headers=headers)
        self._lost: frozenset[str | None] = frozenset()
        self._until = float("-inf")

    async def of(self, shard: object) -> SessionLost | None:
        """Return the error of sessions of a shard whose member is lost; None where it is not, or nobody can say.

        Args:
            shard: Name of the shard, as an error of the server has it.
        """
        clock = asyncio.get_running_loop().time
        if clock() >= self._until:
            try:
                async with asyncio.timeout(ASK_S):
                    found = await self._fleet.endpoints()
                self._lost = frozenset(one.shard for one in found if one.state == "lost")
            except (OSError, ErrataError):
                pass  # it cannot be known now, and a session is never given up for that
            self._until = clock() + FRESH_S
        if not isinstance(shard, str) or shard not in self._lost:
            return None
        return SessionLost(f"the server says that its member {shard}, which has the session, is lost: open another")

    async def aclose(self) -> None:
        """Close what is open."""
        await self._fleet.aclose()
