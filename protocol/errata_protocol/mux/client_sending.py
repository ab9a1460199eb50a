"""What the client's machine sends: opens and resumes, requests within the bounds, reads until they are answered."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import LocalProtocolError
from .client_session import ClientConfig, ClientRead, ClientRequest, ClientSession
from .envelope import write_envelope
from .parts import Assembly, Outbox
from .state import Action, Event, Role, State, transition

RESUMED_AT_ONCE = 1000
"""Sessions in one resume: a frame of them stays below a part."""


class Sending:
    """The half of `client.ClientProtocol` that fills its outbox.

    Args:
        config: Bounds and waits.

    Attributes:
        sessions: By sid, as long as they are not over.
        reads: Without an answer, by q.
        online: There is a socket.
        leaving: The server asked for another one: nothing new is sent on this.
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
        self._waiting: dict[str, ClientSession] = {}  # sessions with something to do at a later time
        self._stalled: dict[str, ClientSession] = {}  # sessions that the socket's bound holds back
        self._resumes: list[ClientSession] = []
        self._late: dict[int, ClientRead] = {}  # reads that are repeated at a later time

    def _connect(self, session: ClientSession) -> None:
        """Open or resume a session if there is a socket."""
        if not self.online or session.state not in (State.UNOPENED, State.AWAY):
            return
        self._act(session, Event.CONNECTED)

    def _act(self, session: ClientSession, event: Event) -> Action:
        step = transition(Role.CLIENT, session.state, event)
        session.state = step.next
        if step.action is Action.SEND_OPEN:
            self._rewind(session, session.last + 1)
            self._count(session)
            said: dict[str, Any] = {"key": session.key, "fence": session.next_fence()}
            if session.group is not None:
                said["group"] = session.group
            head = {"sid": session.sid, "type": "open"}
            self._outbox.put(session.sid, write_envelope(head, msgspec.json.encode(said)))
            self._pump(session)
            for read in list(session.reads.values()):
                self._send_read(read)
        elif step.action is Action.SEND_RESUME:
            session.next_fence()
            self._resumes.append(session)
        return step.action

    def _send_resumes(self) -> None:
        """Put all resumes that were collected into as few messages as they fit."""
        due, self._resumes = self._resumes, []
        due = [session for session in dict.fromkeys(due) if session.state is State.RESUMING]
        for start in range(0, len(due), RESUMED_AT_ONCE):
            entries = [session.resume_entry() for session in due[start : start + RESUMED_AT_ONCE]]
            self._outbox.put("", write_envelope({"type": "resume"}, msgspec.json.encode(entries)))

    def _rewind(self, session: ClientSession, id: int) -> None:
        """Take everything from ``id`` on as not sent."""
        before = len(session.sent)
        session.settle(id)
        if session.counted:
            self._in_flight += len(session.sent) - before

    def _answered(self, session: ClientSession, id: int) -> ClientRequest | None:
        """Take the request of an answer out of what waits."""
        before = len(session.sent)
        request = session.answered(id)
        if session.counted:
            self._in_flight += len(session.sent) - before
        return request

    def _count(self, session: ClientSession) -> None:
        if not session.counted:
            session.counted = True
            self._in_flight += len(session.sent)

    def _uncount(self, session: ClientSession) -> None:
        if session.counted:
            session.counted = False
            self._in_flight -= len(session.sent)

    def _pump(self, session: ClientSession) -> None:
        """Send what may be sent."""
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
            self._outbox.put(session.sid, request.envelope(session.sid, id), id=id)

    def _send_cancel(self, session: ClientSession, request: ClientRequest) -> None:
        if request.id in session.sent and session.state is State.ATTACHED:
            self._outbox.put(session.sid, b'{"sid":"%s","id":%d,"type":"cancel"}' % (session.sid.encode(), request.id))

    def _freed(self, session: ClientSession) -> None:
        """Something of the session is answered: send more of it, or of what the socket's bound held back."""
        if session.unsent:
            self._pump(session)
        while self._stalled and self._in_flight < self.config.in_flight_socket:
            self._pump(self._stalled.pop(next(iter(self._stalled))))  # who waits longest

    def _send_read(self, read: ClientRead) -> None:
        if not self.online or read.sent or read.retry_at is not None or self.leaving:
            return
        if read.session is not None and read.session.state not in (State.ATTACHED, State.OPENING):
            return
        read.sent = True
        sid = "" if read.session is None else read.session.sid
        head: dict[str, Any] = ({"sid": sid} if sid else {}) | {"q": read.q, "type": read.kind}
        self._outbox.put(sid, write_envelope(head, read.data), q=read.q)

    def _finish_read(self, read: ClientRead) -> None:
        del self.reads[read.q]
        self._late.pop(read.q, None)
        if read.session is not None:
            del read.session.reads[read.q]

    def _new(self, sid: str, key: str, state: State) -> ClientSession:
        if sid in self.sessions:
            raise LocalProtocolError(f"session {sid[:6]}... is in use here")
        session = self.sessions[sid] = ClientSession(sid, key, state)
        return session

    def forget(self, session: ClientSession) -> None:
        """Drop a session here; on the server it stays as it is."""
        self.sessions.pop(session.sid, None)
        self._waiting.pop(session.sid, None)
        self._stalled.pop(session.sid, None)
        for read in list(session.reads.values()):
            self._finish_read(read)
        self._uncount(session)
        session.state = State.ENDED

    def acknowledge(self, session: ClientSession) -> None:
        """Tell the server that all so far is safe; every `ClientConfig.ack_every` it does so itself."""
        if session.state is State.ATTACHED and (session.acked, session.acked_seq) != (session.last, session.last_seq):
            session.acked, session.acked_seq = session.last, session.last_seq
            said = b'{"last":%d,"last_seq":%d}' % (session.last, session.last_seq)
            self._outbox.put(session.sid, write_envelope({"sid": session.sid, "type": "ack"}, said))
