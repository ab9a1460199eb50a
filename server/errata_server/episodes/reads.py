"""`JournalReads`: episode lists, details, rewards and state(t) from the journal (PROTOCOL A2, A5, G)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder
from errata_protocol.errors import NoReset, UnknownEpisode
from errata_protocol.replay import (
    AgentText,
    EpisodeAggregates,
    EpisodeDetail,
    EpisodePage,
    RewardRecord,
    TurnPage,
    TurnRecord,
)
from errata_protocol.turn_pages import MAX_PAGE_BYTES, played_turn

from ..journal.base import DeliveryRow, EpisodeStats, Journal, TurnRow
from ..runtime.ownership import find_delivery, find_episode
from ..runtime.rewards import reward_record
from ..runtime.rows import wire_digest
from ..runtime.store import Store
from .agent_texts import AgentTexts
from .interface import Delivered
from .summaries import summary_of


class JournalReads:
    """Reads episodes and deliveries from the journal, without using a live environment.

    Args:
        store: The journal.
        texts: Makes the text that agents read; None for that of the installed environments.
        attached: Returns the ids of the sessions that have a connection; called on any thread. It returns None where no
            process serves the sessions: all open ones are then listed as ``open``.
    """

    def __init__(
        self,
        store: Store,
        texts: AgentTexts | None = None,
        attached: Callable[[], frozenset[str] | None] = lambda: None,
    ) -> None:
        self._store = store
        self._texts = texts or AgentTexts()
        self._attached = attached

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

    async def turns(self, eid: str, *, after: int, limit: int, principal: str | None) -> TurnPage:
        """Return a page of an episode's turns; it reads no others, however many the episode has.

        Args:
            eid: Episode.
            after: t behind which the page begins; -1 for the first page.
            limit: Most turns of the page; it has fewer where their requests and payloads are large.
            principal: Owner of the episode.

        Raises:
            UnknownEpisode: The episode does not exist or has another owner.
        """

        def read(journal: Journal) -> TurnPage:
            find_episode(journal, eid, principal)
            earlier = journal.delivery(eid, after) if after >= 0 else None
            rows = journal.deliveries(eid, after=after, limit=limit, most_bytes=MAX_PAGE_BYTES)
            stats = journal.episode_stats(eid)
            if stats is None:  # deleted since
                raise UnknownEpisode(eid)
            late = journal.late_rewards(eid, first=_t(rows[0]), last=_t(rows[-1])) if rows else {}
            before, turns = earlier.created if earlier is not None else None, []
            for row in rows:
                turns.append(
                    played_turn(
                        _record(row),
                        request=row.request,
                        payload=row.payload,
                        created=row.created,
                        before=before,
                        late_rewards=late.get(_t(row), 0),
                    )
                )
                before = row.created
            more = bool(rows) and bool(journal.deliveries(eid, after=_t(rows[-1]), limit=1, most_bytes=1))
            return TurnPage(
                turns=turns, next=str(_t(rows[-1])) if more else None, deliveries=stats.deliveries
            )  # fmt: skip

        return await self._store.scan(read)

    async def action(self, eid: str, t: int, principal: str | None) -> bytes:
        """Return the whole request that delivery t of an episode answered; raises as `state_at`."""
        return (await self._store.owned_delivery(eid, t, principal)).request

    async def agent_text(self, eid: str, t: int, principal: str | None) -> AgentText:
        """Return what the agent read of delivery t of an episode; raises as `state_at`."""

        def read(journal: Journal) -> AgentText:
            row, episode = find_delivery(journal, eid, t, principal), find_episode(journal, eid, principal)
            return self._texts.read(episode.environment, episode.agent_text_version, t, row.wire_kind, row.payload)

        return await self._store.scan(read)

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
            found, last = journal.episodes(
                limit=limit, after=after, wanted=wanted, order=order, principal=principal, attached=self._attached()
            )
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
            lambda journal: journal.aggregates(
                bucket_s=bucket_s, wanted=wanted, principal=principal, attached=self._attached()
            )
        )

    async def detail(self, eid: str, principal: str | None) -> EpisodeDetail:
        """Return an episode and its turns.

        Raises:
            UnknownEpisode: The episode does not exist or has another owner.
        """
        stats, turns = await self._store.owned_turns(eid, principal, self._attached)
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


def _t(row: DeliveryRow) -> int:
    if row.t is None:
        raise TypeError("a delivery has a t")
    return row.t


def _record(row: DeliveryRow) -> TurnRecord:
    semantic = row.semantic()
    return _turn(
        TurnRow(
            _t(row), row.kind, row.digest, semantic, row.reward, row.done, row.error_kind, row.hint_template_key
        )
    )  # fmt: skip


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
