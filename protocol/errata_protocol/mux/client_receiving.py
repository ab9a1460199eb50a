"""Processes what the client receives: replies in order, refusals, pushes and answers to reads."""

from __future__ import annotations

from ..errors import CODES, ErrataError, RemoteProtocolError, error_from_wire
from ..payload import digest as payload_digest
from .client_decoding import error_of, fields, is_recorded, number
from .client_sending import Sending
from .client_session import ClientConfig, ClientSession
from .envelope import ServerEnvelope, read_server_frame
from .events import (
    Answered,
    Attached,
    ClientEvent,
    Failed,
    GoneAway,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
)
from .messages import PART_DATA, POSITION_DATA, read_data
from .state import Action, Event, Role, State, transition

_END_CODES = {"closed": "SESSION_CLOSED", "expired": "SESSION_EXPIRED", "lost": "SESSION_LOST"}
_OUT_OF_ORDER = "OUT_OF_ORDER"


def _retry_after(error: ErrataError, config: ClientConfig) -> float:
    return number(error.details, "retry_after", config.retry_after_s)


def _is_permanently_full(error: ErrataError) -> bool:
    """Return whether an environment is full and waiting does not help: the server gives no time to retry after."""
    return error.code == "CAPACITY_REACHED" and "retry_after" not in error.details


