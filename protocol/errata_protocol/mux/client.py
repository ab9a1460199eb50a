"""The client's side of the multiplexed socket, without sockets (PROTOCOL D).

    protocol.open(sid, key); request = protocol.request(sid, "reset", b"{}")
    protocol.connected(now)                         send protocol.data_to_send()
    for event in protocol.receive(frame, now): ...  Opened, Replied, Failed, Answered, Pushed, ...
    protocol.disconnected(now)                      connect again, `connected`: it resumes and repeats what is needed

What the trainer gets is in order and once: replies of a session by id, pushes by seq. A request is sent again until it
has a recorded reply; which of them the server has accepted is what ``resumed`` says.

Decisions where PROTOCOL.md is silent:

- Go-back-n waits until the refusals of everything sent behind a refused request have come, then sends again from there:
  an answer to the first round is never taken for one to the second. `ClientConfig.drain_s` bounds that wait.
- A request that can never be admitted (UNKNOWN_TYPE, INVALID_ENVELOPE) fails; those behind it move up one id.
- A reply or push that does not follow on the one before makes the client resume on the same socket.
- After ``taken_over`` it does not fight: the trainer calls `claim`.
- Each attach has a higher ``fence`` than the one before, so what a dead socket still holds comes too late. Who is told
  so on a living socket (a process that adopts a session does not know the number) goes on from the number it is told.
- A session that is over by ``close`` still gets the replies it missed; what the server never accepted fails.
- After a crash, `adopt` continues from the last reply and push that the trainer kept; replies to requests that only the
  dead process knew come as `Replied` without a request.
- A digest that does not fit its payload is the peer's fault: RemoteProtocolError.
"""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
from pydantic import ValidationError

from ..errors import (
    CODES,
    ErrataError,
    InvalidEnvelope,
    LocalProtocolError,
    RemoteProtocolError,
    error_from_wire,
)
from ..payload import digest as payload_digest
from .client_session import ClientConfig, ClientRead, ClientRequest, ClientSession
from .effects import ReadKind, RequestKind
from .envelope import ServerEnvelope, read_server_frame, write_envelope
from .events import (
    Answered,
    ClientEvent,
    Failed,
    GoneAway,
    Opened,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
)
from .messages import PART_DATA, POSITION_DATA, read_data
from .parts import Assembly, Outbox
from .reading import checked_data, error_of, fields, is_recorded, number
from .state import Action, Event, Role, State, transition

RESUMED_AT_ONCE = 1000
"""Sessions in one resume: a frame of them stays below a part."""

_OVER = {"closed": "SESSION_CLOSED", "expired": "SESSION_EXPIRED", "lost": "SESSION_LOST"}
_BEHIND = "OUT_OF_ORDER"
_sid = msgspec.json.encode


