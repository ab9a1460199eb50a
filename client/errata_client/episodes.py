"""`Episodes`: reads episodes in a server's journal and posts rewards to them, without a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from errata_protocol.episode_lists import DAY_S, EVERY, NEWEST, EpisodeFilter, EpisodeOrder, page_query
from errata_protocol.replay import (
    AgentText,
    EpisodeAggregates,
    EpisodeDetail,
    EpisodePage,
    RewardPost,
    StateAt,
    TurnPage,
)
from errata_protocol.turn_pages import DEFAULT_PAGE

from .deliveries.delivery_log import DeliveryLog
from .deliveries.late_rewards import Reward
from .deliveries.lineage import Lineage
from .doors.http_door import HttpDoor, without_secrets

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Episodes:
    """Reads episodes by their eid and adds rewards to them, over HTTP.

    Args:
        base_url: Base URL of the environment, as for `ErrataClient`.
        headers: Sent with every request, e.g. ``{"Authorization": "Bearer …"}``.
        timeout_s: Timeout of one request, seconds.
    """

    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float = 30.0) -> None:
        local = urlsplit(base_url).hostname in _LOOPBACK
        self._door = HttpDoor(base_url.rstrip("/"), headers=headers, timeout_s=timeout_s, trust_env=not local)

    def __repr__(self) -> str:
        return f"<Episodes of {without_secrets(self._door.ws_url)}>"

    async def episodes(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        environment: str | None = None,
        error_kind: str | None = None,
        episode_id: str | None = None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
    ) -> EpisodePage:
        """Return one page of the episodes of this token.

        Args:
            limit: Most episodes of the page, 1 to 500.
            cursor: ``next`` of the page before; None for the first page.
            environment: Only episodes of this environment.
            error_kind: Only episodes with a turn that is marked with this kind.
            episode_id: Only episodes with this alias, which the client chose.
            wanted: What else the episodes have to be; where an argument is given, too, that one counts.
            order: What the list is sorted by. Each of its pages needs the same one.

        Raises:
            InvalidRequest: An argument is not valid.
            NotSupported: The server has no journal, e.g. a vanilla OpenEnv server.
        """
        given = {"environment": environment, "error_kind": error_kind, "episode_id": episode_id}
        return await self._door.episodes(page_query(limit, cursor, given, wanted, order))

    async def aggregates(self, *, bucket_s: int = DAY_S, wanted: EpisodeFilter = EVERY) -> EpisodeAggregates:
        """Return what the episodes of this token add up to, by the time of their creation.

        Args:
            bucket_s: Length of a bucket, seconds; at most a year.
            wanted: What the episodes have to be.

        Raises:
            InvalidRequest: An argument is not valid, or there are too many buckets.
            NotSupported: The server has no such route, e.g. a vanilla OpenEnv server.
            UnknownEpisode: The server is an earlier one, which takes ``aggregates`` for an eid.
        """
        return await self._door.aggregates({"bucket_s": bucket_s, **wanted.parameters()})

    async def episode(self, eid: str) -> EpisodeDetail:
        """Return an episode and the list of its turns.

        Raises:
            UnknownEpisode: There is no such episode.
            NotSupported: The server has no journal, e.g. a vanilla OpenEnv server.
        """
        return await self._door.episode(eid)

    async def turns(self, eid: str, *, limit: int = DEFAULT_PAGE, cursor: str | int | None = None) -> TurnPage:
        """Return one page of an episode's turns with their actions, times and error sites.

        Args:
            eid: Episode.
            limit: Most turns of the page, 1 to 500; it has fewer where they are large.
            cursor: ``next`` of the page before, or any t, behind which the page begins; None for the first page.

        Raises:
            UnknownEpisode: There is no such episode.
            InvalidRequest: An argument is not valid.
            NotSupported: The server has no such route, e.g. an earlier one.
        """
        return await self._door.turns(eid, {"limit": limit, **({"cursor": cursor} if cursor is not None else {})})

    async def action(self, eid: str, t: int) -> bytes:
        """Return the whole request that delivery ``t`` answered, as journaled; errors as `state_at`."""
        return await self._door.action(eid, t)

    async def agent_text(self, eid: str, t: int) -> AgentText:
        """Return what the agent read of delivery ``t``; errors as `state_at`."""
        return await self._door.agent_text(eid, t)

    async def state_at(self, eid: str, t: int) -> StateAt:
        """Return the exact bytes of a delivery, verified by their digest.

        Raises:
            StateOutOfRange: The episode has no delivery ``t``.
            UnknownEpisode: There is no such episode.
            DigestMismatch: The bytes do not have the digest that the server sent.
        """
        return await self._door.state_at(eid, t)

    async def history(self, eid: str, *, until: int | None = None) -> list[StateAt]:
        """Return the deliveries of an episode in order; for a fork, after those of its parent before the fork.

        Args:
            eid: Episode.
            until: The last of its deliveries to return; None takes all.
        """
        lineage = Lineage(DeliveryLog(), lambda t, eid: self._door.state_at(eid, t), self._door.episode)
        return await lineage.trace(eid, None if until is None else until + 1)

    async def rewards(self, eid: str) -> list[Reward]:
        """Return the late rewards of an episode, in the order in which they were posted."""
        return await self._door.rewards(eid)

    async def post_rewards(self, eid: str, rewards: Sequence[RewardPost]) -> list[Reward]:
        """Add rewards to committed deliveries, all or none; the same ``reward_id`` again changes nothing.

        Returns:
            A reward for each post, as committed now or earlier.

        Raises:
            Conflict: A ``reward_id`` was used for another reward.
            StateOutOfRange: The episode has no such delivery.
            InvalidRequest: ``source`` is ``environment``.
        """
        return await self._door.post_rewards(eid, rewards)

    async def aclose(self) -> None:
        """Close idle connections."""
        await self._door.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
