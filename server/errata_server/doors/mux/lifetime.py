"""`SessionLifetime`: ends, expires and hibernates multiplexed sessions (PROTOCOL D12)."""

from __future__ import annotations

import logging

from errata_protocol.errors import ErrataError
from errata_protocol.mux import Hibernate, ServerSession
from errata_protocol.mux.records import EndReason
from errata_protocol.mux.state import State

from ...ids import name_of
from ...sessions.session import Session
from ...sessions.sessions import Sessions
from .detached import DetachedSessions
from .driver import ProtocolDriver, journal_sid, wire_sid

log = logging.getLogger("errata.mux")

EXPIRE_AGAIN_S = 1.0
"""Time after which a session whose timeout has passed is checked again if it is busy or could not be ended, seconds."""


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
        self._expiring: dict[str, object] = {}
        """For each session that has a timeout, by sid: an object that stands for the last time it was detached.

        Hibernated sessions have one, too; so have sessions that were attached again, until the time is over.
        """

    def detach(self, machine: ServerSession) -> None:
        """Called when a session has no socket: another may take its instance, and its timeout, if any, begins."""
        self._detached.add(machine, machine.handle, self._lost)
        timeout_s = self._sessions.lifetime.session_timeout_s
        if timeout_s is not None:
            since = self._expiring[machine.sid] = object()
            self._driver.loop.call_later(timeout_s, self._expire, machine.sid, since)

    def end(self, sid: str, reason: EndReason) -> None:
        """End a session in the state machine, which informs its client; ``sid`` is as on the wire."""
        self._forget(sid)
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
        self._forget(wire_sid(session.sid))

    def _forget(self, sid: str) -> None:
        self._detached.discard(journal_sid(sid))
        self._expiring.pop(sid, None)

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

    def _expire(self, sid: str, since: object) -> None:
        """End a session as expired if it has had no socket since ``since``; admitted requests are completed first."""
        if self._expiring.get(sid) is not since:
            return
        machine = self._driver.protocol.session(sid)
        state = machine.state if machine is not None else State.ABSENT
        if state is State.HIBERNATING or (state is State.DETACHED and machine is not None and machine.queue):
            self._driver.loop.call_later(EXPIRE_AGAIN_S, self._expire, sid, since)
            return
        if state is State.ATTACHED:
            del self._expiring[sid]
        else:
            self._driver.spawn(self._end_expired(sid, machine, since))

    async def _end_expired(self, sid: str, machine: ServerSession | None, since: object) -> None:
        try:
            if machine is not None:
                await self._sessions.lifetime.close(machine.handle, status="expired")
            else:  # hibernated: if a socket had attached it since then, it would be in memory
                await self._sessions.end(journal_sid(sid), status="expired")
        except ErrataError as error:
            log.warning("session %s could not be ended, it is tried again: %s", name_of(sid), error)
            self._driver.loop.call_later(EXPIRE_AGAIN_S, self._expire, sid, since)
        else:
            self.end(sid, "expired")