class Receiving(Sending):
    """The part of `client.ClientProtocol` that processes messages and makes events."""

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config)
        self._events: list[ClientEvent] = []

    def _take_events(self) -> list[ClientEvent]:
        events, self._events = self._events, []
        return events

    def _handle(self, envelope: ServerEnvelope, data: bytes, now: float) -> None:
        if envelope.type == "part":
            piece = read_data(PART_DATA, data)
            address = (envelope.sid, envelope.id, envelope.q, envelope.seq)
            whole = self._assembly.add(address, piece.n, piece.of, piece.text)
            if whole is not None:
                for inner, inner_data in read_server_frame(whole.text):
                    self._handle(inner, inner_data, now)
            return
        if envelope.q is not None:
            self._handle_answer(envelope, data, now)
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
            return  # of a session that this client has dropped
        if envelope.id is not None:
            self._handle_reply(session, envelope.id, envelope, data, now)
        elif envelope.type in ("opened", "resumed"):
            self._handle_position(session, Event.OPENED if envelope.type == "opened" else Event.RESUMED, data)
        elif envelope.type == "reward" and envelope.seq is not None:
            self._handle_push(session, envelope.seq, data)
        elif envelope.type == "detached":
            reason = str(fields(data).get("reason"))
            if reason == "taken_over":
                self._take_over(session)
            else:
                code = _END_CODES.get(reason, "SESSION_LOST")
                self._end(
                    session, error_from_wire({"code": code, "message": f"the server ended the session: {reason}"})
                )
        elif envelope.type == "error":
            self._handle_refusal(session, error_of(data), now)

    def _take_over(self, session: ClientSession) -> None:
        """Leave a session to another process until it is claimed, and report that."""
        if transition(Role.CLIENT, session.state, Event.TAKEN_OVER).action is Action.REPORT_TAKEN_OVER:
            self._apply(session, Event.TAKEN_OVER)
            self._uncount(session)
            session.hold(None)
            self._events.append(TakenOver(session))
            self._send_stalled()

    def _handle_position(self, session: ClientSession, event: Event, data: bytes) -> None:
        """Process ``opened`` or ``resumed``: requests that the server has not accepted are sent again.

        A server that is at an earlier id than the last reply lost that reply: the session ends with SESSION_LOST.
        """
        if session.state is not (State.OPENING if event is Event.OPENED else State.RESUMING):
            return  # a repeat
        position = POSITION_DATA.validate_json(data)
        if position.next_id <= session.last:
            lost = {"code": "SESSION_LOST", "message": f"the server is at id {position.next_id}, before {session.last}"}
            self._end(session, error_from_wire(lost))
            return
        self._apply(session, event)
        session.fence, session.may_outbid = position.fence, False
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
        self._events.append(Attached(session, position))
        self._send_unsent(session)
        for read in list(session.reads.values()):
            self._send_read(read)

    def _handle_reply(self, session: ClientSession, id: int, envelope: ServerEnvelope, data: bytes, now: float) -> None:
        """Process a message with an id: report the next reply, ignore a repeated one, resume where one is missing."""
        error = error_of(data) if envelope.type == "error" else None
        if error is not None and not is_recorded(error):
            self._handle_request_refusal(session, id, error, now)
            return
        if id <= session.last:
            return  # a repeat
        if id > session.last + 1:
            self._resume_after_gap(session)
            return
        if envelope.digest and envelope.digest != payload_digest(data):
            raise RemoteProtocolError(f"the payload of request {id} does not have its digest {envelope.digest}")
        session.last = id
        request = self._answered(session, id)
        if request is not None and envelope.request and envelope.request != payload_digest(request.data):
            # Another process used the id while this one was not attached: this one's request was never accepted.
            taken = {"code": "CONFLICT", "message": f"id {id} was used by another process: this request had no effect"}
            self._events.append(Failed(session, id, request, error_from_wire(taken), recorded=False))
            request = None
        if session.awaiting_refusal and id >= session.held_at:
            session.hold(None)  # the refused request was accepted meanwhile: there is nothing to wait for
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
        if session.end_error is not None and session.last >= session.accepted:
            self._end(session, session.end_error)
            return
        if session.last - session.acked >= self.config.ack_every:
            self.acknowledge(session)
        self._send_more(session)

    def _adopt_child(self, sid: str, key: str) -> None:
        if sid not in self.sessions:
            child = self._new(sid, key, State.DISCONNECTED)
            child.next_id = None
            self._connect(child)

    def _resume_after_gap(self, session: ClientSession) -> None:
        """Resume a session of which a reply or push is missing, so that the server sends it again."""
        if session.end_error is None:
            self._apply(session, Event.MISSED)

    def _handle_request_refusal(self, session: ClientSession, id: int, error: ErrataError, now: float) -> None:
        """Process the refusal of a request that was not admitted: schedule sending again from it on (PROTOCOL D5).

        A request that can never be admitted fails instead, and those behind it move up one id.
        """
        code = error.code if error.code in CODES else "EXECUTION_ERROR"
        if code == "NOT_ATTACHED":
            self._apply(session, Event.NOT_ATTACHED)
            return
        if code in _END_CODES.values():
            self._end(session, error)
            return
        if code == "CONFLICT":
            request = self._answered(session, id)
            self._events.append(Failed(session, id, request, error, recorded=False))
            return
        session.awaiting_refusal.discard(id)
        request = session.sent.get(id)
        if request is None or session.state not in (State.ATTACHED, State.OPENING):
            self._end_hold_if_due(session, now)
            return
        if session.held_until is not None and id >= session.held_at:
            self._end_hold_if_due(session, now)  # behind the refused one
            return
        retry_at = now
        retryable = CODES[code].retryable and not _is_permanently_full(error)
        if retryable:
            if code != _OUT_OF_ORDER:
                retry_at = now + _retry_after(error, self.config)
                self._events.append(Refused(session, error, retry_at))
            first = min(id, int(number(error.details, "next_id", id))) if code == _OUT_OF_ORDER else id
            first = max(first, session.last + 1)
        else:
            first = id
        session.awaiting_refusal |= {n for n in session.sent if n > id}
        self._rewind(session, first)
        if not retryable:
            self._events.append(Failed(session, id, session.unsent.pop(0), error, recorded=False))
        session.hold(retry_at, at=first, give_up_at=retry_at + self.config.drain_s)
        self._waiting[session.sid] = session
        self._end_hold_if_due(session, now)

    def _end_hold_if_due(self, session: ClientSession, now: float) -> None:
        """Send again, if the time of the hold has passed and all expected refusals have come."""
        if session.held_until is not None and session.held_until <= now and not session.awaiting_refusal:
            session.hold(None)
            self._send_unsent(session)

    def _handle_refusal(self, session: ClientSession, error: ErrataError, now: float) -> None:
        """Process an error without an id: the answer to an open or a resume, or to an ack or a cancel."""
        next_id = error.details.get("next_id")
        is_attach = session.state in (State.OPENING, State.RESUMING)
        if error.code in _END_CODES.values() and is_attach and isinstance(next_id, int):
            session.end_error, session.accepted = error, next_id - 1
        if session.end_error is not None and session.last < session.accepted:
            return  # the missed replies come next; then the session ends
        if error.code in _END_CODES.values():
            self._end(session, error)
        elif is_attach:
            if CODES.get(error.code, CODES["EXECUTION_ERROR"]).retryable and not _is_permanently_full(error):
                retry_at = now + _retry_after(error, self.config)
                self._apply(session, Event.REFUSED)
                session.retry_at = retry_at
                self._waiting[session.sid] = session
                self._events.append(Refused(session, error, retry_at))
            elif error.code == "NOT_ATTACHED" and isinstance(fence := error.details.get("fence"), int):
                session.fence = max(session.fence, fence)
                if session.may_outbid:
                    self._apply(session, Event.REFUSED)
                    self._connect(session)
                else:  # another process attached it while this one had no socket
                    self._take_over(session)
            elif error.code != "NOT_ATTACHED":
                self._end(session, error)

    def _end(self, session: ClientSession, error: ErrataError) -> None:
        """End a session: its requests and reads fail with ``error``, then `SessionEnded` is reported."""
        if session.state is State.ENDED:
            return
        self._apply(session, Event.ENDED)
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
        self._send_more(session)

    def _handle_push(self, session: ClientSession, seq: int, data: bytes) -> None:
        """Report a push; ignore a repeated one, and resume where one is missing."""
        if seq <= session.last_seq or session.state is not State.ATTACHED:
            return
        if seq > session.last_seq + 1 and session.gap_at != session.last_seq:
            session.gap_at = session.last_seq  # resume once: pushes that are still missing then were deleted
            self._resume_after_gap(session)
            return
        session.last_seq = seq
        self._events.append(Pushed(session, seq, data))
        if session.last_seq - session.acked_seq >= self.config.ack_every:
            self.acknowledge(session)

    def _handle_answer(self, envelope: ServerEnvelope, data: bytes, now: float) -> None:
        """Report the answer to a read; or send it again, later if the server is busy, else when it is attached."""
        read = self.reads.get(envelope.q or 0)
        if read is None:
            return
        error = error_of(data) if envelope.type == "error" else None
        if error is not None and error.code in ("NOT_ATTACHED", "OVERLOADED", "JOURNAL_UNAVAILABLE"):
            read.sent = False
            if error.code != "NOT_ATTACHED":
                read.retry_at = now + _retry_after(error, self.config)
                self._delayed_reads[read.q] = read
            elif read.session is not None and read.session.state is State.ATTACHED:
                self._apply(read.session, Event.NOT_ATTACHED)
            return
        if envelope.digest and envelope.digest != payload_digest(data):
            raise RemoteProtocolError(f"the answer to q {read.q} does not have its digest {envelope.digest}")
        self._finish_read(read)
        place = (envelope.eid, envelope.t, envelope.kind, envelope.digest or "")
        self._events.append(Answered(read, envelope.type, b"" if error else data, *place, error))
