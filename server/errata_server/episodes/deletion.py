"""`Deletion`: deletes episodes and the sandbox layers only they named; ends a session whose episode it deletes."""

from __future__ import annotations

from collections.abc import Sequence

from errata_protocol.errors import UnknownEpisode
from errata_protocol.replay import DeletedEpisodes

from ..runtime.runtime import Runtime


class Deletion:
    """Deletes episodes.

    Args:
        runtime: Journal, sandboxes, and the sessions that end with their episode.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def delete(self, eid: str, principal: str | None) -> int:
        """Delete an episode and every sandbox layer that only it named; return its number of deliveries.

        A session whose current episode this is ends with it: it would go on from something that is not there.

        Raises:
            UnknownEpisode: No such episode, or somebody else's.
        """
        deleted = await self._delete(eid, principal)
        await self._runtime.collect()
        return deleted or 0

    async def _delete(self, eid: str, principal: str | None, *, unused_only: bool = False) -> int | None:
        """As `delete`; None for one that is kept because it is in use."""
        runtime, store = self._runtime, self._runtime.store
        row = await store.owned_episode(eid, principal)
        last = await store.last_delivery(row.sid)
        if last is None or last.eid == eid:
            session = await store.session(row.sid) if unused_only else None
            if session is not None and session.status == "open":
                return None
            await runtime.live_sessions.end(row.sid)
        deleted = await store.delete_episode(eid, unless_forked=unused_only)
        kept = unused_only and not deleted and await store.episode(eid) is not None
        return None if kept else deleted

    async def delete_all(
        self, eids: Sequence[str], principal: str | None, *, unused_only: bool = False
    ) -> DeletedEpisodes:
        """Delete episodes, as `delete` does each; an unknown or foreign one is named, and the others go.

        Args:
            eids: Which.
            principal: Who asks.
            unused_only: Keep and name one that an open session stands on, or that another episode comes from.
        """
        deleted: dict[str, int] = {}
        unknown: list[str] = []
        in_use: list[str] = []
        for eid in dict.fromkeys(eids):
            try:
                count = await self._delete(eid, principal, unused_only=unused_only)
            except UnknownEpisode:
                unknown.append(eid)
                continue
            if count is None:
                in_use.append(eid)
            else:
                deleted[eid] = count
        await self._runtime.collect()
        if deleted:
            await self._runtime.store.compact()
        return DeletedEpisodes(deleted=deleted, unknown=unknown, in_use=in_use)
