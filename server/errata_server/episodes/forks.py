"""`Forks`: creates a session that continues from delivery t of an episode, in one commit (PROTOCOL A5)."""

from __future__ import annotations

from dataclasses import dataclass

from errata_protocol.errors import Conflict, NotSupported
from errata_protocol.labels import Labels
from errata_protocol.replay import ForkReply, ForkRequest, Origin

from ..clock import Clock
from ..ids import Ids
from ..journal.base import DeliveryRow, EpisodeRow, SessionRow, label_fields
from ..recovery import NONE, SNAPSHOT, recovery_class
from ..runtime.ownership import ForkParent, read_key_of
from ..runtime.rows import Admitted, forked_row
from ..runtime.store import Store


@dataclass(frozen=True, slots=True)
class Child:
    """A fork before its commit: the id of its episode, and its rows."""

    eid: str
    records: tuple[SessionRow, EpisodeRow, DeliveryRow]


class Forks:
    """Creates forks from the journal, without using a live environment.

    Args:
        store: The journal.
        ids: Source of ids.
        clock: Source of times.
    """

    def __init__(self, store: Store, ids: Ids, clock: Clock) -> None:
        self._store = store
        self._ids = ids
        self._clock = clock

    async def fork(self, eid: str, request: ForkRequest, principal: str | None) -> ForkReply:
        """Create a session that continues episode ``eid`` from delivery ``request.t``.

        Makes one commit. No environment is created before the new session's first request. Idempotent by request_id.

        Args:
            eid: Id of the episode.
            request: Delivery to continue from, the request_id and the labels.
            principal: Owner of the episode.

        Raises:
            UnknownEpisode: The episode does not exist or has another owner.
            StateOutOfRange: The episode has no delivery t.
            NotSupported: The environment takes no snapshots and is not declared deterministic.
            Conflict: The request_id was used with another t.
        """
        parent = await self._store.owned_parent(eid, request.t, principal)
        earlier = await self._store.fork_session(eid, request.request_id)
        if earlier is not None:
            return await self._same_child(earlier, eid, request)
        sid = self._ids.session()
        asked = request.model_dump_json(exclude_none=True).encode()
        labels = None if request.labels is None else request.labels.labels()
        child = self.child(parent, sid, asked, fork_request=request.request_id, labels=labels)
        await self._store.wait_until_writable()
        try:
            await self._store.commit(*child.records)
        except Conflict:
            earlier = await self._store.fork_session(eid, request.request_id)
            if earlier is None:
                raise
            return await self._same_child(earlier, eid, request)
        return _reply(child.records[0], child.eid, eid, request.t)

    def child(
        self,
        parent: ForkParent,
        sid: str,
        asked: bytes,
        *,
        fork_request: str | None = None,
        key_hash: bytes | None = None,
        group: str | None = None,
        labels: Labels | None = None,
    ) -> Child:
        """Return the rows of a new session whose t=0 is the delivery of ``parent``; does not commit them.

        Args:
            parent: The delivery to continue from.
            sid: Id of the new session.
            asked: The fork request, as journaled.
            fork_request: The ``request_id`` of the fork request.
            key_hash: Hash of the new session's key, if it is multiplexed.
            group: Group of the new session, if it is multiplexed.
            labels: All labels of the new episode, and of later ones of its session; None gives them the parent's.

        Raises:
            NotSupported: The environment takes no snapshots and is not declared deterministic.
        """
        row, episode, parent_session = parent.row, parent.episode, parent.session
        eid = row.eid
        recovery = SNAPSHOT if row.state is not None else NONE
        if row.state is None and parent_session is not None:
            recovery = recovery_class(parent_session.recovery)
        if not recovery.can_fork or (recovery.takes_snapshots and row.state is None):
            raise NotSupported(
                f"episode {eid} cannot be forked: its environment has no snapshot()/restore() and was not declared "
                "deterministic; its observations can still be read by state(t)"
            )
        labels = episode.labels if labels is None else labels
        now = self._clock.time()
        session = SessionRow(
            sid=sid,
            environment=episode.environment,
            recovery=recovery.name,
            seed=parent_session.seed if parent_session is not None else self._ids.seed(),
            created=now,
            given_out=True,
            principal=episode.principal,
            fork_of=eid,
            fork_request=fork_request,
            key_hash=key_hash,
            group=group,
            **label_fields(labels),
        )
        child = EpisodeRow(
            eid=self._ids.episode(),
            sid=sid,
            environment=episode.environment,
            created=now,
            episode_id=self._ids.uuid(),  # a UUID as upstream's; it says nothing about the eid (R-015-22)
            principal=episode.principal,
            origin_eid=eid,
            origin_t=row.t,
            agent_text_version=episode.agent_text_version,
            **label_fields(labels),
        )
        admitted = Admitted(child.eid, 0, sid, None, "fork", asked, now)
        return Child(child.eid, (session, child, forked_row(row, admitted)))

    async def _same_child(self, row: SessionRow, eid: str, request: ForkRequest) -> ForkReply:
        first = await self._store.first_episode(row.sid)
        if first is None or first.origin_t != request.t:
            raise Conflict(
                f"request_id {request.request_id!r} already forked episode {eid} at another t: use a new request_id",
                eid=eid,
            )
        return _reply(row, first.eid, eid, request.t)


def _reply(session: SessionRow, child: str, parent: str, t: int) -> ForkReply:
    key = read_key_of(session) if session.principal is None else None
    return ForkReply(session_id=session.sid, eid=child, origin=Origin(eid=parent, t=t), read_key=key)
