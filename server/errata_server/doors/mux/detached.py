"""`DetachedSessions`: multiplexed sessions without a socket, whose instances other sessions may take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from errata_protocol.mux import ServerSession
from errata_protocol.mux.state import State

from ...runtime.capacity import Capacity
from ...sessions.session import Session


@dataclass(frozen=True, slots=True)
class _Detached:
    """A detached session.

    Args:
        machine: The session in the state machine.
        session: The session that holds the instance.
        lost: See `DetachedSessions.add`.
    """

    machine: ServerSession
    session: Session
    lost: Callable[[ServerSession], None]

    @property
    def has_instance(self) -> bool:
        """Whether it has an instance and still no socket: a session that was attached again may still be listed."""
        return self.machine.state is State.DETACHED and self.session.host is not None


class DetachedSessions:
    """The detached multiplexed sessions of one environment, in the order in which they were detached.

    When there is no capacity left, `errata_server.sessions` takes the instance of the oldest.
    """

    def __init__(self) -> None:
        self._by_sid: OrderedDict[str, _Detached] = OrderedDict()

    def __len__(self) -> int:
        return sum(detached.has_instance for detached in self._by_sid.values())

    def add(self, machine: ServerSession, session: Session, lost: Callable[[ServerSession], None]) -> None:
        """Add a session as the newest.

        Args:
            machine: The session in the state machine.
            session: The session that holds the instance.
            lost: Called with ``machine`` when the instance was taken and the session cannot be continued.
        """
        self._by_sid[session.sid] = _Detached(machine, session, lost)
        self._by_sid.move_to_end(session.sid)

    def discard(self, sid: str) -> None:
        """Remove a session if it is listed; ``sid`` is as journaled."""
        self._by_sid.pop(sid, None)

    def oldest(self, capacity: Capacity) -> Session | None:
        """Return the first session whose instance is idle and whose end would free a place in ``capacity``, or None."""
        for sid, detached in list(self._by_sid.items()):
            session = detached.session
            if not detached.has_instance:
                del self._by_sid[sid]
            elif not session.lock.busy and not detached.machine.queue and capacity.freed_by(session.capacity):
                return session
        return None

    def soon_free(self, capacity: Capacity) -> bool:
        """Return whether `oldest` could return a session once running requests have ended."""
        return any(
            detached.has_instance and capacity.freed_by(detached.session.capacity) for detached in self._by_sid.values()
        )

    def lost(self, session: Session) -> None:
        """Called when the instance of a session was taken and it cannot be continued."""
        detached = self._by_sid.pop(session.sid, None)
        if detached is not None:
            detached.lost(detached.machine)
