"""An echo environment that comes back after a crash, for what only Errata does."""

from __future__ import annotations

from openenv.core.env_server.types import State

from errata_protocol.environment import Snapshot

from .environments import AsyncEcho


class KeptEcho(AsyncEcho):
    """Counts its steps, and goes on counting where its snapshot stood."""

    async def snapshot(self) -> Snapshot:
        """Return the count."""
        return Snapshot(str(self._state.step_count).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        """Go on from a count."""
        self._state = State(episode_id="echo", step_count=int(snapshot.state))
