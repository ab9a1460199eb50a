"""Requests of attached sessions on the server: admission, turns, replies, repeats, and pushes (PROTOCOL D4-D10)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from ..errors import (
    CODES,
    Cancelled,
    Conflict,
    ErrataError,
    InvalidEnvelope,
    InvalidRequest,
    LocalProtocolError,
    NotSupported,
    OutOfOrder,
    Overloaded,
    PreconditionFailed,
    StepTimeout,
)
from .effects import Recall, RecallPushes, Record, Run
from .envelope import EMPTY, Envelope
from .messages import FORK_DATA, read_data
from .records import ForkRequest, Recorded, Reply, RequestKind
from .server_output import Out
from .server_session import Asked, Pending, ServerConfig, ServerConnection, ServerSession, Told, same_request
from .state import State


def hash_key(sid: str, key: str) -> bytes:
    """Return what a server keeps of a session's key: 32 bytes."""
    return hashlib.sha256(f"errata-mux\0{sid}\0{key}".encode()).digest()


class Requests:
    """What happens to the requests of sessions.

    Args:
        config: Limits and mode.
        out: Where effects and messages go.

    Attributes:
        refusing: Why nothing is admitted now; a code that consumes no id.
    """

    def __init__(self, config: ServerConfig, out: Out) -> None:
        self.config = config
        self.out = out
        self.refusing: ErrataError | None = None
        self.leaving: float | None = None
        """Seconds after which clients shall connect elsewhere or again, once this server is going away."""

    def refusal(self, used: int, connection: ServerConnection, size: int = 0) -> ErrataError | None:
        """Return why nothing more is admitted now (PROTOCOL D5, D9), None if it is.

        Args:
            used: Requests of the session in flight.
            connection: The socket.
            size: Bytes of what asks to be admitted.
        """
        limits = self.config.limits
        if used < limits.in_flight_session and connection.in_flight < limits.in_flight_socket:
            if self.leaving is not None:
                return Overloaded("this server is going away: connect again", retry_after=self.leaving)
            if connection.held_bytes and connection.held_bytes + size > self.config.held_bytes:
                return Overloaded(
                    f"requests of {connection.held_bytes} bytes are in flight on this socket, at most "
                    f"{self.config.held_bytes} may be: send it again later",
                    retry_after=self.config.retry_after_s,
                )
            return self.refusing
        return Overloaded(
            f"{used} requests of the session and {connection.in_flight} of the socket are in flight, at most "
            f"{limits.in_flight_session} and {limits.in_flight_socket} may be: send it again later",
            retry_after=self.config.retry_after_s,
        )

    def admit(
        self, session: ServerSession, connection: ServerConnection, envelope: Envelope, data: bytes, now: float
    ) -> None:
        """Admit a mutating request, or say why not; its address and attachment are checked."""
        id: int = envelope.id  # type: ignore[assignment] # only what has one comes here
        kind: RequestKind = envelope.type  # type: ignore[assignment]
        sha = hashlib.sha256(data).digest()
        if id != session.next_id:
            if id > session.next_id:
                gap = OutOfOrder(
                    f"the session is at id {session.next_id}, got {id}: send {session.next_id} first",
                    next_id=session.next_id,
                )
                self.out.error(connection, gap, session.sid, id=id)
            else:
                self._repeat(session, Asked(connection, id, kind, data, sha))
            return
        refusal = self.refusal(len(session.queue), connection, len(data))
        if refusal is not None:
            self.out.error(connection, refusal, session.sid, id=id)
            return
        condition = None if envelope.condition is UNSET else envelope.condition
        deadline = None if envelope.deadline_ms is UNSET else now + envelope.deadline_ms / 1000
        pending = Pending(id, kind, data, sha, connection, condition, deadline)
        if kind == "fork":
            self._read_fork(pending)
        session.next_id = id + 1
        connection.in_flight += 1
        connection.held_bytes += len(pending.data)
        session.queue.append(pending)
        if len(session.queue) == 1:
            self._start(session, pending, now)

    def _read_fork(self, pending: Pending) -> None:
        """Read what a fork asks for, and take the child's key out of what will be journaled."""
        data, pending.data = pending.data, EMPTY
        try:
            said = read_data(FORK_DATA, data)
        except InvalidEnvelope as error:
            pending.refusal = InvalidRequest(error.message)
            return
        if self.config.production:
            pending.refusal = NotSupported("no fork in production mode")
            return
        child = said.child
        pending.fork = ForkRequest(said.t, said.eid, child.sid, hash_key(child.sid, child.key))
        kept = {"sid": child.sid, "key_hash": pending.fork.key_hash.hex()}
        pending.data = msgspec.json.encode({"t": said.t, "eid": said.eid, "child": kept})

    def _start(self, session: ServerSession, pending: Pending, now: float) -> None:
        refusal = pending.refusal
        if pending.cancelled:
            refusal = Cancelled(f"request {pending.id} was cancelled before it started")
        elif pending.deadline is not None and now >= pending.deadline:
            refusal = StepTimeout(f"request {pending.id} reached its deadline_ms before its turn came")
        elif (wanted := pending.condition) is not None and (
            wanted.t != session.t or (wanted.eid is not UNSET and wanted.eid != session.eid)
        ):
            refusal = PreconditionFailed(
                f"the session stands at t={session.t} of episode {session.eid}, not where `if` says: read its state",
                eid=session.eid,
                t=session.t,
            )
        if refusal is None:
            self.out.effects.append(
                Run(session, pending.id, pending.kind, pending.data, pending.sha, pending.deadline, pending.fork)
            )
            return
        reply = Reply("error", msgspec.json.encode(refusal.to_wire()))
        self.out.effects.append(Record(session, pending.id, pending.kind, pending.data, pending.sha, reply))

    def completed(self, effect: Run | Record, reply: Reply, now: float) -> None:
        """Let the reply leave and the next request start, unless the session is closed now."""
        session = effect.session
        if not session.queue or session.queue[0].id != effect.id:
            if session.state is not State.ABSENT:
                raise LocalProtocolError(f"request {effect.id} is not the one that runs")
            return  # the session ended meanwhile
        pending = session.queue.pop(0)
        pending.release()
        id = session.done = effect.id
        if reply.t is not None:
            session.eid, session.t = reply.eid, reply.t
        session.keep(Recorded(id, effect.kind, effect.sha, reply), self.config)
        session.last_reply_at = now
        connection = session.connection
        if connection is not None and session.recall is None:
            if session.sent == id - 1 and connection.accepts_input:
                self.out.reply(connection, session, id, reply, effect.sha)
                session.sent = id
            else:  # the journal has it until the socket has room
                connection.behind[session.sid] = session
        if session.queue and reply.type != "closed":
            self._start(session, session.queue[0], now)

    def rejected(self, effect: Run, error: ErrataError) -> None:
        """Give the id of a request back that had no effect, and refuse what is queued behind it.

        Raises:
            LocalProtocolError: The error's code consumes the id: it has to be committed and `completed`.
        """
        session = effect.session
        if CODES[error.code].consumes_id:
            raise LocalProtocolError(f"{error.code} consumes id {effect.id}: commit it as the reply")
        if session.state is State.ABSENT:
            return
        error.details.setdefault("next_id", effect.id)
        if CODES[error.code].retryable and error.code != "CAPACITY_REACHED":  # without one it does not help to wait
            error.details.setdefault("retry_after", self.config.retry_after_s)
        session.next_id = effect.id
        for pending in session.queue:
            pending.release()
            if session.connection is not None:
                behind = OutOfOrder(f"request {effect.id} was refused: send it first", next_id=effect.id)
                told = error if pending.id == effect.id else behind
                self.out.error(session.connection, told, session.sid, id=pending.id)
        session.queue.clear()

    def _repeat(self, session: ServerSession, asked: Asked) -> None:
        """Answer a request whose id was used before (PROTOCOL D4)."""
        for pending in session.queue:
            if pending.id == asked.id:
                other = None if pending.kind == "fork" else pending.data
                if not same_request(asked.kind, asked.sha, asked.data, pending.kind, pending.sha, other):
                    self._conflict(session, asked)
                return  # its reply will come
        kept = session.kept.get(asked.id)
        if kept is not None and same_request(asked.kind, asked.sha, asked.data, kept.kind, kept.sha, None):
            if asked.id <= session.sent:
                self.out.recorded(asked.connection, session, kept)
            return
        refusal = self.refusal(0, asked.connection)
        if refusal is not None:
            self.out.error(asked.connection, refusal, session.sid, id=asked.id)
            return
        asked.connection.in_flight += 1
        self.out.effects.append(Recall(session, asked.id, asked.id, asked))

    def _conflict(self, session: ServerSession, asked: Asked) -> None:
        told = Conflict(
            f"id {asked.id} was used for another request: send that one again, or this one as id {session.next_id}",
            next_id=session.next_id,
        )
        self.out.error(asked.connection, told, session.sid, id=asked.id)

    def recalled(self, effect: Recall, replies: Sequence[Recorded]) -> None:
        """Let recalled replies leave, to whom they were recalled for."""
        session, token = effect.session, effect.token
        if isinstance(token, Told):
            for recorded in replies:
                self.out.recorded(token.connection, session, recorded)
            if not token.connection.lost:
                self.out.part(session, effect.last + 1, token)
        elif isinstance(token, Asked):
            token.connection.in_flight -= 1
            if session.connection is token.connection:
                (found,) = replies
                other = None if found.kind == "fork" else found.request
                gone = found.reply is None  # with what it answered: there is nothing to compare
                if not gone and not same_request(token.kind, token.sha, token.data, found.kind, found.sha, other):
                    self._conflict(session, token)
                elif token.id <= session.sent:
                    self.out.recorded(token.connection, session, found)
        elif session.recall is effect and session.connection is not None:
            session.recall = None
            for recorded in replies:
                self.out.recorded(session.connection, session, recorded)
            session.sent = effect.last
            self.out.flush(session)

    def drained(self, connection: ServerConnection) -> None:
        """Let replies leave that waited for room on their socket."""
        behind, connection.behind = connection.behind, {}
        for session in behind.values():
            if session.connection is connection and session.recall is None:
                self.out.flush(session)
        parting, connection.parting = connection.parting, []
        for over, first, told in parting:
            self.out.part(over, first, told)

    def pushed(self, session: ServerSession, seq: int, data: bytes) -> None:
        """Let a late reward leave, behind those before it."""
        if seq <= session.seq:
            return
        session.seq = seq
        if session.connection is not None and session.recall_pushes is None and session.seq_sent == seq - 1:
            self.out.push(session.connection, session, seq, data)
            session.seq_sent = seq
        else:
            self.out.flush_pushes(session)

    def pushes_recalled(self, effect: RecallPushes, pushes: Sequence[tuple[int, bytes]]) -> None:
        """Let recalled pushes leave."""
        session = effect.session
        if session.recall_pushes is effect and session.connection is not None:
            session.recall_pushes = None
            for seq, data in pushes:
                self.out.push(session.connection, session, seq, data)
            session.seq_sent = effect.last
            self.out.flush_pushes(session)
