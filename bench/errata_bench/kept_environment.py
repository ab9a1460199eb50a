"""An echo environment that survives a crash, for scenarios that only Errata supports."""

from __future__ import annotations

from openenv.core.env_server.types import State

from errata_protocol.environment import Snapshot

from .environments import AsyncEcho


class KeptEcho(AsyncEcho):
    """Counts its steps; its snapshot is the count."""

    async def snapshot(self) -> Snapshot:
        """Return the count."""
        return Snapshot(str(self._state.step_count).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        """Set the count."""
        self._state = State(episode_id="echo", step_count=int(snapshot.state))
