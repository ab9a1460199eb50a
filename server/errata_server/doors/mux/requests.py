"""`RequestRunner`: runs reset, step, tools/call, fork and close, and commits their replies (PROTOCOL D4-D6, D11)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from weakref import WeakKeyDictionary

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
    Overloaded,
    SessionClosed,
    SessionLost,
    SessionUnknown,
    UnknownEpisode,
)
from errata_protocol.exception_text import text_of
from errata_protocol.json_text import MAX_VALUES
from errata_protocol.labels import NO_LABELS
from errata_protocol.mux import EncodedReply, RecordError, RunRequest, ServerSession, injected_fork
from errata_protocol.shards import check_shard

from ...episodes.forks import Forks
from ...ids import name_of
from ...journal.base import DeliveryRow
from ...runtime.rows import Admitted, error_row, refused_row, replied_row
from ...sessions.session import Committed, Session
from ...sessions.sessions import Sessions
from ..injected_state import reset_to
from ..json_values import excess
from ..readers import Reader
from .driver import ProtocolDriver, SocketHandle, journal_sid
from .lifetime import SessionLifetime
from .translation import RequestDecoder, RpcRefused, object_of, replayed_reply, reply_of

log = logging.getLogger("errata.mux")


class RequestRunner:
    """Handles `RunRequest` and `RecordError`: runs requests and passes their replies to the state machine.

    Args:
        driver: The state machine.
        sessions: The environment's sessions.
        lifetime: Ends a session that turns out to be lost or closed.
        decoder: Decodes requests.
        forks: Makes forks.
    """

    def __init__(
        self,
        driver: ProtocolDriver,
        sessions: Sessions,
        lifetime: SessionLifetime,
        decoder: RequestDecoder,
        forks: Forks,
    ) -> None:
        self._driver = driver
        self._sessions = sessions
        self._store = sessions.runtime.store
        self._lifetime = lifetime
        self._decoder = decoder
        self._forks = forks
        self._left: WeakKeyDictionary[Session, Reader] = WeakKeyDictionary()

    def left(self, machine: ServerSession, reader: Reader) -> None:
        """Called when the socket of a session is lost, with who had opened it."""
        if machine.handle is not None:
            self._left[machine.handle] = reader

    def run(self, run: RunRequest) -> None:
        """Start a request. When its reply is committed, the state machine gets it."""
        if len(run.data) > MAX_VALUES:
            self._driver.spawn(self._run_large(run))
        else:
            self._begin(run)

    async def _run_large(self, run: RunRequest) -> None:
        """Start a request that may have come in parts, none of which had too many values."""
        try:
            if (error := await excess(run.data)) is not None:
                raise InvalidRequest(error.message)  # recorded, as everything that is wrong in the data of a request
            data = await asyncio.to_thread(object_of, run.data)
        except ErrataError as refused:
            await self._answer_failure(run, refused)
        else:
            self._begin(run, data)

    def _begin(self, run: RunRequest, data: dict[str, Any] | None = None) -> None:
        if run.kind == "step":
            session: Session = run.session.handle
            try:
                request = self._decoder.request(run, self._driver.loop.time(), data)
            except ErrataError as error:
                self._driver.spawn(self._answer_failure(run, error))
                return
            self._sessions.begin(session, request, self._settled, run, self._driver.loop)
            return
        self._driver.spawn(self._answer(run, data))

    def _settled(self, run: RunRequest, row: Committed | None, error: Exception | None) -> None:
        """Called with the outcome of a step."""
        if row is not None:
            self._driver.completed(run, reply_of(row))
        else:
            assert error is not None
            self._driver.spawn(self._answer_failure(run, error))

    async def _answer(self, run: RunRequest, data: dict[str, Any] | None) -> None:
        """Run a request; pass its committed reply, its committed error or its rejection to the state machine."""
        session: Session = run.session.handle
        try:
            reply = await self._executed(session, run, data)
        except Exception as error:
            await self._answer_failure(run, error)
        else:
            self._driver.completed(run, reply)

    async def _answer_failure(self, run: RunRequest, error: Exception) -> None:
        session: Session = run.session.handle
        if not isinstance(error, ErrataError):  # a defect of the server: the session goes on
            log.error("request failed", exc_info=error)
            # It is run again once, where what it did can be taken back; a request that always fails gets its error.
            again = session.recoverable and session.failed_once != (run.id, run.sha)
            session.failed_once = (run.id, run.sha)
            error = (Overloaded if again else EnvironmentFailed)(f"the server failed, see its log: {text_of(error)}")
        if not CODES[error.code].consumes_id:
            self._reject(run, error)
            return
        reply = await self._recorded_error(session, run, error)
        if reply is not None:
            self._driver.completed(run, reply)
        if session.lost is not None:  # end it now, not at its next request
            self._lifetime.end_and_close(run.session, "lost")

    async def _executed(self, session: Session, run: RunRequest, data: dict[str, Any] | None) -> EncodedReply:
        if run.kind == "fork":
            return await self._fork(session, run)
        if run.kind == "close":
            return await self._close(session, run)
        if run.kind == "reset" and not self._driver.protocol.config.production:
            data = object_of(run.data) if data is None else data
            injected = injected_fork(data)
            if injected is not None:
                return await self._reset_to(session, run, *injected)
        try:
            request = self._decoder.request(run, self._driver.now(), data)
        except RpcRefused as refused:
            row = self._row(session, run, to_json(refused.response))
            await self._store.commit(row)
            return reply_of(row)
        done = await self._sessions.run(session, request)
        kind = "mcp" if run.kind == "mcp" else "observation"
        return EncodedReply(kind, done.payload, done.eid, done.t, done.digest)

    def _reject(self, run: RunRequest, error: ErrataError) -> None:
        """Pass on an error that consumes no id; end the session where the error says that it is over."""
        if isinstance(error, SessionLost | SessionUnknown | SessionClosed):
            self._lifetime.end_and_close(run.session, "lost" if isinstance(error, SessionLost) else "closed")
        else:
            self._driver.rejected(run, error)

    async def _recorded_error(
        self, session: Session, run: RunRequest | RecordError, error: ErrataError
    ) -> EncodedReply | None:
        """Commit an error as the reply to a request; see `_committed`."""
        return await self._committed(run, error_row(session.as_run(self._admitted(session, run)), error))

    async def _committed(self, run: RunRequest | RecordError, row: DeliveryRow) -> EncodedReply | None:
        """Commit ``row`` to the journal and return its reply.

        Returns:
            None if the commit failed. The error is logged then, and a `RunRequest` rejected.
        """
        try:
            await self._store.commit(row)
        except ErrataError as refusal:
            log.error("session %s: a reply could not be journaled: %s", name_of(run.session.sid), refusal.message)
            if isinstance(run, RunRequest):
                self._reject(run, refusal if not CODES[refusal.code].consumes_id else JournalUnavailable(str(refusal)))
            return None
        return reply_of(row)

    def _admitted(self, session: Session, run: RunRequest | RecordError) -> Admitted:
        """Return the request of ``run`` as the journal stores it."""
        return Admitted(
            eid=session.eid or "",
            t=(session.t or 0) + 1,
            sid=session.sid,
            id=run.id,
            kind=run.kind,
            request=run.data,
            created=self._sessions.runtime.clock.time(),
            request_sha=run.sha,
        )

    def _row(self, session: Session, run: RunRequest, payload: bytes) -> DeliveryRow:
        """Return the row of a reply that is not a delivery."""
        return replied_row(self._admitted(session, run), payload)

    def record(self, record: RecordError) -> None:
        """Commit the error of a request that is not run."""
        self._driver.spawn(self._record_refusal(record))

    async def _record_refusal(self, record: RecordError) -> None:
        session: Session = record.session.handle
        data: dict[str, Any] = msgspec.json.decode(record.reply.data)
        row = refused_row(self._admitted(session, record), record.reply.data, data["code"])
        reply = await self._committed(record, row)
        if reply is not None:
            self._driver.completed(record, reply)

    async def _fork(self, session: Session, run: RunRequest) -> EncodedReply:
        """Make a fork, in one commit with its reply."""
        fork = run.fork
        assert fork is not None
        eid = fork.eid or session.eid
        if eid is None:
            raise NoReset("this session has delivered nothing yet: reset it first")
        check_shard(self._store.shard, fork.sid)  # of the child: SESSION_LOST would be of the session that asks
        fleet = self._sessions.runtime.fleet
        if fleet is not None and fleet.elsewhere.has(eid):
            raise UnknownEpisode(eid)  # a session's episodes are all its worker's
        self._store.check_shard(eid)
        parent = await self._store.owned_parent(eid, fork.t, session.row.principal)
        if parent.row.sid != session.sid:
            raise UnknownEpisode(eid)
        if fleet is not None:
            fleet.took(fork.sid)
        child = self._forks.child(
            parent,
            journal_sid(fork.sid),
            run.data,
            key_hash=fork.key_hash,
            group=session.row.group,
            labels=run.labels,
        )
        forked = {"sid": fork.sid, "eid": child.eid, "t": 0, "origin": {"eid": eid, "t": fork.t}}
        row = self._row(session, run, msgspec.json.encode(forked))
        async with session.lock:
            try:
                await self._store.commit(*child.records, row)
            except Conflict as error:
                if await self._store.session(journal_sid(fork.sid)) is None:
                    raise  # a defect of the server: a new random id exists already
                # INVALID_REQUEST because CONFLICT is never recorded: it means that another request has the id. The
                # text does not depend on who owns the sid, and so shows no more than an `open` would.
                raise InvalidRequest(
                    "no session can be made under the sid of this child, it is taken: pick another sid and key, and "
                    "fork again under the next id"
                ) from error
        return reply_of(row)

    async def _reset_to(self, session: Session, run: RunRequest, eid: str, t: int) -> EncodedReply:
        """Continue a session from a state(t) of an episode (PROTOCOL D11)."""
        connection = run.session.connection
        if connection is not None:
            socket: SocketHandle = connection.handle  # type: ignore[assignment]  # given to `Multiplexer.connect`
            reader = socket.reader
        else:
            reader = self._left[session]  # a request that was accepted runs although its socket is lost
        runtime, admitted = self._sessions.runtime, self._admitted(session, run)
        labels = run.labels or NO_LABELS
        return replayed_reply(await reset_to(runtime, self._forks, session, admitted, (eid, t), reader, labels=labels))

    async def _close(self, session: Session, run: RunRequest) -> EncodedReply:
        row = self._row(session, run, b"{}")
        await self._sessions.lifetime.close(session, with_records=(row,))
        self._lifetime.closed(session)
        return reply_of(row)
