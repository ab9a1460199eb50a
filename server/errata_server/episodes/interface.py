"""`EpisodeReads`: the interface for reading episodes; implemented for the journal and for bundle files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder
from errata_protocol.replay import (
    AgentText,
    EpisodeAggregates,
    EpisodeDetail,
    EpisodePage,
    Kind,
    RewardRecord,
    TurnPage,
)


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivery as ``GET /episodes/{eid}/states/{t}`` returns it."""

    t: int
    kind: Kind
    payload: bytes
    digest: str


class EpisodeReads(Protocol):
    """Reads of episodes; each may raise `errata_protocol.errors.UnknownEpisode`."""

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
        principal: str | None,
    ) -> EpisodePage:
        """Return one page of episodes; raises `errata_protocol.errors.InvalidRequest` for a wrong cursor."""
        ...

    async def aggregates(
        self, *, bucket_s: int, wanted: EpisodeFilter = EVERY, principal: str | None
    ) -> EpisodeAggregates:
        """Return what episodes add up to, by the time of their creation in buckets of ``bucket_s`` seconds; raises
        `errata_protocol.errors.InvalidRequest` where these are too many."""
        ...

    async def detail(self, eid: str, principal: str | None) -> EpisodeDetail:
        """Return an episode and its turns."""
        ...

    async def turns(self, eid: str, *, after: int, limit: int, principal: str | None) -> TurnPage:
        """Return turns of an episode behind the one with t ``after``, -1 for the first page; fewer than ``limit`` where
        they are large."""
        ...

    async def action(self, eid: str, t: int, principal: str | None) -> bytes:
        """Return the whole request that delivery t answered, as journaled."""
        ...

    async def agent_text(self, eid: str, t: int, principal: str | None) -> AgentText:
        """Return what the agent read of delivery t."""
        ...

    async def rewards(self, eid: str, principal: str | None) -> Sequence[RewardRecord]:
        """Return the late rewards of an episode, in the order of their commits."""
        ...

    async def delivered(self, eid: str, t: int, principal: str | None) -> Delivered:
        """Return the exact payload of delivery t."""
        ...
