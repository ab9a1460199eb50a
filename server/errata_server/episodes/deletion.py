"""`Deletion`: deletes episodes and sandbox layers that only they refer to; ends a session whose episode is deleted."""

from __future__ import annotations

from collections.abc import Sequence

from errata_protocol.errors import UnknownEpisode
from errata_protocol.replay import DeletedEpisodes

from ..runtime.runtime import Runtime


class Deletion:
    """Deletes episodes.

    Args:
        runtime: Journal, sandboxes and live sessions.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def delete(self, eid: str, principal: str | None) -> int:
        """Delete an episode and every sandbox layer that only it refers to; return its number of deliveries.

        A session whose current episode this is ends with it, because it could not be continued.

        Args:
            eid: Id of the episode.
            principal: Owner of the episode.

        Raises:
            UnknownEpisode: The episode does not exist or has another owner.
        """
        deleted = await self._delete(eid, principal)
        await self._runtime.collect()
        return deleted or 0

    async def _delete(self, eid: str, principal: str | None, *, unused_only: bool = False) -> int | None:
        """Delete an episode as `delete` does; return None if ``unused_only`` kept it because it is in use."""
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
        """Delete each of several episodes as `delete` does; those of another owner are reported as unknown.

        Args:
            eids: Ids of the episodes.
            principal: Owner of the episodes.
            unused_only: Keep episodes that are current in an open session or have forks, and report them as in use.
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
