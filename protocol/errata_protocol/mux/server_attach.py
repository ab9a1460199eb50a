"""Attaches sessions to sockets on the server, detaches, hibernates and ends them (PROTOCOL D3, D7, D12)."""

from __future__ import annotations

import heapq
import hmac
from collections.abc import Callable
from itertools import count

from ..errors import (
    ErrataError,
    InvalidEnvelope,
    LocalProtocolError,
    NotAttached,
    SessionClosed,
    SessionExpired,
    SessionLost,
)
from .effects import FindSession, ForgetReplies, Hibernate, Stored
from .envelope import MAX_ID, write_envelope
from .records import EndReason
from .server_output import Output
from .server_requests import hash_key
from .server_session import (
    AttachRequest,
    FinalReplies,
    Message,
    ServerConfig,
    ServerConnection,
    ServerSession,
    optional,
)
from .state import Action, Event, Role, State, transition

_NO_HASH = bytes(32)
_LOST = "no session with this sid and key: open another"
_ENDS: dict[EndReason, tuple[type[ErrataError], str]] = {
    "closed": (SessionClosed, "the session was closed by its owner; its episodes stay readable"),
    "expired": (SessionExpired, "the session expired; its episodes stay readable: open another"),
    "lost": (SessionLost, "the session is lost; what was committed stays readable: open another"),
}

CHECK_AGAIN_S = 0.05
"""Shortest time after which a detached session is checked again that could not be hibernated: a request is running."""


