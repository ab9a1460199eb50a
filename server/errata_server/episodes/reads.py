"""state(t), episode lists and fork: reads of the journal, and the one write that makes a child (PROTOCOL A2, A5, G)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from errata_protocol.environment import Recovery
from errata_protocol.errors import Conflict, NoReset, NotSupported, UnknownEpisode
from errata_protocol.replay import (
    DeletedEpisodes,
    EpisodeDetail,
    EpisodePage,
    EpisodeSummary,
    ForkReply,
    ForkRequest,
    Origin,
    RewardRecord,
    TurnRecord,
)

from ..ids import name_of
from ..journal.base import DeliveryRow, EpisodeRow, EpisodeStats, SessionRow, TurnRow
from ..runtime.ownership import absence, owned_episode
from ..runtime.rewards import reward_record
from ..runtime.rows import Admitted, forked_row, wire_digest
from ..runtime.runtime import Runtime
from ..sessions.session import Session
from .interface import Delivered


@dataclass(frozen=True, slots=True)
class Child:
    """A fork that is not committed: the eid of its episode, and its rows."""

    eid: str
    records: tuple[SessionRow, EpisodeRow, DeliveryRow]


class Replay:
    """Reads what was delivered; never touches a live environment.

    Args:
        runtime: Journal, ids and clock.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def state_at(self, session: Session, t: int, eid: str | None, principal: str | None) -> DeliveryRow:
        """Return the delivery t of an episode of the asking principal, by default the session's current one.

        Raises:
            NoReset: The session has no episode yet, or the episode began without a reset.
            UnknownEpisode: No such episode, or somebody else's.
            StateOutOfRange: The episode has no delivery t.
        """
        if eid is None:
            if session.eid is None:
                raise NoReset("this session has delivered nothing yet: reset it first")
            eid = session.eid
        return await self.delivery(eid, t, principal)

    async def delivery(self, eid: str, t: int, principal: str | None) -> DeliveryRow:
        """Return delivery t of episode ``eid``; see `state_at`."""
        await owned_episode(self._runtime, eid, principal)
        row = await self._runtime.read(self._runtime.journal.delivery, eid, t)
        if row is None:
            raise await absence(self._runtime, eid, t)
        return row

    async def delivered(self, eid: str, t: int, principal: str | None) -> Delivered:
        """Return what was sent at t of episode ``eid``; see `state_at`."""
        row = await self.delivery(eid, t, principal)
        return Delivered(t, row.wire_kind, row.payload, wire_digest(row.digest))

    async def rewards(self, eid: str, principal: str | None) -> list[RewardRecord]:
        """Return the late rewards of an episode, in the order of their commits.

        Raises:
            UnknownEpisode: No such episode, or somebody else's.
        """
        return [reward_record(row) for row in await self._runtime.rewards.list(eid, principal)]

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
        found, following = await self._runtime.read(
            self._runtime.journal.episodes,
            limit=limit,
            before=before,
            environment=environment,
            error_kind=error_kind,
            episode_id=episode_id,
            principal=principal,
        )
        return EpisodePage(
            episodes=[EpisodeSummary(**_summary(s)) for s in found],
            next=str(following) if following is not None else None,
        )

    async def detail(self, eid: str, principal: str | None) -> EpisodeDetail:
        """Return an episode and its turns.

        Raises:
            UnknownEpisode: No such episode, or somebody else's.
        """
        row = await owned_episode(self._runtime, eid, principal)
        turns = await self._runtime.read(self._runtime.journal.turns, eid, semantic=True)
        kinds: dict[str, int] = {}
        for turn in turns:
            if turn.error_kind is not None:
                kinds[turn.error_kind] = kinds.get(turn.error_kind, 0) + 1
        stats = EpisodeStats(
            row,
            len(turns),
            sum(t.reward or 0.0 for t in turns),
            any(t.done for t in turns),
            dict(sorted(kinds.items())),
        )
        return EpisodeDetail(
            **_summary(stats), turns=[_turn(t) for t in turns], agent_text_version=row.agent_text_version
        )

    async def fork(self, eid: str, request: ForkRequest, principal: str | None) -> ForkReply:
        """Make a child session that stands where episode ``eid`` stood at ``request.t``.

        One commit, nothing else: no environment is made before the child's first request. Idempotent by request_id.

        Raises:
            UnknownEpisode: No such episode, or somebody else's.
            StateOutOfRange: The episode has no delivery t.
            NotSupported: The environment takes no snapshots and is not declared deterministic.
            Conflict: The request_id was used with another t.
        """
        journal = self._runtime.journal
        parent = await self.delivery(eid, request.t, principal)
        earlier = await self._runtime.read(journal.fork_session, eid, request.request_id)
        if earlier is not None:
            return await self._same_child(earlier, eid, request)
        sid = self._runtime.ids.session()
        asked = request.model_dump_json().encode()
        child = await self.child(parent, sid, asked, fork_request=request.request_id)
        await self._runtime.wait_for_journal()
        try:
            await journal.commit(*child.records)
        except Conflict:
            earlier = await self._runtime.read(journal.fork_session, eid, request.request_id)
            if earlier is None:
                raise
            return await self._same_child(earlier, eid, request)
        return ForkReply(session_id=sid, eid=child.eid, origin=Origin(eid=eid, t=request.t))

    async def child(
        self,
        parent: DeliveryRow,
        sid: str,
        asked: bytes,
        *,
        fork_request: str | None = None,
        key_hash: bytes | None = None,
        group: str | None = None,
    ) -> Child:
        """Return what makes a session that stands at ``parent`` as its own t=0, not committed.

        Args:
            parent: The delivery to continue from.
            sid: Id of the child.
            asked: The request, as journaled.
            fork_request: Its ``request_id``.
            key_hash: Of a multiplexed child.
            group: Likewise.

        Raises:
            NotSupported: The environment takes no snapshots and is not declared deterministic.
        """
        journal, eid = self._runtime.journal, parent.eid
        parent_session = await self._runtime.read(journal.session, parent.sid)
        recovery = Recovery.SNAPSHOT if parent.state is not None else Recovery.NONE
        if parent.state is None and parent_session is not None:
            recovery = Recovery(parent_session.recovery)
        if recovery is Recovery.NONE or (recovery is Recovery.SNAPSHOT and parent.state is None):
            raise NotSupported(
                f"episode {eid} cannot be forked: its environment has no snapshot()/restore() and was not declared "
                "deterministic; its observations can still be read by state(t)"
            )
        episode = await self._runtime.read(journal.episode, eid)
        if episode is None:
            raise UnknownEpisode(eid)
        now = self._runtime.clock.time()
        session = SessionRow(
            sid=sid,
            environment=episode.environment,
            recovery=recovery,
            seed=parent_session.seed if parent_session is not None else self._runtime.ids.seed(),
            created=now,
            given_out=True,
            principal=episode.principal,
            fork_of=eid,
            fork_request=fork_request,
            key_hash=key_hash,
            group=group,
        )
        child = EpisodeRow(
            eid=self._runtime.ids.episode(),
            sid=sid,
            environment=episode.environment,
            created=now,
            episode_id=None,
            principal=episode.principal,
            origin_eid=eid,
            origin_t=parent.t,
            agent_text_version=episode.agent_text_version,
        )
        admitted = Admitted(child.eid, 0, sid, None, "fork", asked, now)
        return Child(child.eid, (session, child, forked_row(parent, admitted)))

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
        runtime, journal = self._runtime, self._runtime.journal
        row = await owned_episode(runtime, eid, principal)
        last = await runtime.read(journal.last_delivery, row.sid)
        if last is None or last.eid == eid:
            session = await runtime.read(journal.session, row.sid) if unused_only else None
            if session is not None and session.status == "open":
                return None
            await runtime.end_session(row.sid)
        deleted = await runtime.read(journal.delete_episode, eid, unless_forked=unused_only)
        kept = unused_only and not deleted and await runtime.read(journal.episode, eid) is not None
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
            await self._runtime.read(self._runtime.journal.compact)
        return DeletedEpisodes(deleted=deleted, unknown=unknown, in_use=in_use)

    async def _same_child(self, row: SessionRow, eid: str, request: ForkRequest) -> ForkReply:
        first = await self._runtime.read(self._runtime.journal.first_episode, row.sid)
        if first is None or first.origin_t != request.t:
            raise Conflict(
                f"request_id {request.request_id!r} already forked episode {eid} at another t: use a new request_id",
                eid=eid,
            )
        return ForkReply(session_id=row.sid, eid=first.eid, origin=Origin(eid=eid, t=request.t))


def _summary(stats: EpisodeStats) -> dict[str, object]:
    row = stats.row
    return {
        "eid": row.eid,
        "episode_id": row.episode_id,
        "environment": row.environment,
        "session": name_of(row.sid),
        "created": row.created,
        "done": stats.done,
        "deliveries": stats.deliveries,
        "reward": stats.reward,
        "error_kinds": stats.error_kinds,
        "origin": row.origin,
    }


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
