"""`LiveSessions`: ends a session, or evicts a detached one, in whichever environment of the data directory has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..journal import SessionChange
from .capacity import Capacity
from .store import Store


class SessionOwner(Protocol):
    """The sessions of one environment."""

    async def end(self, sid: str) -> bool:
        """End a session that this environment has, in memory or in the journal; return whether it has it."""

    async def evict_for(self, capacity: Capacity) -> bool:
        """Evict a detached session that counts in ``capacity``; return whether there was one."""


class LiveSessions:
    """Asks each environment in turn.

    Args:
        store: Ends sessions that no environment has in memory.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owners: list[SessionOwner] = []
        self._subscribers: list[Callable[[str], None]] = []

    def add(self, owner: SessionOwner) -> None:
        """Add the sessions of an environment."""
        self._owners.append(owner)

    def subscribe(self, ended: Callable[[str], None]) -> None:
        """Call ``ended(sid)`` after each `end`, on the event loop of its caller: a door may hold the session, too."""
        self._subscribers.append(ended)

    async def end(self, sid: str) -> None:
        """End a session, in the environment that has it or else in its row, and tell the subscribers."""
        await self._end(sid)
        for ended in self._subscribers:
            ended(sid)

    async def _end(self, sid: str) -> None:
        for owner in self._owners:
            if await owner.end(sid):
                return
        await self._store.commit(SessionChange(sid, status="closed"))

    async def evict_for(self, capacity: Capacity) -> bool:
        """Evict one detached session, of any environment, that counts in ``capacity``; return whether there was one."""
        for owner in self._owners:
            if await owner.evict_for(capacity):
                return True
        return False
