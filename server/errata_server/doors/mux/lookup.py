"""Opens new multiplexed sessions, and finds existing ones in the journal (PROTOCOL D3, D7)."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from errata_protocol.errors import CODES, Conflict, EnvironmentFailed, ErrataError, SessionLost
from errata_protocol.mux import Find, ServerSession, Stored
from errata_protocol.mux.state import State

from ...journal.base import DeliveryRow, SessionRow
from ...sessions.session import Address, Session
from .shell import MuxShell, journal_sid

log = logging.getLogger("errata.mux")

SOUGHT_AT_ONCE = 256
"""Sessions that are looked for in the journal in one go: a thousand that resume would each wait for a thread."""


class _Sought(NamedTuple):
    """A session that is looked for, and what to say where there is none."""

    find: Find
    otherwise: Exception


class Finding:
    """Opens sessions and looks for them.

    Args:
        shell: The machine.
    """

    def __init__(self, shell: MuxShell) -> None:
        self._shell = shell
        self._sought: list[_Sought] = []
        self._reading: list[dict[str, int]] = []  # of each look into the journal: the last push since, by sid

    def find(self, effect: Find) -> None:
        """Open a new session, or look for one."""
        if not effect.make:
            self._seek(effect)
            return
        mine = effect.session
        address = Address(journal_sid(mine.sid), mine.key_hash, mine.group)
        opened = partial(self._opened, effect)
        self._shell.sessions.begin_open(address, mine.principal, opened, self._shell.loop)

    def pushed(self, sid: str, seq: int) -> None:
        """Take that a push was committed: who is looked for may have been read before it."""
        for since in self._reading:
            if sid in since:
                since[sid] = max(since[sid], seq)

    def _seek(self, find: Find, otherwise: Exception | None = None) -> None:
        """Look for a session in the journal, together with all others that are looked for now."""
        self._sought.append(_Sought(find, otherwise or SessionLost("no session with this sid and key: open another")))
        if len(self._sought) == 1:
            self._shell.loop.call_soon(lambda: self._shell.spawn(self._seek_all()))

    def _opened(self, find: Find, session: Session | None, error: Exception | None) -> None:
        """Take a session that was opened, or why it was not: the journal says if there is one of that id."""
        if session is not None:
            find.session.handle = session
            self._tell(find, Stored(recovery=session.row.recovery, group=find.session.group))
        elif isinstance(error, Conflict):
            self._seek(find)
        elif isinstance(error, ErrataError) and CODES[error.code].retryable:
            self._refuse(find, error)
        else:
            # The client would take it that nothing of what it sent had an effect, and an open of a process before this
            # one may be committed that was never answered.
            self._seek(find, error or EnvironmentFailed("the session could not be opened"))

    def _tell(self, find: Find, stored: Stored) -> None:
        """Give the machine a session; nobody may be there for it any more."""
        self._shell.do(self._shell.protocol.found(find, stored, self._shell.now()))
        if find.session.state is State.DETACHED:
            self._shell.keep_idle(find.session)

    async def _seek_all(self) -> None:
        while self._sought:
            sought, self._sought = self._sought[:SOUGHT_AT_ONCE], self._sought[SOUGHT_AT_ONCE:]
            finds = [one.find for one in sought]
            since = {find.session.sid: 0 for find in finds}
            self._reading.append(since)
            try:
                await self._shell.runtime.start()
                with self._shell.sessions.table.search({journal_sid(find.session.sid) for find in finds}) as outdated:
                    found = await self._shell.runtime.store.read(self._stored_all, finds)
            except Exception as error:
                for find in finds:
                    self._refuse(find, error)
                continue
            finally:
                self._reading = [other for other in self._reading if other is not since]
            for one, (row, last, next_id, seq) in zip(sought, found, strict=True):
                sid = one.find.session.sid
                if journal_sid(sid) in outdated:
                    self._sought.append(one)
                elif row is None:
                    self._refuse(one.find, one.otherwise)
                else:
                    self._found(one.find, row, last, next_id, max(seq, since[sid]))

    def _found(self, find: Find, row: SessionRow, last: DeliveryRow | None, next_id: int, seq: int) -> None:
        mine = find.session
        if row.status == "open":
            mine.handle = self._shell.sessions.dormant(row, last)
        stored = Stored(
            next_id=next_id,
            eid=last.eid if last is not None else None,
            t=last.t if last is not None else None,
            seq=seq,
            recovery=row.recovery,
            status=row.status,
            group=row.group,
        )
        self._tell(find, stored)

    def _stored_all(self, finds: Sequence[Find]) -> list[tuple[SessionRow | None, DeliveryRow | None, int, int]]:
        return [self._stored(find.session) for find in finds]

    def _stored(self, mine: ServerSession) -> tuple[SessionRow | None, DeliveryRow | None, int, int]:
        """Read all of a session that the client has the key of, and of any other as much as of none (PROTOCOL D7)."""
        journal, sid = self._shell.runtime.journal, journal_sid(mine.sid)
        row = journal.session(sid)
        known = (
            row is not None and row.principal == mine.principal and row.environment == self._shell.sessions.environment
        )
        kept = row.key_hash if row is not None and known and row.key_hash is not None else bytes(32)
        if not hmac.compare_digest(kept, mine.key_hash):
            return None, None, 1, 0
        return row, journal.last_delivery(sid), journal.last_id(sid) + 1, journal.last_seq(sid)

    def _refuse(self, find: Find, error: Exception) -> None:
        if not isinstance(error, ErrataError):
            log.error("session could not be opened", exc_info=error)
            error = EnvironmentFailed(str(error))
        self._shell.do(self._shell.protocol.refused(find, error, self._shell.now()))
