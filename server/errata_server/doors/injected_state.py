"""``reset(injected_state={episode_id, t})``: continues a session from a state(t) of an episode (PROTOCOL D11)."""

from __future__ import annotations

from msgspec.structs import replace

from errata_protocol.errors import SessionUnknown, UnknownEpisode
from errata_protocol.labels import NO_LABELS, Labels

from ..episodes.forks import Forks
from ..journal.base import DeliveryRow, Record, label_fields
from ..runtime.rows import Admitted, forked_row
from ..runtime.runtime import Runtime
from ..sessions.session import Session


async def reset_to(
    runtime: Runtime,
    forks: Forks,
    session: Session,
    admitted: Admitted,
    place: tuple[str, int],
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
        place: (eid, t): an episode of this environment and principal, of any session.
        socket: The plain socket on which the reset arrived; None for a multiplexed one.
        labels: Labels that came with the reset, in place of the other episode's.

    Returns:
        The row of the new episode's t=0, committed.

    Raises:
        UnknownEpisode: There is no such episode of this principal and environment.
        StateOutOfRange: The episode has no delivery t.
        NoReset: t is 0 and the episode began without a reset.
        NotSupported: The environment takes no snapshots and is not declared deterministic.
        SessionUnknown: The session was closed, or attached to another socket, meanwhile.
        SessionLost: The session is lost.
    """
    eid, t = place
    parent = await runtime.store.owned_delivery(eid, t, session.row.principal)
    child = await forks.child(parent, session.sid, admitted.request)
    forked_session, episode, _ = child.records
    episode = replace(episode, **label_fields(episode.labels.updated(labels)))
    if forked_session.environment != session.row.environment:
        raise UnknownEpisode(eid)  # another environment of this server cannot restore its states
    row = forked_row(parent, replace(admitted, eid=child.eid, t=0))
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
