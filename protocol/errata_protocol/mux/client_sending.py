"""Sends for the client: opens and resumes, requests within the limits, reads until they are answered."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import LocalProtocolError
from .client_session import ClientConfig, ClientRead, ClientRequest, ClientSession
from .envelope import write_envelope
from .parts import Assembly, Outbox
from .state import Action, Event, Role, State, transition

RESUMED_AT_ONCE = 1000
"""Most sessions in one resume, so that it need not be sent in parts."""


class Sending:
    """The part of `client.ClientProtocol` that queues messages to send.

    Args:
        config: Limits and waiting times.

    Attributes:
        sessions: Sessions that have not ended, by sid.
        reads: Reads without an answer, by q.
        online: Whether there is a socket.
        leaving: Whether the server asked for a new socket; no requests and reads are sent on this one.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.sessions: dict[str, ClientSession] = {}
        self.reads: dict[int, ClientRead] = {}
        self.online = False
        self.leaving = False
        self._outbox = Outbox(self.config.max_elements, self.config.max_frame)
        self._assembly = Assembly(self.config.max_message)
        self._q = 0
        self._in_flight = 0
        self._waiting: dict[str, ClientSession] = {}  # sessions with a retry or a hold
        self._stalled: dict[str, ClientSession] = {}  # sessions with requests held back by the socket's limit
        self._resumes: list[ClientSession] = []
        self._delayed_reads: dict[int, ClientRead] = {}  # reads with a retry

    def _connect(self, session: ClientSession) -> None:
        """Open or resume a session if there is a socket and it is not attached."""
        if not self.online or session.state not in (State.UNOPENED, State.DISCONNECTED):
            return
        self._apply(session, Event.CONNECTED)

    def _apply(self, session: ClientSession, event: Event) -> Action:
        """Apply an event to a session: change its state, and send the open or resume that the table asks for."""
        step = transition(Role.CLIENT, session.state, event)
        session.state = step.next
        if step.action is Action.SEND_OPEN:
            self._rewind(session, session.last + 1)
            self._count(session)
            data: dict[str, Any] = {"key": session.key, "fence": session.next_fence()}
            if session.group is not None:
                data["group"] = session.group
            head: dict[str, Any] = {"sid": session.sid, "type": "open"}
            if session.labels:
                head["labels"] = session.labels
            self._outbox.put(session.sid, write_envelope(head, msgspec.json.encode(data)))
            self._send_unsent(session)
            for read in list(session.reads.values()):
                self._send_read(read)
        elif step.action is Action.SEND_RESUME:
            session.next_fence()
            self._resumes.append(session)
        return step.action

    def _send_resumes(self) -> None:
        """Queue the resumes that were collected, up to `RESUMED_AT_ONCE` in a message."""
        due, self._resumes = self._resumes, []
        due = [session for session in dict.fromkeys(due) if session.state is State.RESUMING]
        for start in range(0, len(due), RESUMED_AT_ONCE):
            entries = [session.resume_entry() for session in due[start : start + RESUMED_AT_ONCE]]
            self._outbox.put("", write_envelope({"type": "resume"}, msgspec.json.encode(entries)))

    def _rewind(self, session: ClientSession, id: int) -> None:
        """Treat all requests from ``id`` on as not sent."""
        before = len(session.sent)
        session.split_sent(id)
        if session.counted:
            self._in_flight += len(session.sent) - before

    def _answered(self, session: ClientSession, id: int) -> ClientRequest | None:
        """Remove the request that a reply answers, and return it; None if an earlier process sent it."""
        before = len(session.sent)
        request = session.answered(id)
        if session.counted:
            self._in_flight += len(session.sent) - before
        return request

    def _count(self, session: ClientSession) -> None:
        """Count a session's sent requests towards the socket's limit."""
        if not session.counted:
            session.counted = True
            self._in_flight += len(session.sent)

    def _uncount(self, session: ClientSession) -> None:
        """Stop counting a session's sent requests towards the socket's limit."""
        if session.counted:
            session.counted = False
            self._in_flight -= len(session.sent)

    def _send_unsent(self, session: ClientSession) -> None:
        """Send a session's queued requests, as far as its state and the limits allow."""
        if session.state not in (State.ATTACHED, State.OPENING) or session.held_until is not None or self.leaving:
            return
        limit = self.config.in_flight_session
        while session.unsent and len(session.sent) < limit:
            if self._in_flight >= self.config.in_flight_socket:
                self._stalled[session.sid] = session
                return
            request = session.unsent.pop(0)
            if session.next_id is None:
                raise LocalProtocolError("an adopted session was attached without a position")
            request.id = session.next_id
            session.next_id += 1
            id = request.id
            session.sent[id] = request
            self._in_flight += 1
            self._outbox.put(session.sid, request.envelope(session.sid, id), {"id": id})

    def _send_cancel(self, session: ClientSession, request: ClientRequest) -> None:
        if request.id in session.sent and session.state is State.ATTACHED:
            self._outbox.put(session.sid, b'{"sid":"%s","id":%d,"type":"cancel"}' % (session.sid.encode(), request.id))

    def _send_more(self, session: ClientSession) -> None:
        """Called when a request is answered: send more of its session, then of others that the limit held back."""
        if session.unsent:
            self._send_unsent(session)
        self._send_stalled()

    def _send_stalled(self) -> None:
        """Send requests of sessions that the socket's limit held back, as far as the limit allows now."""
        while self._stalled and self._in_flight < self.config.in_flight_socket:
            self._send_unsent(self._stalled.pop(next(iter(self._stalled))))  # the one that has waited longest

    def _send_read(self, read: ClientRead) -> None:
        """Send a read, unless it is sent, has a retry scheduled, or its session is not attached."""
        if not self.online or read.sent or read.retry_at is not None or self.leaving:
            return
        if read.session is not None and read.session.state not in (State.ATTACHED, State.OPENING):
            return
        read.sent = True
        sid = "" if read.session is None else read.session.sid
        head: dict[str, Any] = ({"sid": sid} if sid else {}) | {"q": read.q, "type": read.kind}
        self._outbox.put(sid, write_envelope(head, read.data), {"q": read.q})

    def _finish_read(self, read: ClientRead) -> None:
        del self.reads[read.q]
        self._delayed_reads.pop(read.q, None)
        if read.session is not None:
            del read.session.reads[read.q]

    def _new(self, sid: str, key: str, state: State) -> ClientSession:
        if sid in self.sessions:
            raise LocalProtocolError(f"session {sid[:6]}... is in use here")
        session = self.sessions[sid] = ClientSession(sid, key, state)
        return session

    def forget(self, session: ClientSession) -> None:
        """Drop a session from this client, without events; on the server it stays as it is."""
        self.sessions.pop(session.sid, None)
        self._waiting.pop(session.sid, None)
        self._stalled.pop(session.sid, None)
        for read in list(session.reads.values()):
            self._finish_read(read)
        self._uncount(session)
        session.state = State.ENDED
        self._send_stalled()

    def acknowledge(self, session: ClientSession) -> None:
        """Acknowledge all replies and pushes so far; also done after every `ClientConfig.ack_every` of them."""
        if session.state is State.ATTACHED and (session.acked, session.acked_seq) != (session.last, session.last_seq):
            session.acked, session.acked_seq = session.last, session.last_seq
            data = b'{"last":%d,"last_seq":%d}' % (session.last, session.last_seq)
            self._outbox.put(session.sid, write_envelope({"sid": session.sid, "type": "ack"}, data))
