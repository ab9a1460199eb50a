"""An episode's deliveries from its very beginning: what a client kept, what it has to fetch, and a fork's parents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from errata_protocol.replay import EpisodeDetail, Origin, StateAt

from .fallback import DeliveryLog
from .frames import DigestMismatch

Fetch = Callable[[int, str], Awaitable[StateAt]]
"""Reads one delivery from the server."""

Describe = Callable[[str], Awaitable[EpisodeDetail]]
"""Reads an episode's list of turns from the server."""


class Lineage:
    """Puts an episode's trace together.

    Args:
        log: What this client received; whatever is fetched of the running episode is kept there too.
        fetch: Reads one delivery from the server.
        describe: Lists an episode's turns and its origin.
        origins: Episodes whose origin is known already; None for one that is no fork.
    """

    def __init__(
        self, log: DeliveryLog, fetch: Fetch, describe: Describe, origins: dict[str, Origin | None] | None = None
    ) -> None:
        self.origins: dict[str, Origin | None] = dict(origins or {})
        self._log = log
        self._fetch = fetch
        self._describe = describe

    async def trace(self, eid: str, before: int | None = None) -> list[StateAt]:
        """Return the deliveries of ``eid`` in order, behind those its parent made before the fork.

        Args:
            eid: Episode.
            before: Leave out t >= ``before``; None takes all.
        """
        kept = self._log.kept(eid)
        if self._log.is_complete(eid) and (eid in self.origins or kept[0].source == "history"):
            own = kept  # this client received the reset itself, so the episode is no fork and nothing is missing
        else:
            own = await self._fetched(eid, before)
        if before is not None:
            own = [state for state in own if state.t < before]
        origin = self.origins.get(eid)
        return own if origin is None else [*await self.trace(origin.eid, origin.t), *own]

    def ancestors(self, eid: str, t: int) -> list[StateAt]:
        """Return what is kept of ``eid`` up to and with ``t``, and of the episodes it was forked from."""
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
            self._log.seed(states)
        return states
