"""`SessionLifetime`: ends, expires and hibernates multiplexed sessions (PROTOCOL D12)."""

from __future__ import annotations

from errata_protocol.mux import Hibernate, ServerSession
from errata_protocol.mux.records import EndReason
from errata_protocol.mux.state import State

from ...sessions.session import Session
from ...sessions.sessions import Sessions
from .detached import DetachedSessions
from .driver import ProtocolDriver, journal_sid, wire_sid


class SessionLifetime:
    """Detaches, expires, hibernates and ends the sessions of one environment.

    Args:
        driver: The state machine.
        sessions: The environment's sessions.
        detached: Lists the sessions that have no socket.
    """

    def __init__(self, driver: ProtocolDriver, sessions: Sessions, detached: DetachedSessions) -> None:
        self._driver = driver
        self._sessions = sessions
        self._detached = detached

    def detach(self, machine: ServerSession) -> None:
        """Called when a session has no socket: another may take its instance, and its timeout, if any, begins."""
        self._detached.add(machine, machine.handle, self._lost)
        if self._sessions.lifetime.session_timeout_s is not None:
            self._driver.loop.call_later(
                self._sessions.lifetime.session_timeout_s, self._expire, machine, machine.detached_at
            )

    def end(self, sid: str, reason: EndReason) -> None:
        """End a session in the state machine, which informs its client; ``sid`` is as on the wire."""
        self._detached.discard(journal_sid(sid))
        self._driver.ended(sid, reason)

    def ended_elsewhere(self, sid: str) -> None:
        """Called when a session was closed by another door; ``sid`` is as journaled. Ignored if it is not in memory."""
        machine = self._driver.protocol.session(wire_sid(sid))
        if machine is not None:
            self.end(machine.sid, "closed" if machine.handle.lost is None else "lost")

    def end_and_close(self, machine: ServerSession, reason: EndReason) -> None:
        """End a session, close its instance and commit ``reason`` as its status."""
        if self._driver.protocol.session(machine.sid) is machine:
            self.end(machine.sid, reason)
        self._driver.spawn(self._sessions.lifetime.close(machine.handle, status=reason))

    def closed(self, session: Session) -> None:
        """Called when a session was closed by its own ``close``, whose reply ends it in the state machine."""
        self._detached.discard(session.sid)

    def hibernate(self, effect: Hibernate) -> None:
        """Close the environment of a detached session; its next request restores it."""
        self._driver.spawn(self._hibernate(effect))

    async def _hibernate(self, effect: Hibernate) -> None:
        session: Session | None = effect.session.handle
        self._detached.discard(journal_sid(effect.session.sid))
        if session is not None:
            await self._sessions.lifetime.sleep(session)
        self._driver.hibernated(effect)

    def _lost(self, machine: ServerSession) -> None:
        self.end(machine.sid, "lost")

    def _expire(self, machine: ServerSession, since: float) -> None:
        """End a session as expired, unless it was attached after ``since`` or has requests in its queue."""
        if machine.state is State.DETACHED and machine.detached_at == since and not machine.queue:
            self._driver.spawn(self._end_expired(machine))

    async def _end_expired(self, machine: ServerSession) -> None:
        await self._sessions.lifetime.close(machine.handle, status="expired")
        self.end(machine.sid, "expired")
