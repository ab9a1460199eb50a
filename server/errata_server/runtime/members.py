"""`MemberWatch`: tells who the members of this server are, and when they change (PROTOCOL F6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from errata_protocol.fleet import FleetMember, FleetMembers


class MemberWatch:
    """The members of a server, for those who ask and those who wait for a change.

    Members change without an event, so a worker of several calls `look` at each heartbeat. A server of one process has
    no changes.

    Args:
        members: Returns the members as they are now.
    """

    def __init__(self, members: Callable[[], Sequence[FleetMember]]) -> None:
        self._members = members
        self._waiting: set[asyncio.Future[None]] = set()
        self._seen = ""  # version that all of them have
        self._ended = False

    def now(self) -> FleetMembers:
        """Return the members as they are now."""
        return FleetMembers.of(self._members())

    def look(self) -> None:
        """Wake those that wait if the members have changed. Costs nothing while nobody waits."""
        if self._waiting and self.now().version != self._seen:
            self._wake()

    async def after(self, version: str | None, wait_s: float) -> FleetMembers:
        """Return the members once they are others than those of a version.

        Args:
            version: Version that the caller has; None for none, which waits for nothing.
            wait_s: Longest wait, seconds; then they are returned as they are.
        """
        found = self.now()
        if found.version != version or wait_s <= 0 or self._ended:
            return found
        self.look()  # so that all that wait have one version
        self._seen = found.version
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(changed)
        try:
            await asyncio.wait([changed], timeout=wait_s)
        finally:
            self._waiting.discard(changed)
        return self.now()

    def begin(self) -> None:
        """Called when the server starts: requests may wait."""
        self._ended = False

    def end(self) -> None:
        """Called when the server stops: answer all, and let nobody wait any more."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)
