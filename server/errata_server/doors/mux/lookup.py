"""`SessionLookup`: opens new multiplexed sessions, and finds existing ones in the journal (PROTOCOL D3, D7)."""

from __future__ import annotations

import logging
from typing import NamedTuple

from errata_protocol.errors import CODES, Conflict, EnvironmentFailed, ErrataError, JournalUnavailable, SessionLost
from errata_protocol.exception_text import text_of
from errata_protocol.mux import FindSession, ServerSession, Stored
from errata_protocol.mux.state import State

from ...runtime.store import SessionKey, StoredSession
from ...sessions.session import Address, Session
from ...sessions.sessions import Sessions
from .driver import ProtocolDriver, journal_sid
from .lifetime import SessionLifetime

log = logging.getLogger("errata.mux")

BATCH = 256
"""Most sessions that one read of the journal looks up. One read each would make a thousand that resume wait in turn."""


class _Pending(NamedTuple):
    """A session that waits to be looked up.

    Args:
        find: The effect to answer.
        missing: The error for its client where the journal has no such session.
    """

    find: FindSession
    missing: Exception


class SessionLookup:
    """Handles `FindSession`: opens a session or looks it up, and passes it to the state machine.

    Args:
        driver: The state machine.
        sessions: The environment's sessions.
        lifetime: Detaches sessions whose socket was closed meanwhile.
    """

    def __init__(self, driver: ProtocolDriver, sessions: Sessions, lifetime: SessionLifetime) -> None:
        self._driver = driver
        self._sessions = sessions
        self._lifetime = lifetime
        self._pending: list[_Pending] = []
        self._running: list[dict[str, int]] = []  # per running read of the journal: last push since its start, by sid

    def find(self, effect: FindSession) -> None:
        """Open a new session, or look one up."""
        if not effect.make:
            self._look_up(effect)
            return
        machine = effect.session
        if (fleet := self._sessions.runtime.fleet) is not None:
            fleet.took(machine.sid)
        address = Address(journal_sid(machine.sid), machine.key_hash, machine.group)
        self._sessions.begin_open(
            address, machine.principal, self._opened, effect, self._driver.loop, labels=machine.labels
        )

    def pushed(self, sid: str, seq: int) -> None:
        """Called when a push is committed; a lookup that is running may have read the journal before it."""
        for last_push in self._running:
            if sid in last_push:
                last_push[sid] = max(last_push[sid], seq)

    def _look_up(self, find: FindSession, missing: Exception | None = None) -> None:
        """Look a session up, in one read of the journal with all others that wait."""
        self._pending.append(_Pending(find, missing or SessionLost("no session with this sid and key: open another")))
        if len(self._pending) == 1:
            self._driver.loop.call_soon(lambda: self._driver.spawn(self._look_up_pending()))

    def _opened(self, find: FindSession, session: Session | None, error: Exception | None) -> None:
        """Called when a session was opened or could not be; in doubt, the journal shows whether it exists."""
        if session is not None:
            find.session.handle = session
            self._found(find, Stored(recovery=session.row.recovery, group=find.session.group))
        elif isinstance(error, Conflict):
            self._look_up(find)
        elif isinstance(error, ErrataError) and CODES[error.code].retryable:
            self._refuse(find, error)
        else:
            # An error says to the client that the session does not exist. But an earlier process may have committed
            # its `open` and stopped before it sent the reply.
            self._look_up(find, error or EnvironmentFailed("the session could not be opened"))

    async def _look_up_pending(self) -> None:
        runtime = self._sessions.runtime
        while self._pending:
            batch, self._pending = self._pending[:BATCH], self._pending[BATCH:]
            machines = [pending.find.session for pending in batch]
            last_push = {machine.sid: 0 for machine in machines}
            self._running.append(last_push)
            try:
                await runtime.start()
                with self._sessions.table.search({journal_sid(machine.sid) for machine in machines}) as outdated:
                    found = await runtime.store.keyed_sessions([self._key(machine) for machine in machines])
            except Exception as error:
                refusal = error if isinstance(error, ErrataError) else _unread(error)
                for pending in batch:
                    self._refuse(pending.find, refusal)
                continue
            finally:
                self._running = [other for other in self._running if other is not last_push]
            for pending, stored in zip(batch, found, strict=True):
                sid = pending.find.session.sid
                if journal_sid(sid) in outdated:
                    self._pending.append(pending)
                elif stored is None:
                    self._refuse(pending.find, pending.missing)
                else:
                    self._found_in_journal(pending.find, stored, last_push[sid])

    def _key(self, machine: ServerSession) -> SessionKey:
        return SessionKey(journal_sid(machine.sid), machine.key_hash, machine.principal, self._sessions.environment)

    def _found_in_journal(self, find: FindSession, found: StoredSession, last_push: int) -> None:
        row, last = found.row, found.last
        if row.status == "open":
            find.session.handle = self._sessions.dormant(row, last)
        stored = Stored(
            next_id=found.last_id + 1,
            eid=last.eid if last is not None else None,
            t=last.t if last is not None else None,
            seq=max(found.last_seq, last_push),
            recovery=row.recovery,
            status=row.status,
            group=row.group,
        )
        self._found(find, stored)

    def _found(self, find: FindSession, stored: Stored) -> None:
        """Give the state machine the session that it asked for.

        If that leaves the session without a socket, because its socket was closed meanwhile, another session may take
        its instance, and its timeout begins.
        """
        self._driver.found(find, stored)
        if find.session.state is State.DETACHED:
            self._lifetime.detach(find.session)

    def _refuse(self, find: FindSession, error: Exception) -> None:
        if not isinstance(error, ErrataError):
            log.error("session could not be opened", exc_info=error)
            error = EnvironmentFailed(text_of(error))
        self._driver.find_failed(find, error)


def _unread(error: Exception) -> JournalUnavailable:
    """Log a failed read, and return the error for clients: their sessions may exist, so they have to ask again."""
    log.error("sessions could not be looked up", exc_info=error)
    return JournalUnavailable("the session could not be looked up: try again", retry_after=1.0)
