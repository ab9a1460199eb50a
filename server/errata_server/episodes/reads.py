"""`JournalReads`: episode lists, details, rewards and state(t) from the journal (PROTOCOL A2, A5, G)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder
from errata_protocol.errors import NoReset
from errata_protocol.replay import EpisodeAggregates, EpisodeDetail, EpisodePage, RewardRecord, TurnRecord

from ..journal.base import DeliveryRow, EpisodeStats, Journal, TurnRow
from ..runtime.rewards import reward_record
from ..runtime.rows import wire_digest
from ..runtime.store import Store
from .interface import Delivered
from .summaries import summary_of


class JournalReads:
    """Reads episodes and deliveries from the journal, without using a live environment.

    Args:
        store: The journal.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def state_at(self, current: str | None, t: int, eid: str | None, principal: str | None) -> DeliveryRow:
        """Return delivery t of an episode.

        Args:
            current: Id of the session's current episode; None before its first reset.
            t: Index of the delivery.
            eid: Id of the episode; None for ``current``.
            principal: Owner of the episode.

        Raises:
            NoReset: The session has no episode yet, or the episode began without a reset.
            UnknownEpisode: The episode does not exist or has another owner.
            StateOutOfRange: The episode has no delivery t.
        """
        eid = eid if eid is not None else current
        if eid is None:
            raise NoReset("this session has delivered nothing yet: reset it first")
        return await self._store.owned_delivery(eid, t, principal)

    async def delivered(self, eid: str, t: int, principal: str | None) -> Delivered:
        """Return the payload sent as delivery t of episode ``eid``; raises as `state_at`."""
        row = await self._store.owned_delivery(eid, t, principal)
        return Delivered(t, row.wire_kind, row.payload, wire_digest(row.digest))

    async def rewards(self, eid: str, principal: str | None) -> list[RewardRecord]:
        """Return the late rewards of an episode, in the order of their commits.

        Raises:
            UnknownEpisode: The episode does not exist or has another owner.
        """
        return [reward_record(row) for row in await self._store.owned_rewards(eid, principal)]

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
        principal: str | None,
    ) -> EpisodePage:
        """Return one page of episodes.

        Raises:
            InvalidRequest: The cursor is none, or one of a list in another order.
        """
        after = order.place_of(cursor) if cursor is not None else None

        def read(journal: Journal) -> EpisodePage:
            found, last = journal.episodes(limit=limit, after=after, wanted=wanted, order=order, principal=principal)
            following = order.cursor(last) if last is not None else None
            return EpisodePage(episodes=[summary_of(stats) for stats in found], next=following)

        return await self._store.scan(read)

    async def aggregates(
        self, *, bucket_s: int, wanted: EpisodeFilter = EVERY, principal: str | None
    ) -> EpisodeAggregates:
        """Return what episodes add up to, by the time of their creation.

        Raises:
            InvalidRequest: There are too many buckets or counts.
        """
        return await self._store.scan(
            lambda journal: journal.aggregates(bucket_s=bucket_s, wanted=wanted, principal=principal)
        )

    async def detail(self, eid: str, principal: str | None) -> EpisodeDetail:
        """Return an episode and its turns.

        Raises:
            UnknownEpisode: The episode does not exist or has another owner.
        """
        stats, turns = await self._store.owned_turns(eid, principal)
        # On a thread, whatever the journal is: an episode may have a hundred thousand turns.
        return await asyncio.to_thread(_detail, stats, turns)


def _detail(stats: EpisodeStats, turns: Sequence[TurnRow]) -> EpisodeDetail:
    kinds = Counter(turn.error_kind for turn in turns if turn.error_kind is not None)
    keys = Counter(turn.hint_template_key for turn in turns if turn.hint_template_key is not None)
    shown = replace(  # what these turns add up to: others may have come since
        stats,
        deliveries=len(turns),
        reward=sum(t.reward or 0.0 for t in turns),
        done=any(t.done for t in turns),
        error_kinds=dict(sorted(kinds.items())),
        hint_keys=dict(sorted(keys.items())),
    )
    return EpisodeDetail(
        **dict(summary_of(shown)),
        turns=[_turn(turn) for turn in turns],
        agent_text_version=stats.row.agent_text_version,
    )


def _turn(turn: TurnRow) -> TurnRecord:
    return TurnRecord(
        t=turn.t,
        kind="reset" if turn.kind == "fork" else turn.kind,
        reward=turn.reward,
        done=turn.done,
        error_kind=turn.error_kind,
        hint_template_key=turn.hint_template_key,
        digest=wire_digest(turn.digest),
        semantic_digest=wire_digest(turn.semantic_digest) if turn.semantic_digest is not None else None,
    )
