"""Requests of attached sessions on the server: admission, order, replies, repeats, and pushes (PROTOCOL D4-D10)."""

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
from .effects import ReadPushes, ReadReplies, RecordError, RunRequest
from .envelope import EMPTY, Envelope
from .messages import FORK_DATA, read_data
from .records import EncodedReply, ForkSpec, RecordedReply, RequestKind
from .server_output import Output
from .server_session import (
    FinalReplies,
    Pending,
    RepeatedRequest,
    ServerConfig,
    ServerConnection,
    ServerSession,
    same_request,
)
from .state import State


def hash_key(sid: str, key: str) -> bytes:
    """Return the hash of a session's key that a server keeps instead of the key: 32 bytes."""
    return hashlib.sha256(f"errata-mux\0{sid}\0{key}".encode()).digest()


class Requests:
    """Admits requests, starts them in order, and sends replies and pushes.

    Args:
        config: Limits and mode.
        out: Takes effects and messages.

    Attributes:
        refuse_with: The error that every new request gets now, None to admit them; its code consumes no id.
    """

    def __init__(self, config: ServerConfig, out: Output) -> None:
        self.config = config
        self.out = out
        self.refuse_with: ErrataError | None = None
        self.going_away_s: float | None = None
        """``retry_after`` of the refusals of a server that is going away; None while it is not."""

    def refusal(self, used: int, connection: ServerConnection, size: int = 0) -> ErrataError | None:
        """Return the error for a request that cannot be admitted now, None if it can (PROTOCOL D5, D9).

        Args:
            used: Number of requests of the session in flight.
            connection: The socket.
            size: Size of the request, in bytes.
        """
        limits = self.config.limits
        if used < limits.in_flight_session and connection.in_flight < limits.in_flight_socket:
            if self.going_away_s is not None:
                return Overloaded("this server is going away: connect again", retry_after=self.going_away_s)
            if connection.held_bytes and connection.held_bytes + size > self.config.held_bytes:
                return Overloaded(
                    f"requests of {connection.held_bytes} bytes are in flight on this socket, at most "
                    f"{self.config.held_bytes} may be: send it again later",
                    retry_after=self.config.retry_after_s,
                )
            return self.refuse_with
        return Overloaded(
            f"{used} requests of the session and {connection.in_flight} of the socket are in flight, at most "
            f"{limits.in_flight_session} and {limits.in_flight_socket} may be: send it again later",
            retry_after=self.config.retry_after_s,
        )

    def admit(
        self, session: ServerSession, connection: ServerConnection, envelope: Envelope, data: bytes, now: float
    ) -> None:
        """Queue a mutating request; start it at once if the session's queue was empty.

        Only a request with the session's next id is queued. A later id is answered with OUT_OF_ORDER. An earlier id
        is a repeat: it is answered with the reply to that id, or with CONFLICT if the request differs. A request
        over a limit is answered with the error of `refusal`, and its id stays free.

        The caller has checked the envelope's address and that the session is attached to ``connection``.

        Args:
            session: The session that the envelope names.
            connection: Where the request arrived.
            envelope: Its header, with an id and a mutating type.
            data: Its encoded ``data``.
            now: Current time, in seconds of a monotonic clock.
        """
        id: int = envelope.id  # type: ignore[assignment] # checked by the caller
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
                self._handle_repeat(session, RepeatedRequest(connection, id, kind, data, sha))
            return
        refusal = self.refusal(len(session.queue), connection, len(data))
        if refusal is not None:
            self.out.error(connection, refusal, session.sid, id=id)
            return
        condition = None if envelope.condition is UNSET else envelope.condition
        deadline = None if envelope.deadline_ms is UNSET else now + envelope.deadline_ms / 1000
        pending = Pending(id, kind, data, sha, connection, condition, deadline)
        if envelope.labels is not UNSET:
            pending.labels = envelope.labels
        if kind == "fork":
            self._read_fork(pending)
        session.next_id = id + 1
        connection.in_flight += 1
        connection.held_bytes += len(pending.data)
        session.queue.append(pending)
        if len(session.queue) == 1:
            self._start(session, pending, now)

    def _read_fork(self, pending: Pending) -> None:
        """Decode a fork's data, and replace the child's key by its hash in what will be journaled.

        Invalid data, and any fork in production mode, become the recorded error of the request.
        """
        data, pending.data = pending.data, EMPTY
        try:
            asked = read_data(FORK_DATA, data)
        except InvalidEnvelope as error:
            pending.refusal = InvalidRequest(error.message)
            return
        if self.config.production:
            pending.refusal = NotSupported("no fork in production mode")
            return
        child = asked.child
        pending.fork = ForkSpec(asked.t, asked.eid, child.sid, hash_key(child.sid, child.key))
        kept = {"sid": child.sid, "key_hash": pending.fork.key_hash.hex()}
        pending.data = msgspec.json.encode({"t": asked.t, "eid": asked.eid, "child": kept})

    def _start(self, session: ServerSession, pending: Pending, now: float) -> None:
        """Run the first request of the queue; or record an error if it was cancelled, is late, or its ``if`` fails."""
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
                RunRequest(
                    session,
                    pending.id,
                    pending.kind,
                    pending.data,
                    pending.sha,
                    pending.deadline,
                    pending.fork,
                    pending.labels,
                )
            )
            return
        reply = EncodedReply("error", msgspec.json.encode(refusal.to_wire()))
        self.out.effects.append(RecordError(session, pending.id, pending.kind, pending.data, pending.sha, reply))

    def completed(self, effect: RunRequest | RecordError, reply: EncodedReply, now: float) -> None:
        """Send the committed reply of a session's first request, and start the next one unless this was a close.

        Ignored if the session has ended meanwhile.

        Raises:
            LocalProtocolError: The request is not the one that is running.
        """
        session = effect.session
        if not session.queue or session.queue[0].id != effect.id:
            if session.state is not State.ABSENT:
                raise LocalProtocolError(f"request {effect.id} is not the one that runs")
            return
        pending = session.queue.pop(0)
        pending.uncount()
        id = session.last_done = effect.id
        if reply.t is not None:
            session.eid, session.t = reply.eid, reply.t
        session.keep(RecordedReply(id, effect.kind, effect.sha, reply), self.config)
        session.last_reply_at = now
        connection = session.connection
        if connection is not None and session.reading_replies is None:
            if session.last_sent == id - 1 and connection.accepts_input:
                self.out.reply(connection, session, id, reply, effect.sha)
                session.last_sent = id
            else:  # `drained` sends it, from the journal if need be
                connection.blocked[session.sid] = session
        if session.queue and reply.type != "closed":
            self._start(session, session.queue[0], now)

    def rejected(self, effect: RunRequest, error: ErrataError) -> None:
        """Answer a request that had no effect with an error, and all requests behind it with OUT_OF_ORDER.

        The id of the request becomes the session's next one again. Ignored if the session has ended meanwhile.

        Raises:
            LocalProtocolError: The error's code consumes the id: it has to be committed and `completed`.
        """
        session = effect.session
        if CODES[error.code].consumes_id:
            raise LocalProtocolError(f"{error.code} consumes id {effect.id}: commit it as the reply")
        if session.state is State.ABSENT:
            return
        error.details.setdefault("next_id", effect.id)
        # CAPACITY_REACHED without `retry_after` means that waiting does not help.
        if CODES[error.code].retryable and error.code != "CAPACITY_REACHED":
            error.details.setdefault("retry_after", self.config.retry_after_s)
        session.next_id = effect.id
        for pending in session.queue:
            pending.uncount()
            if session.connection is not None:
                behind = OutOfOrder(f"request {effect.id} was refused: send it first", next_id=effect.id)
                self.out.error(
                    session.connection, error if pending.id == effect.id else behind, session.sid, id=pending.id
                )
        session.queue.clear()

    def _handle_repeat(self, session: ServerSession, repeated: RepeatedRequest) -> None:
        """Answer a request whose id was used before (PROTOCOL D4).

        The same request gets the reply of that id again; if that reply has not been sent yet, it is sent once, in its
        order. Another request gets CONFLICT.
        """
        for pending in session.queue:
            if pending.id == repeated.id:
                other = None if pending.kind == "fork" else pending.data
                if not same_request(repeated.kind, repeated.sha, repeated.data, pending.kind, pending.sha, other):
                    self._conflict(session, repeated)
                return  # its reply is sent when it is committed
        kept = session.kept.get(repeated.id)
        if kept is not None and same_request(repeated.kind, repeated.sha, repeated.data, kept.kind, kept.sha, None):
            if repeated.id <= session.last_sent:
                self.out.recorded(repeated.connection, session, kept)
            return
        refusal = self.refusal(0, repeated.connection)
        if refusal is not None:
            self.out.error(repeated.connection, refusal, session.sid, id=repeated.id)
            return
        repeated.connection.in_flight += 1
        self.out.effects.append(ReadReplies(session, repeated.id, repeated.id, repeated))

    def _conflict(self, session: ServerSession, repeated: RepeatedRequest) -> None:
        conflict = Conflict(
            f"id {repeated.id} was used for another request: send that one again, or this one as id {session.next_id}",
            next_id=session.next_id,
        )
        self.out.error(repeated.connection, conflict, session.sid, id=repeated.id)

    def replies_read(self, effect: ReadReplies, replies: Sequence[RecordedReply]) -> None:
        """Send replies that the shell read from the journal, as the purpose of the effect says.

        Dropped if the session is attached elsewhere by now, or was attached anew.
        """
        session, purpose = effect.session, effect.purpose
        if isinstance(purpose, FinalReplies):
            for recorded in replies:
                self.out.recorded(purpose.connection, session, recorded)
            if not purpose.connection.lost:
                self.out.send_final_replies(session, effect.last + 1, purpose)
        elif isinstance(purpose, RepeatedRequest):
            purpose.connection.in_flight -= 1
            if session.connection is purpose.connection:
                (found,) = replies
                other = None if found.kind == "fork" else found.request
                gone = found.reply is None  # the request is no longer kept either: there is nothing to compare
                if not gone and not same_request(purpose.kind, purpose.sha, purpose.data, found.kind, found.sha, other):
                    self._conflict(session, purpose)
                elif purpose.id <= session.last_sent:
                    self.out.recorded(purpose.connection, session, found)
        elif session.reading_replies is effect and session.connection is not None:
            session.reading_replies = None
            for recorded in replies:
                self.out.recorded(session.connection, session, recorded)
            session.last_sent = effect.last
            self.out.flush(session)

    def drained(self, connection: ServerConnection) -> None:
        """Send replies that waited for room on ``connection``."""
        blocked, connection.blocked = connection.blocked, {}
        for session in blocked.values():
            if session.connection is connection and session.reading_replies is None:
                self.out.flush(session)
        ended, connection.ended_sessions = connection.ended_sessions, []
        for session, first, final in ended:
            self.out.send_final_replies(session, first, final)

    def pushed(self, session: ServerSession, seq: int, data: bytes) -> None:
        """Send a committed push after those before it; a ``seq`` that was seen before is ignored."""
        if seq <= session.seq:
            return
        session.seq = seq
        if session.connection is not None and session.reading_pushes is None and session.last_seq_sent == seq - 1:
            self.out.push(session.connection, session, seq, data)
            session.last_seq_sent = seq
        else:
            self.out.flush_pushes(session)

    def pushes_read(self, effect: ReadPushes, pushes: Sequence[tuple[int, bytes]]) -> None:
        """Send pushes that the shell read from the journal; dropped if the session was attached anew meanwhile."""
        session = effect.session
        if session.reading_pushes is effect and session.connection is not None:
            session.reading_pushes = None
            for seq, data in pushes:
                self.out.push(session.connection, session, seq, data)
            session.last_seq_sent = effect.last
            self.out.flush_pushes(session)
