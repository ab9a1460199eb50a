"""`Lineage`: collects the deliveries of an episode and of those that it was forked from, from the log or from the
server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from errata_protocol.replay import EpisodeDetail, Origin, StateAt

from ..wire.frames import DigestMismatch
from .delivery_log import DeliveryLog

Fetch = Callable[[int, str], Awaitable[StateAt]]
"""Reads one delivery from the server."""

Describe = Callable[[str], Awaitable[EpisodeDetail]]
"""Reads an episode's list of turns from the server."""


class Lineage:
    """Collects deliveries from a client's log and, where it lacks them, from the server.

    Args:
        log: The deliveries that the client received; those of the running episode that are fetched are added to it.
        fetch: Reads one delivery from the server.
        describe: Reads an episode's turns and origin from the server.
        origins: The origin of known episodes; None for an episode that is no fork.
    """

    def __init__(
        self, log: DeliveryLog, fetch: Fetch, describe: Describe, origins: dict[str, Origin | None] | None = None
    ) -> None:
        self.origins: dict[str, Origin | None] = dict(origins or {})
        self._log = log
        self._fetch = fetch
        self._describe = describe

    async def trace(self, eid: str, before: int | None = None) -> list[StateAt]:
        """Return the deliveries of ``eid`` in order; for a fork, after those of its parent before the fork.

        Args:
            eid: Episode.
            before: Leave out t >= ``before``; None takes all.

        Raises:
            UnknownEpisode: There is no such episode.
            DigestMismatch: A delivery does not have the digest in the list of turns.
        """
        kept = self._log.kept(eid)
        if self._log.is_complete(eid) and (eid in self.origins or kept[0].source == "history"):
            own = kept  # the client received the reset itself, so the episode is no fork and all of it is kept
        else:
            own = await self._fetched(eid, before)
        if before is not None:
            own = [state for state in own if state.t < before]
        origin = self.origins.get(eid)
        return own if origin is None else [*await self.trace(origin.eid, origin.t), *own]

    def ancestors(self, eid: str, t: int) -> list[StateAt]:
        """Return the kept deliveries up to ``t`` of ``eid``, after those of the episodes that it was forked from."""
        kept = [state for state in self._log.kept(eid) if state.t <= t]
        origin = self.origins.get(eid)
        return kept if origin is None else [*self.ancestors(origin.eid, origin.t), *kept]

    async def _fetched(self, eid: str, before: int | None) -> list[StateAt]:
        detail = await self._describe(eid)
        self.origins[eid] = detail.origin
        states = []
        for turn in detail.turns:
            if before is not None and turn.t >= before:
                continue
            state = self._log.get(eid, turn.t) or await self._fetch(turn.t, eid)
            if state.digest != turn.digest:
                raise DigestMismatch(eid, turn.t, turn.digest, state.digest)
            states.append(state)
        if eid == self._log.eid:
            self._log.add(states)
        return states
