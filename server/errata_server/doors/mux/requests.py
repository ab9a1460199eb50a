"""Runs requests that change a session (reset, step, fork, close) and commits their replies (PROTOCOL D4-D6, D11)."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgspec
from pydantic_core import to_json

from errata_protocol.errors import (
    CODES,
    Conflict,
    EnvironmentFailed,
    ErrataError,
    InvalidRequest,
    JournalUnavailable,
    NoReset,
    SessionClosed,
    SessionLost,
    SessionUnknown,
    UnknownEpisode,
)
from errata_protocol.mux import Record, Reply, Run, injected_fork

from ...episodes.forks import Forks
from ...ids import name_of
from ...journal.base import DeliveryRow
from ...runtime.ownership import owned_delivery
from ...runtime.rows import Admitted, error_row, refused_row, replied_row
from ...sessions.session import Reply as SessionReply
from ...sessions.session import Session
from ..injected_state import reset_to
from .shell import MuxShell, journal_sid
from .translation import Reading, RpcRefused, object_of, reply_of

log = logging.getLogger("errata.mux")


class Answers:
    """Runs requests and gives the machine their replies.

    Args:
        shell: The machine.
        reading: Reads requests.
        forks: Makes children.
    """

    def __init__(self, shell: MuxShell, reading: Reading, forks: Forks) -> None:
        self._shell = shell
        self._reading = reading
        self._forks = forks

    def run(self, run: Run) -> None:
        """Run a request, and answer it when its outcome is committed."""
        if run.kind == "step":
            session: Session = run.session.handle
            try:
                request = self._reading.request(run, self._remaining(run))
            except ErrataError as error:
                self._shell.spawn(self._answer_failure(run, error))
                return
            self._shell.sessions.begin(session, request, partial(self._settled, run), self._shell.loop)
            return
        self._shell.spawn(self._answer(run))

    def _remaining(self, run: Run) -> float | None:
        return None if run.deadline is None else run.deadline - self._shell.now()

    def _settled(self, run: Run, done: SessionReply | None, error: Exception | None) -> None:
        """Take the outcome of a step that was begun."""
        if done is not None:
            reply = Reply("observation", done.payload, done.eid, done.t, done.digest)
            self._shell.do(self._shell.protocol.completed(run, reply, self._shell.now()))
        else:
            assert error is not None
            self._shell.spawn(self._answer_failure(run, error))

    async def _answer(self, run: Run) -> None:
        """Run a request to its commit, or commit its error, or give its id back."""
        session: Session = run.session.handle
        try:
            reply = await self._executed(session, run)
        except Exception as error:
            await self._answer_failure(run, error)
        else:
            self._shell.do(self._shell.protocol.completed(run, reply, self._shell.now()))

    async def _answer_failure(self, run: Run, error: Exception) -> None:
        if not isinstance(error, ErrataError):  # a defect of ours must not cost the client its session
            log.error("request failed", exc_info=error)
            error = EnvironmentFailed(str(error))
        if not CODES[error.code].consumes_id:
            self._give_back(run, error)
            return
        session: Session = run.session.handle
        reply = await self._recorded_error(session, run, error)
        if reply is not None:
            self._shell.do(self._shell.protocol.completed(run, reply, self._shell.now()))
        if session.lost is not None:  # with this request: its client is told now, not at its next one
            self._shell.let_go(run.session, "lost")

    async def _executed(self, session: Session, run: Run) -> Reply:
        if run.kind == "fork":
            return await self._fork(session, run)
        if run.kind == "close":
            return await self._close(session, run)
        if run.kind == "reset" and not self._shell.protocol.config.production:
            injected = injected_fork(object_of(run.data))
            if injected is not None:
                return await self._reset_to(session, run, *injected)
        try:
            request = self._reading.request(run, self._remaining(run))
        except RpcRefused as refused:
            row = self._row(session, run, to_json(refused.response))
            await self._shell.runtime.journal.commit(row)
            return reply_of(row)
        done = await self._shell.sessions.run(session, request)
        kind = "mcp" if run.kind == "mcp" else "observation"
        return Reply(kind, done.payload, done.eid, done.t, done.digest)

    def _give_back(self, run: Run, error: ErrataError) -> None:
        """Take an error that consumes no id: nothing ran, or the session is over."""
        if isinstance(error, SessionLost | SessionUnknown | SessionClosed):
            self._shell.let_go(run.session, "lost" if isinstance(error, SessionLost) else "closed")
        else:
            self._shell.do(self._shell.protocol.rejected(run, error))

    async def _recorded_error(self, session: Session, run: Run | Record, error: ErrataError) -> Reply | None:
        """Commit an error as the reply to a request; None where that could not be."""
        row = error_row(self._admitted(session, run), error)
        return await self._committed(run, row)

    async def _committed(self, run: Run | Record, row: DeliveryRow) -> Reply | None:
        try:
            await self._shell.runtime.journal.commit(row)
        except ErrataError as refusal:
            log.error("session %s: a reply could not be journaled: %s", name_of(run.session.sid), refusal.message)
            if isinstance(run, Run):
                self._give_back(
                    run, refusal if not CODES[refusal.code].consumes_id else JournalUnavailable(str(refusal))
                )
            return None
        return reply_of(row)

    def _admitted(self, session: Session, run: Run | Record) -> Admitted:
        return Admitted(
            eid=session.eid or "",
            t=(session.t or 0) + 1,
            sid=session.sid,
            id=run.id,
            kind=run.kind,
            request=run.data,
            created=self._shell.runtime.clock.time(),
            request_sha=run.sha,
        )

    def _row(self, session: Session, run: Run, payload: bytes) -> DeliveryRow:
        """Return the row of a reply that is no delivery."""
        return replied_row(self._admitted(session, run), payload)

    def record(self, record: Record) -> None:
        """Commit the refusal of a request that does not run."""
        self._shell.spawn(self._record_refusal(record))

    async def _record_refusal(self, record: Record) -> None:
        session: Session = record.session.handle
        data: dict[str, Any] = msgspec.json.decode(record.reply.data)
        row = refused_row(self._admitted(session, record), record.reply.data, data["code"])
        reply = await self._committed(record, row)
        if reply is not None:
            self._shell.do(self._shell.protocol.completed(record, reply, self._shell.now()))

    async def _fork(self, session: Session, run: Run) -> Reply:
        """Make a child in one commit with the reply that says so."""
        fork = run.fork
        assert fork is not None
        eid = fork.eid or session.eid
        if eid is None:
            raise NoReset("this session has delivered nothing yet: reset it first")
        parent = await owned_delivery(self._shell.runtime.store, eid, fork.t, session.row.principal)
        if parent.sid != session.sid:
            raise UnknownEpisode(eid)
        child = await self._forks.child(
            parent, journal_sid(fork.sid), run.data, key_hash=fork.key_hash, group=session.row.group
        )
        told = {"sid": fork.sid, "eid": child.eid, "t": 0, "origin": {"eid": eid, "t": fork.t}}
        row = self._row(session, run, msgspec.json.encode(told))
        async with session.lock:
            try:
                await self._shell.runtime.journal.commit(*child.records, row)
            except Conflict as error:
                if await self._shell.runtime.store.session(journal_sid(fork.sid)) is None:
                    raise  # a defect of ours: what is drawn here was drawn before
                # A recorded reply, which CONFLICT never is: that says that the id is another request's. One text,
                # whosever the sid is: an `open` tells as much.
                raise InvalidRequest(
                    "no session can be made under the sid of this child, it is taken: pick another sid and key, and "
                    "fork again under the next id"
                ) from error
        return reply_of(row)

    async def _reset_to(self, session: Session, run: Run, eid: str, t: int) -> Reply:
        """Let a session go on from a state(t), as a fork in place (PROTOCOL D11)."""
        admitted = self._admitted(session, run)
        return reply_of(await reset_to(self._shell.runtime, self._forks, session, admitted, (eid, t)))

    async def _close(self, session: Session, run: Run) -> Reply:
        row = self._row(session, run, b"{}")
        await self._shell.sessions.lifetime.close(session, with_records=(row,))
        self._shell.idle.pop(run.session.sid, None)
        return reply_of(row)