class ClientProtocol:
    """All sessions of one client on one environment path, over one socket at a time.

    Args:
        config: Bounds and waits.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        self.config = config or ClientConfig()
        self.sessions: dict[str, ClientSession] = {}
        self.reads: dict[int, ClientRead] = {}
        self.online = False
        self.leaving = False
        self._outbox = Outbox(self.config.max_elements)
        self._assembly = Assembly(self.config.max_message)
        self._q = 0
        self._in_flight = 0
        self._waiting: dict[str, ClientSession] = {}  # sessions with something to do at a later time
        self._stalled: dict[str, ClientSession] = {}  # sessions that the socket's bound holds back
        self._resumes: list[ClientSession] = []
        self._events: list[ClientEvent] = []

    # -- what the trainer asks --------------------------------------------------------------------------------

    def open(self, sid: str, key: str, group: str | None = None) -> ClientSession:
        """Make a session: sid and key are random, at least 122 bits each, URL-safe.

        Raises:
            LocalProtocolError: The sid is in use here.
        """
        session = self._new(sid, key, State.UNOPENED)
        session.group = group
        self._connect(session)
        return session

    def adopt(self, sid: str, key: str, *, last: int, last_seq: int) -> ClientSession:
        """Continue a session of a process before this one.

        Args:
            sid: Its id.
            key: Its key.
            last: Last id whose reply is safe here; it and all before are never sent again.
            last_seq: Likewise of pushes.
        """
        session = self._new(sid, key, State.AWAY)
        session.last, session.last_seq = last, last_seq
        session.acked, session.acked_seq = last, last_seq
        session.next_id = None  # the server knows
        self._connect(session)
        return session

    def _new(self, sid: str, key: str, state: State) -> ClientSession:
        if sid in self.sessions:
            raise LocalProtocolError(f"session {sid[:6]}... is in use here")
        session = self.sessions[sid] = ClientSession(sid, key, state)
        return session

    def request(
        self,
        session: ClientSession,
        kind: RequestKind,
        data: bytes = b"{}",
        *,
        condition: tuple[int, str | None] | None = None,
        deadline_ms: int | None = None,
    ) -> ClientRequest:
        """Queue a mutating request; it is sent as soon as the session is attached and the bounds allow.

        Args:
            session: Of this protocol.
            kind: reset, step, mcp (tools/call), fork or close.
            data: JSON text; the same bytes are sent again where need be.
            condition: (t, eid or None): where the session has to stand when its turn comes.
            deadline_ms: From receipt, queue included.

        Raises:
            InvalidRequest: ``data`` is not JSON, or nests deeper than the wire allows.
            LocalProtocolError: The session is over.
        """
        if session.state is State.ENDED:
            raise LocalProtocolError(f"session {session.sid[:6]}... is over: open another")
        request = ClientRequest(kind, checked_data(data), condition, deadline_ms)
        session.unsent.append(request)
        self._pump(session)
        return request

    def fork(
        self, session: ClientSession, t: int, child_sid: str, child_key: str, eid: str | None = None
    ) -> ClientRequest:
        """Queue a fork; its child is a session of this protocol once the reply is here, and is resumed at once.

        Args:
            session: The parent.
            t: Which of its deliveries to continue from.
            child_sid: Random, as for `open`.
            child_key: Likewise.
            eid: An earlier episode of the session.
        """
        if child_sid in self.sessions:
            raise LocalProtocolError(f"session {child_sid[:6]}... is in use here")
        said = {"t": t, "child": {"sid": child_sid, "key": child_key}} | ({} if eid is None else {"eid": eid})
        request = self.request(session, "fork", msgspec.json.encode(said))
        request.child = (child_sid, child_key)
        return request

    def read(self, kind: ReadKind, session: ClientSession | None = None, data: bytes = b"{}") -> ClientRead:
        """Queue a read; it is repeated until it is answered. ``capabilities`` and ``close_group`` have no session."""
        if session is not None and session.state is State.ENDED:
            raise LocalProtocolError(f"session {session.sid[:6]}... is over: open another")
        self._q += 1
        read = self.reads[self._q] = ClientRead(self._q, kind, session, checked_data(data))
        self._send_read(read)
        return read

    def cancel(self, session: ClientSession, request: ClientRequest) -> bool:
        """Take a request back if it has not started; its outcome comes as for any other.

        Returns:
            It was not even sent, and is gone: no event follows.
        """
        if request.id is None and request in session.unsent:
            session.unsent.remove(request)
            return True
        if request.id in session.sent and session.state is State.ATTACHED:
            self._outbox.put(session.sid, b'{"sid":%s,"id":%d,"type":"cancel"}' % (_sid(session.sid), request.id))
        return False

    def claim(self, session: ClientSession) -> None:
        """Take a session back that another process took over."""
        session.state = transition(Role.CLIENT, session.state, Event.CLAIMED).next
        self._connect(session)

    def forget(self, session: ClientSession) -> None:
        """Drop a session here; on the server it stays as it is."""
        self.sessions.pop(session.sid, None)
        self._waiting.pop(session.sid, None)
        self._stalled.pop(session.sid, None)
        for read in [read for read in self.reads.values() if read.session is session]:
            self._finish_read(read)
        self._uncount(session)
        session.state = State.ENDED

    def acknowledge(self, session: ClientSession) -> None:
        """Tell the server that all so far is safe; every `ClientConfig.ack_every` it does so itself."""
        if session.state is State.ATTACHED and (session.acked, session.acked_seq) != (session.last, session.last_seq):
            session.acked, session.acked_seq = session.last, session.last_seq
            said = b'{"last":%d,"last_seq":%d}' % (session.last, session.last_seq)
            self._outbox.put(session.sid, write_envelope({"sid": session.sid, "type": "ack"}, said))

    # -- socket -----------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Take a new socket: open and resume all sessions on it."""
        if self.online:
            raise LocalProtocolError("the socket before this one was not given up: call disconnected first")
        self.online, self.leaving = True, False
        for session in list(self.sessions.values()):
            if session.state in (State.UNOPENED, State.AWAY) and session.retry_at is None:
                self._connect(session)
        for read in list(self.reads.values()):
            self._send_read(read)

    def disconnected(self, now: float) -> None:
        """Give the socket up: what it had still to send is sent anew on the next one."""
        self.online = False
        self._outbox = Outbox(self.config.max_elements)
        self._assembly = Assembly(self.config.max_message)
        self._in_flight = 0
        self._stalled.clear()
        self._resumes.clear()
        for read in self.reads.values():
            read.sent, read.retry_at = False, None
        for session in self.sessions.values():
            session.state = transition(Role.CLIENT, session.state, Event.SOCKET_LOST).next
            session.counted = False
            session.hold(None)

    def data_to_send(self, max_bytes: int | None = None) -> list[bytes]:
        """Return frames for the socket; call again while `has_data`."""
        self._send_resumes()
        return self._outbox.take(max_bytes)

    @property
    def has_data(self) -> bool:
        """There is something to send."""
        return bool(self._outbox or self._resumes)

    def receive(self, frame: bytes | str, now: float) -> list[ClientEvent]:
        """Take a frame.

        Args:
            frame: The message, whole.
            now: Seconds, in any clock that does not go back.

        Raises:
            RemoteProtocolError: The server broke the protocol: drop the socket and connect again. Events of the frames
                before were returned already; those of this one come with the next call.
        """
        try:
            for envelope, data in read_server_frame(frame):
                self._take(envelope, data, now)
        except (InvalidEnvelope, LocalProtocolError, ValidationError) as error:
            raise RemoteProtocolError(f"the server sent what does not belong here: {error}; connect again") from error
        return self._taken()

    def tick(self, now: float) -> list[ClientEvent]:
        """Do what was put off until now; see `next_timer`."""
        for session in list(self._waiting.values()):
            if session.retry_at is not None and session.retry_at <= now:
                session.retry_at = None
                self._connect(session)
            held, give_up = session.held_until, session.give_up_at
            if held is not None and give_up is not None and (give_up <= now or (held <= now and not session.behind)):
                session.hold(None)
                self._pump(session)
            if session.retry_at is None and session.held_until is None:
                self._waiting.pop(session.sid, None)
        for read in list(self.reads.values()):
            if read.retry_at is not None and read.retry_at <= now:
                read.retry_at = None
                self._send_read(read)
        return self._taken()

    def next_timer(self) -> float | None:
        """Return when to call `tick`, None if nothing waits."""
        times = [read.retry_at for read in self.reads.values() if read.retry_at is not None]
        for session in self._waiting.values():
            if session.retry_at is not None:
                times.append(session.retry_at)
            if session.held_until is not None and session.give_up_at is not None:
                times.append(session.give_up_at if session.behind else session.held_until)
        return min(times, default=None)

    def _taken(self) -> list[ClientEvent]:
        events, self._events = self._events, []
        return events

    # -- sending ----------------------------------------------------------------------------------------------

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
            for read in list(self.reads.values()):
                if read.session is session:
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

    def _freed(self, session: ClientSession) -> None:
        """Something of the session is answered: send more of it, or of what the socket's bound held back."""
        if session.unsent:
            self._pump(session)
        while self._stalled and self._in_flight < self.config.in_flight_socket:
            _, other = self._stalled.popitem()
            self._pump(other)

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

    # -- receiving --------------------------------------------------------------------------------------------

    def _take(self, envelope: ServerEnvelope, data: bytes, now: float) -> None:
        if envelope.type == "part":
            piece = read_data(PART_DATA, data)
            address = (envelope.sid, envelope.id, envelope.q, envelope.seq)
            whole = self._assembly.add(address, piece.n, piece.of, piece.text)
            if whole is not None:
                for inner, inner_data in read_server_frame(whole):
                    self._take(inner, inner_data, now)
            return
        if envelope.q is not None:
            self._take_answer(envelope, data, now)
            return
        if envelope.type == "goaway":
            self.leaving = True
            self._events.append(GoneAway(number(data, "retry_after")))
            return
        session = self.sessions.get(envelope.sid or "")
        if session is None:
            if envelope.sid is None and envelope.type == "error":
                raise RemoteProtocolError(f"the server could not read what was sent: {error_of(data)}")
            return  # of a session that was dropped here
        if envelope.id is not None:
            self._take_reply(session, envelope.id, envelope, data, now)
        elif envelope.type in ("opened", "resumed"):
            self._take_position(session, Event.OPENED if envelope.type == "opened" else Event.RESUMED, data)
        elif envelope.type == "reward" and envelope.seq is not None:
            self._take_push(session, envelope.seq, data)
        elif envelope.type == "detached":
            reason = str(fields(data).get("reason"))
            if reason == "taken_over":
                if transition(Role.CLIENT, session.state, Event.TAKEN).action is Action.TELL_TAKEN:
                    self._act(session, Event.TAKEN)
                    self._uncount(session)
                    session.hold(None)
                    self._events.append(TakenOver(session))
            else:
                code = _OVER.get(reason, "SESSION_LOST")
                self._end(
                    session, error_from_wire({"code": code, "message": f"the server ended the session: {reason}"})
                )
        elif envelope.type == "error":
            self._take_refusal(session, error_of(data), now)

    def _take_position(self, session: ClientSession, event: Event, data: bytes) -> None:
        if session.state is not (State.OPENING if event is Event.OPENED else State.RESUMING):
            return  # said twice
        position = POSITION_DATA.validate_json(data)
        if position.next_id <= session.last:
            lost = {"code": "SESSION_LOST", "message": f"the server is at id {position.next_id}, before {session.last}"}
            self._end(session, error_from_wire(lost))
            return
        self._act(session, event)
        session.fence = position.fence
        session.eid, session.t = position.eid, position.t
        session.acked = max(session.acked, session.last if event is Event.RESUMED else 0)
        session.acked_seq = max(session.acked_seq, session.last_seq if event is Event.RESUMED else 0)
        session.accepted = position.next_id - 1
        if event is Event.RESUMED:
            self._rewind(session, position.next_id)
            self._count(session)
            session.hold(None)
        self._events.append(Opened(session, position))
        self._pump(session)
        for read in list(self.reads.values()):
            if read.session is session:
                self._send_read(read)

    def _take_reply(self, session: ClientSession, id: int, envelope: ServerEnvelope, data: bytes, now: float) -> None:
        error = error_of(data) if envelope.type == "error" else None
        if error is not None and not is_recorded(error):
            self._take_request_refusal(session, id, error, now)
            return
        if id <= session.last:
            return  # a repeat
        if id > session.last + 1:
            self._missed(session)
            return
        if envelope.digest and not hmac.compare_digest(envelope.digest, payload_digest(data)):
            raise RemoteProtocolError(f"the payload of request {id} does not have its digest {envelope.digest}")
        session.last = id
        before = len(session.sent)
        request = session.answered(id)
        if session.counted:
            self._in_flight += len(session.sent) - before
        if session.behind and id >= session.held_at:
            session.hold(None)  # what was refused was accepted since: there is nothing to wait for
        if error is not None:
            self._events.append(Failed(session, id, request, error, recorded=True))
        else:
            if envelope.t is not None:
                session.eid, session.t = envelope.eid, envelope.t
            place = (envelope.eid, envelope.t, envelope.digest or "")
            self._events.append(Replied(session, id, request, envelope.type, data, *place))
            if envelope.type == "forked" and request is not None and request.child is not None:
                self._adopt_child(*request.child)
            if envelope.type == "closed":
                self._end(session, error_from_wire({"code": "SESSION_CLOSED", "message": "the session was closed"}))
                return
        if session.over is not None and session.last >= session.accepted:
            self._end(session, session.over)
            return
        if session.last - session.acked >= self.config.ack_every:
            self.acknowledge(session)
        self._freed(session)

    def _adopt_child(self, sid: str, key: str) -> None:
        if sid not in self.sessions:
            child = self._new(sid, key, State.AWAY)
            child.next_id = None
            self._connect(child)

    def _missed(self, session: ClientSession) -> None:
        """Something before what came is missing: resume, and it comes again."""
        if session.over is None:
            self._act(session, Event.MISSED)

    def _take_request_refusal(self, session: ClientSession, id: int, error: ErrataError, now: float) -> None:
        """Take that a request was refused before admission: go back to it (PROTOCOL D5)."""
        code = error.code if error.code in CODES else "EXECUTION_ERROR"
        if code == "NOT_ATTACHED":
            self._act(session, Event.NOT_ATTACHED)
            return
        if code in _OVER.values():
            self._end(session, error)
            return
        if code == "CONFLICT":
            before = len(session.sent)
            request = session.answered(id)
            if session.counted:
                self._in_flight += len(session.sent) - before
            self._events.append(Failed(session, id, request, error, recorded=False))
            return
        session.behind.discard(id)
        request = session.sent.get(id)
        if request is None or session.state not in (State.ATTACHED, State.OPENING):
            self._after_hold(session, now)
            return
        if session.held_until is not None and id >= session.held_at:
            self._after_hold(session, now)  # behind the refused one
            return
        retry_at = now
        if CODES[code].retryable:
            if code != _BEHIND:
                retry_at = now + float(error.details.get("retry_after", self.config.retry_after_s))
                self._events.append(Refused(session, error, retry_at))
            first = min(id, int(error.details.get("next_id", id))) if code == _BEHIND else id
            first = max(first, session.last + 1)
        else:
            first = id
        session.behind |= {n for n in session.sent if n > id}
        self._rewind(session, first)
        if not CODES[code].retryable:
            # What can never be admitted is given up; those behind it move up to its id.
            self._events.append(Failed(session, id, session.unsent.pop(0), error, recorded=False))
        session.hold(retry_at, at=first, give_up_at=retry_at + self.config.drain_s)
        self._waiting[session.sid] = session
        self._after_hold(session, now)

    def _after_hold(self, session: ClientSession, now: float) -> None:
        if session.held_until is not None and session.held_until <= now and not session.behind:
            session.hold(None)
            self._pump(session)

    def _take_refusal(self, session: ClientSession, error: ErrataError, now: float) -> None:
        """Take the answer to an open or resume that is an error, or to an ack or cancel."""
        next_id = error.details.get("next_id")
        if error.code == "SESSION_CLOSED" and session.state is State.RESUMING and isinstance(next_id, int):
            session.over, session.accepted = error, next_id - 1
        if session.over is not None and session.last < session.accepted:
            return  # the replies it missed come now
        if error.code in _OVER.values():
            self._end(session, error)
        elif session.state in (State.OPENING, State.RESUMING):
            if CODES.get(error.code, CODES["EXECUTION_ERROR"]).retryable:
                retry_at = now + float(error.details.get("retry_after", self.config.retry_after_s))
                self._act(session, Event.REFUSED)
                session.retry_at = retry_at
                self._waiting[session.sid] = session
                self._events.append(Refused(session, error, retry_at))
            elif error.code == "NOT_ATTACHED" and isinstance(fence := error.details.get("fence"), int):
                self._act(session, Event.REFUSED)  # another process attached it since: a higher number wins
                session.fence = max(session.fence, fence)
                self._connect(session)
            elif error.code != "NOT_ATTACHED":
                self._end(session, error)

    def _end(self, session: ClientSession, error: ErrataError) -> None:
        if session.state is State.ENDED:
            return
        self._act(session, Event.ENDED)
        self._uncount(session)
        requests = [*session.sent.values(), *session.unsent]
        session.sent.clear()
        session.unsent.clear()
        for request in requests:
            self._events.append(Failed(session, request.id, request, error, recorded=False))
        for read in [read for read in self.reads.values() if read.session is session]:
            self._finish_read(read)
            self._events.append(Answered(read, "error", b"", error=error))
        self._events.append(SessionEnded(session, error))
        self.forget(session)
        self._freed(session)

    def _take_push(self, session: ClientSession, seq: int, data: bytes) -> None:
        if seq <= session.last_seq or session.state is not State.ATTACHED:
            return
        if seq > session.last_seq + 1 and session.gap_at != session.last_seq:
            session.gap_at = session.last_seq  # once: what is still missing then was deleted
            self._missed(session)
            return
        session.last_seq = seq
        self._events.append(Pushed(session, seq, data))
        if session.last_seq - session.acked_seq >= self.config.ack_every:
            self.acknowledge(session)

    def _take_answer(self, envelope: ServerEnvelope, data: bytes, now: float) -> None:
        read = self.reads.get(envelope.q or 0)
        if read is None:
            return
        error = error_of(data) if envelope.type == "error" else None
        if error is not None and (error.code == "NOT_ATTACHED" or error.code in ("OVERLOADED", "JOURNAL_UNAVAILABLE")):
            read.sent = False
            if error.code != "NOT_ATTACHED":
                read.retry_at = now + float(error.details.get("retry_after", self.config.retry_after_s))
            elif read.session is not None and read.session.state is State.ATTACHED:
                self._act(read.session, Event.NOT_ATTACHED)
            return
        if envelope.digest and payload_digest(data) != envelope.digest:
            raise RemoteProtocolError(f"the answer to q {read.q} does not have its digest {envelope.digest}")
        self._finish_read(read)
        place = (envelope.eid, envelope.t, envelope.kind, envelope.digest or "")
        self._events.append(Answered(read, envelope.type, b"" if error else data, *place, error))
