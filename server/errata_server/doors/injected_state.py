"""``reset(injected_state={episode_id, t})``: continues a session from a state(t) of an episode (PROTOCOL D11)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from errata_protocol.errors import SessionUnknown, UnknownEpisode
from errata_protocol.labels import NO_LABELS, Labels

from ..episodes.forks import Forks
from ..journal.base import DeliveryRow, Record, label_fields
from ..runtime.ownership import ForkParent
from ..runtime.rows import Admitted, forked_row
from ..runtime.runtime import Runtime
from ..sessions.session import Session
from .readers import Reader


async def reset_to(
    runtime: Runtime,
    forks: Forks,
    session: Session,
    admitted: Admitted,
    place: tuple[str, int],
    reader: Reader,
    socket: object | None = None,
    labels: Labels = NO_LABELS,
) -> DeliveryRow:
    """Begin an episode of a session as a fork of another episode at delivery t, and close the session's instance.

    The session's next request restores an instance in the new episode.

    Args:
        runtime: Journal and ids.
        forks: Makes the episode.
        session: The session.
        admitted: The reset.
        place: (eid, t): an episode of this environment and principal, of any session and any worker.
        reader: Who asks.
        socket: The plain socket on which the reset arrived; None for a multiplexed one.
        labels: Labels that came with the reset, in place of the other episode's.

    Returns:
        The row of the new episode's t=0, committed.

    Raises:
        UnknownEpisode: There is no such episode of this reader and environment.
        Misdirected: The episode is of another data directory, and cannot be continued here.
        StateOutOfRange: The episode has no delivery t.
        NoReset: t is 0 and the episode began without a reset.
        NotSupported: The environment takes no snapshots and is not declared deterministic.
        SessionUnknown: The session was closed, or attached to another socket, meanwhile.
        SessionLost: The session is lost.
        JournalUnavailable: The worker that has the episode does not answer.
    """
    async with _parent(runtime, session, place, reader) as parent:
        child = forks.child(parent, session.sid, admitted.request)
        forked_session, episode, _ = child.records
        episode = replace(episode, **label_fields(episode.labels.updated(labels)))
        if forked_session.environment != session.row.environment:
            raise UnknownEpisode(place[0])  # another environment of this server cannot restore its states
        row = forked_row(parent.row, replace(admitted, eid=child.eid, t=0))
        async with session.lock as held:
            if socket is not None and session.attached is not socket:
                raise SessionUnknown("another socket speaks for this session now: attach again")
            session.check_alive()
            first: list[Record] = [] if session.committed else [session.row]
            await runtime.store.wait_until_writable()
            await runtime.store.commit(*first, episode, row)
            session.committed = True
            host = session.take_host(held)
            session.eid, session.t = child.eid, 0
            if host is not None:
                await host.close()
    return row


@asynccontextmanager
async def _parent(
    runtime: Runtime, session: Session, place: tuple[str, int], reader: Reader
) -> AsyncIterator[ForkParent]:
    """Return the delivery to continue from, of this worker or another one, which keeps it until the context is left."""
    (eid, t), principal = place, session.row.principal
    if runtime.fleet is not None and runtime.fleet.elsewhere.has(eid):
        async with runtime.fleet.elsewhere.parent(eid, t, principal, reader.key) as parent:
            yield parent
        return
    await reader.check(eid, sid=session.sid)
    yield await runtime.store.owned_parent(eid, t, principal)
