"""What the client's machine makes of what it hears: replies in order, refusals, pushes, answers."""

from __future__ import annotations

from ..errors import CODES, ErrataError, RemoteProtocolError, error_from_wire
from ..payload import digest as payload_digest
from .client_sending import Sending
from .client_session import ClientConfig, ClientSession
from .envelope import ServerEnvelope, read_server_frame
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
from .reading import error_of, fields, is_recorded, number
from .state import Action, Event, Role, State, transition

_OVER = {"closed": "SESSION_CLOSED", "expired": "SESSION_EXPIRED", "lost": "SESSION_LOST"}
_BEHIND = "OUT_OF_ORDER"


def _retry_after(error: ErrataError, config: ClientConfig) -> float:
    return number(error.details, "retry_after", config.retry_after_s)


def _is_full_for_good(error: ErrataError) -> bool:
    """Say whether an environment is full until a client closes its session: its server names no time to wait."""
    return error.code == "CAPACITY_REACHED" and "retry_after" not in error.details


class Receiving(Sending):
    """The half of `client.ClientProtocol` that takes messages and makes events."""

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config)
        self._events: list[ClientEvent] = []

    def _taken(self) -> list[ClientEvent]:
        events, self._events = self._events, []
        return events

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
            self._events.append(GoneAway(number(fields(data), "retry_after", 0.0)))
            return
        session = self.sessions.get(envelope.sid or "")
        if session is None:
            if envelope.sid is None and envelope.type == "error":
                error = error_of(data)
                wait = {"retry_after": _retry_after(error, self.config)} if error.code == "OVERLOADED" else {}
                raise RemoteProtocolError(f"the server could not read what was sent: {error}", **wait)
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
            for request in session.sent.values():
                if request.cancelled:
                    self._send_cancel(session, request)
        self._events.append(Opened(session, position))
        self._pump(session)
        for read in list(session.reads.values()):
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
        if envelope.digest and envelope.digest != payload_digest(data):
            raise RemoteProtocolError(f"the payload of request {id} does not have its digest {envelope.digest}")
        session.last = id
        request = self._answered(session, id)
        if request is not None and envelope.request and envelope.request != payload_digest(request.data):
            # Another process used the id while this one was not attached: what was sent under it was never accepted.
            taken = {"code": "CONFLICT", "message": f"id {id} was used by another process: this request had no effect"}
            self._events.append(Failed(session, id, request, error_from_wire(taken), recorded=False))
            request = None
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
            request = self._answered(session, id)
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
        retryable = CODES[code].retryable and not _is_full_for_good(error)
        if retryable:
            if code != _BEHIND:
                retry_at = now + _retry_after(error, self.config)
                self._events.append(Refused(session, error, retry_at))
            first = min(id, int(number(error.details, "next_id", id))) if code == _BEHIND else id
            first = max(first, session.last + 1)
        else:
            first = id
        session.behind |= {n for n in session.sent if n > id}
        self._rewind(session, first)
        if not retryable:
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
            if CODES.get(error.code, CODES["EXECUTION_ERROR"]).retryable and not _is_full_for_good(error):
                retry_at = now + _retry_after(error, self.config)
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
        for read in list(session.reads.values()):
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
        if error is not None and error.code in ("NOT_ATTACHED", "OVERLOADED", "JOURNAL_UNAVAILABLE"):
            read.sent = False
            if error.code != "NOT_ATTACHED":
                read.retry_at = now + _retry_after(error, self.config)
                self._late[read.q] = read
            elif read.session is not None and read.session.state is State.ATTACHED:
                self._act(read.session, Event.NOT_ATTACHED)
            return
        if envelope.digest and envelope.digest != payload_digest(data):
            raise RemoteProtocolError(f"the answer to q {read.q} does not have its digest {envelope.digest}")
        self._finish_read(read)
        place = (envelope.eid, envelope.t, envelope.kind, envelope.digest or "")
        self._events.append(Answered(read, envelope.type, b"" if error else data, *place, error))
