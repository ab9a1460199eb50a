"""`JournalReads`: episode lists, details, rewards and state(t) from the journal (PROTOCOL A2, A5, G)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from errata_protocol.errors import NoReset
from errata_protocol.replay import EpisodeDetail, EpisodePage, RewardRecord, TurnRecord

from ..journal.base import DeliveryRow, EpisodeRow, EpisodeStats, Journal, TurnRow
from ..runtime.rewards import reward_record
from ..runtime.rows import wire_digest
from ..runtime.store import Store
from .interface import Delivered
from .summaries import summaries


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
        environment: str | None,
        error_kind: str | None,
        episode_id: str | None = None,
        principal: str | None,
    ) -> EpisodePage:
        """Return one page of episodes, newest first."""
        before = int(cursor) if cursor is not None else None

        def read(journal: Journal) -> EpisodePage:
            found, following = journal.episodes(
                limit=limit,
                before=before,
                environment=environment,
                error_kind=error_kind,
                episode_id=episode_id,
                principal=principal,
            )
            return EpisodePage(
                episodes=summaries(journal, found), next=str(following) if following is not None else None
            )

        return await self._store.read(read)

    async def detail(self, eid: str, principal: str | None) -> EpisodeDetail:
        """Return an episode and its turns.

        Raises:
            UnknownEpisode: The episode does not exist or has another owner.
        """
        row, turns = await self._store.owned_turns(eid, principal)
        # On a thread, whatever the journal is: an episode may have a hundred thousand turns.
        return await asyncio.to_thread(_detail, self._store.journal, row, turns)


def _detail(journal: Journal, row: EpisodeRow, turns: Sequence[TurnRow]) -> EpisodeDetail:
    kinds = Counter(turn.error_kind for turn in turns if turn.error_kind is not None)
    stats = EpisodeStats(
        row,
        len(turns),
        sum(t.reward or 0.0 for t in turns),
        any(t.done for t in turns),
        dict(sorted(kinds.items())),
    )
    (summary,) = summaries(journal, [stats])
    return EpisodeDetail(
        **dict(summary), turns=[_turn(turn) for turn in turns], agent_text_version=row.agent_text_version
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