class Attachments:
    """The sessions in memory, those that the shell is looking up, and the sockets that they are attached to.

    Args:
        config: Limits.
        out: Takes effects and messages.
        process: Processes a message that was parked.
        attached: Called with each session that gets a socket and had none, or has none any more.

    Attributes:
        sessions: Sessions in memory by sid, without those that the shell is looking up.
    """

    def __init__(
        self,
        config: ServerConfig,
        out: Output,
        process: Callable[[Message, float], None],
        attached: Callable[[ServerSession], None],
    ) -> None:
        self.config = config
        self._out = out
        self._process = process
        self._attached = attached
        self.sessions: dict[str, ServerSession] = {}
        self._being_found: dict[tuple[str, bytes, str | None], ServerSession] = {}
        self._timers: list[tuple[float, int, ServerSession]] = []
        self._order = count()

    def disconnect(self, connection: ServerConnection, now: float) -> None:
        """Mark a socket as lost and detach the sessions that are attached to it."""
        connection.lost = True
        for session in connection.sessions.values():
            if session.state in (State.ATTACHED, State.DETACHED) and session.connection is not connection:
                continue
            step = transition(Role.SERVER, session.state, Event.SOCKET_LOST)
            session.state = step.next
            if step.action is Action.DETACH:
                self._detach(session, now)
        connection.sessions.clear()

    def attach(self, request: AttachRequest, now: float) -> None:
        """Process an open or resume: attach the session if it is in memory, else ask the shell to look it up.

        While the session is being looked up or hibernated, the request is parked. One that is too late, or acknowledges
        more than this server answered, gets an error.
        """
        connection = request.connection
        key_hash = hash_key(request.sid, request.key)
        session = self.sessions.get(request.sid)
        own = session is not None and session.principal == connection.principal
        known = session.key_hash if session is not None and own else _NO_HASH
        if not hmac.compare_digest(known, key_hash) or session is None:
            key = (request.sid, key_hash, connection.principal)
            session = self._being_found.get(key)
            if session is None:
                session = self._being_found[key] = ServerSession(request.sid, key_hash, connection.principal)
        elif not self._check_attach(session, request):
            return
        step = transition(Role.SERVER, session.state, Event.OPEN if request.make else Event.RESUME)
        session.state = step.next
        if step.action is Action.ATTACH:
            self._attach(session, request)
            return
        connection.sessions.setdefault(request.sid, session)  # later messages of this socket are parked too
        if step.action is Action.PARK:
            session.parked.append(request)
            return
        session.attach_request = request
        session.group, session.labels = request.group, request.labels
        self._out.effects.append(FindSession(session, step.action is Action.MAKE))

    def _check_attach(self, session: ServerSession, request: AttachRequest) -> bool:
        """Return whether a request may attach a session; if not, answer it with the error."""
        refusal = self._attach_error(session, request)
        if refusal is None:
            return True
        connection = request.connection
        if session.connection is not connection:
            self._unlink(session, connection)
        self._out.error(connection, refusal, request.sid)
        return False

    def _attach_error(self, session: ServerSession, request: AttachRequest) -> ErrataError | None:
        """Return the error of a request with an outdated fence, or that acknowledges replies which were never made."""
        if request.fence is not None and (
            request.fence < session.fence
            or (request.fence == session.fence and request.connection is not session.connection)
        ):
            # The wire carries no number above MAX_ID.
            way = "without one" if session.fence == MAX_ID else "with a higher one"
            return NotAttached(
                f"another socket was attached under fence {session.fence}: resume {way} to take it over",
                fence=session.fence,
            )
        if request.last > session.last_done:
            return SessionLost(
                f"the resume acknowledges request {request.last}, and this server answered none after "
                f"{session.last_done}: the end of its journal is lost; open another session",
                next_id=session.last_done + 1,  # no reply follows
                eid=session.eid,
                t=session.t,
            )
        return None

    def _attach(self, session: ServerSession, request: AttachRequest) -> None:
        """Attach a session to the socket of a request: detach the old socket, answer, and send what was missed."""
        connection, old = request.connection, session.connection
        if old is not connection:
            if old is not None:
                old.sessions.pop(session.sid, None)
                old.blocked.pop(session.sid, None)
                self._out.detached(old, session.sid, "taken_over")
            session.connection = connection
            if old is None:
                self._attached(session)
            connection.sessions[session.sid] = session
            for pending in session.queue:
                pending.uncount()
                pending.count_on(connection)
        session.fence = min(session.fence + 1, MAX_ID) if request.fence is None else request.fence
        self.acknowledge(session, request.last, request.last_seq)
        session.last_before_attach = session.next_id - 1
        session.last_sent = session.acked if request.make else request.last
        session.last_seq_sent = session.acked_seq if request.make else min(request.last_seq, session.seq)
        session.reading_replies = session.reading_pushes = None  # reads of an earlier attachment are ignored
        head = {"sid": session.sid, "type": "opened" if request.make else "resumed"}
        self._out.send(connection, session.sid, write_envelope(head, session.position()))
        self._out.flush(session)
        self._out.flush_pushes(session)

    def acknowledge(self, session: ServerSession, last: int, last_seq: int) -> None:
        """Drop the replies and pushes that the client has, from memory and, by an effect, from the journal."""
        if session.acknowledge(last, last_seq):
            self._out.effects.append(ForgetReplies(session, session.acked, session.acked_seq))

    def _detach(self, session: ServerSession, now: float) -> None:
        session.connection = None
        self._attached(session)
        session.reading_replies = session.reading_pushes = None
        session.detached_at = now
        if not session.has_timer and session.recovery != "none":
            session.has_timer = True
            heapq.heappush(self._timers, (self._due(session), next(self._order), session))

    def _due(self, session: ServerSession) -> float:
        return max(session.detached_at, session.last_reply_at) + self.config.limits.detach_ttl_s

    def found(self, effect: FindSession, stored: Stored, now: float) -> None:
        """Attach a session that the shell found or created, or report that it has ended; process its parked messages.

        If the socket that asked for it is lost, or its attach is refused, the session stays in memory, detached.

        Raises:
            LocalProtocolError: The session was not being looked up.
        """
        session = effect.session
        if stored.status != "open":
            self._report_ended(session, stored, stored.status, now)
            return
        session.next_id, session.last_done = stored.next_id, stored.next_id - 1
        session.eid, session.t, session.seq = stored.eid, stored.t, stored.seq
        session.recovery, session.group = stored.recovery, stored.group or session.group
        request = self._take_attach_request(session)
        lost = request.connection.lost
        self.sessions[session.sid] = session
        if not lost and not self._check_attach(session, request):
            lost = True
        session.state = transition(Role.SERVER, session.state, Event.FOUND_DETACHED if lost else Event.FOUND).next
        if lost:
            self._detach(session, now)
        else:
            self._attach(session, request)
        self._process_parked(session, now)

    def find_failed(self, effect: FindSession, error: ErrataError, now: float) -> None:
        """Report why the shell neither found nor created a session, then process its parked messages.

        Raises:
            LocalProtocolError: The session was not being looked up.
        """
        session = effect.session
        request = self._take_attach_request(session)
        session.state = transition(Role.SERVER, session.state, Event.REFUSED).next
        self._unlink(session, request.connection)
        if isinstance(error, SessionLost):
            error = SessionLost(_LOST)  # the same text for an unknown sid, a wrong key and another principal
        self._out.error(request.connection, error, session.sid)
        self._process_parked(session, now)

    def _take_attach_request(self, session: ServerSession) -> AttachRequest:
        request, session.attach_request = session.attach_request, None
        if (
            request is None
            or self._being_found.pop((session.sid, session.key_hash, session.principal), None) is not session
        ):
            raise LocalProtocolError("a session was found twice, or was not looked for")
        return request

    def _report_ended(self, session: ServerSession, stored: Stored, reason: EndReason, now: float) -> None:
        """Report to the client that its session has ended, then send the replies that it missed."""
        request = self._take_attach_request(session)
        session.state = transition(Role.SERVER, session.state, Event.REFUSED).next
        self._unlink(session, request.connection)
        cls, text = _ENDS[reason]
        self._out.error(request.connection, cls(text, next_id=stored.next_id, eid=stored.eid, t=stored.t), session.sid)
        session.last_before_attach = stored.next_id - 1
        if not request.connection.lost:
            self._out.send_final_replies(
                session, request.last + 1, FinalReplies(request.connection, stored.next_id - 1)
            )
        self._process_parked(session, now)

    def _unlink(self, session: ServerSession, *connections: ServerConnection) -> None:
        """Remove a session from ``connections`` and from the sockets of its parked messages."""
        for connection in (*connections, *(item.connection for item in session.parked)):
            if connection.sessions.get(session.sid) is session:
                del connection.sessions[session.sid]

    def _process_parked(self, session: ServerSession, now: float) -> None:
        """Process the messages that were parked, in order; those of lost sockets are dropped."""
        parked, session.parked = session.parked, []
        for item in parked:
            if isinstance(item, Message):
                item.connection.in_flight -= 1
            if item.connection.lost:
                continue
            if isinstance(item, Message):
                try:
                    self._process(item, now)
                except InvalidEnvelope as error:
                    envelope = item.envelope
                    address = {"id": optional(envelope.id), "q": optional(envelope.q), "index": item.index}
                    self._out.error(item.connection, error, session.sid, **address)
            else:
                self.attach(item, now)

    def tick(self, now: float) -> None:
        """Hibernate the sessions that were detached for ``detach_ttl`` and have no request running."""
        while self._timers and self._timers[0][0] <= now:
            _, _, session = heapq.heappop(self._timers)
            session.has_timer = False
            if session.state is not State.DETACHED:
                continue
            due = self._due(session)
            if session.queue:  # a running request is not in the journal yet
                due = max(due, now + max(self.config.limits.detach_ttl_s, CHECK_AGAIN_S))
            if due > now:
                session.has_timer = True
                heapq.heappush(self._timers, (due, next(self._order), session))
                continue
            session.state = transition(Role.SERVER, session.state, Event.DETACH_TTL).next
            self._out.effects.append(Hibernate(session))

    def next_timer(self) -> float | None:
        """Return the time at which to call `tick`, None if nothing is scheduled."""
        return self._timers[0][0] if self._timers else None

    def hibernated(self, effect: Hibernate, now: float) -> None:
        """Remove a session whose environment is closed from memory, and process its parked messages.

        Ignored if the session is no longer being hibernated.
        """
        session = effect.session
        if session.state is State.HIBERNATING:
            self._remove(session, Event.HIBERNATED)
            self._process_parked(session, now)

    def _remove(self, session: ServerSession, event: Event) -> None:
        session.state = transition(Role.SERVER, session.state, event).next
        del self.sessions[session.sid]
        self._unlink(session)

    def end(self, session: ServerSession, reason: EndReason, *, send_detached: bool, now: float) -> None:
        """End a session in memory. Its queued requests get the error of ``reason``, after the replies that are due.

        Args:
            session: The session.
            reason: Why it ended.
            send_detached: Send ``detached`` last; not needed where the reply to a close says that the session ended.
            now: Time, on the clock of `ServerProtocol.receive`.
        """
        connection = session.connection
        cls, text = _ENDS[reason]
        self._remove(session, Event.ENDED)
        errors: dict[int, ErrataError] = {}
        for pending in session.queue:
            pending.uncount()
            errors[pending.id] = cls(text, eid=session.eid, t=session.t)
        session.queue.clear()
        if connection is not None:
            connection.sessions.pop(session.sid, None)
            session.connection = None
            self._attached(session)
            final = FinalReplies(connection, session.last_done, errors, reason if send_detached else None)
            self._out.send_final_replies(session, session.last_sent + 1, final)
        self._process_parked(session, now)
