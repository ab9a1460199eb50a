"""The client's state machine of the multiplexed protocol, without I/O (PROTOCOL D).

    session = protocol.open(sid, key); request = protocol.request(session, "reset", b"{}")
    protocol.connected(now)                         send protocol.data_to_send()
    for event in protocol.receive(frame, now): ...  Attached, Replied, Failed, Answered, Pushed, ...
    protocol.disconnected(now)                      then connect again and call `connected`, which resumes the sessions

The caller gets each reply of a session once, in order of id, and each push once, in order of seq. A request is sent
again until it has a recorded reply; the server's ``resumed`` says which requests it has accepted.

Decisions of this client:

- When a request is refused, the client waits for the refusals of everything that it sent behind it, and then sends all
  of it again (go-back-n). So a refusal of the first round is never taken for one of the second. `ClientConfig.drain_s`
  limits the wait.
- A request that can never be admitted (UNKNOWN_TYPE, INVALID_ENVELOPE) fails; those behind it move up one id.
- When a reply or push is missing before the one that arrives, the client resumes the session on the same socket.
- After a takeover it does not take the session back by itself: the caller decides, with `claim`.
- The reply to a request that was sent before the attach has the sha256 of that request. If another process used the id
  meanwhile, the hashes differ, and the request that this client sent under the id fails without effect.
- Each attach has a higher ``fence`` than the one before, so an attach that a dead socket delivers late is refused. If
  the attach after `adopt` or `claim` is refused that way, it goes on from the fence in the error: a process that adopts
  a session does not know its fence. If another attach is refused, another process attached the session while this one
  had no socket: that is a takeover, as ``taken_over`` says it.
- A session that is over (closed, expired, lost) still gets the replies it missed; then its other requests fail.
- After a crash, `adopt` continues from the last reply and push that the caller kept. Replies to requests that only the
  crashed process knew come as `Replied` without a request.
- A digest that does not match its payload is the peer's fault: RemoteProtocolError.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from pydantic import ValidationError

from ..capabilities import ServerLimits
from ..errors import (
    ErrataError,
    FrameTooLarge,
    InvalidEnvelope,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
)
from ..labels import NO_LABELS, Labels
from .client_decoding import checked_data
from .client_receiving import Receiving
from .client_session import ENVELOPE_BYTES, ClientConfig, ClientRead, ClientRequest, ClientSession
from .envelope import read_server_frame
from .events import ClientEvent
from .parts import Assembly, Outbox
from .records import ReadKind, RequestKind
from .state import Event, Role, State, transition


class ClientProtocol(Receiving):
    """The state machine of all sessions of one client on one environment path, over one socket at a time.

    Args:
        config: Limits and waiting times.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        super().__init__(config or ClientConfig())

    # -- sessions and requests --------------------------------------------------------------------------------

    def open(self, sid: str, key: str, group: str | None = None, labels: Labels = NO_LABELS) -> ClientSession:
        """Open a new session, now or when there is a socket.

        Args:
            sid: Its id: random, at least 122 bits, URL-safe.
            key: Its key, likewise.
            group: Name under which `read` with ``close_group`` ends it together with others.
            labels: Labels of its episodes. A server without the extension `errata_protocol.labels.EXTENSION` refuses
                them.

        Raises:
            LocalProtocolError: This client has a session with that sid.
        """
        session = self._new(sid, key, State.UNOPENED)
        session.group, session.labels = group, labels
        self._connect(session)
        return session

    def adopt(self, sid: str, key: str, *, last: int, last_seq: int) -> ClientSession:
        """Continue a session that an earlier process opened.

        Args:
            sid: The session's id.
            key: The session's key.
            last: Id of the last reply that the caller kept; the server need not send it or earlier ones again.
            last_seq: ``seq`` of the last push that the caller kept.

        Raises:
            LocalProtocolError: This client has a session with that sid.
        """
        session = self._new(sid, key, State.DISCONNECTED)
        session.last, session.last_seq = last, last_seq
        session.acked, session.acked_seq = last, last_seq
        session.next_id = None  # the server knows
        session.may_outbid = True
        self._connect(session)
        return session

    def request(
        self,
        session: ClientSession,
        kind: RequestKind,
        data: bytes = b"{}",
        *,
        condition: tuple[int, str | None] | None = None,
        deadline_ms: int | None = None,
        labels: Labels | None = None,
    ) -> ClientRequest:
        """Queue a mutating request; it is sent when the session is attached and the limits allow.

        Args:
            session: A session of this client.
            kind: reset, step, mcp (tools/call), fork or close.
            data: JSON text; if the request is sent again, it has the same bytes.
            condition: (t, eid or None): the position that the session must have when the request starts.
            deadline_ms: Time limit in milliseconds from its arrival at the server, for waiting and execution together.
            labels: Labels of the episode that a reset begins, as for `open`, or all those of a fork's child; None sends
                none.

        Raises:
            InvalidRequest: ``data`` is not JSON, or its nesting is too deep.
            FrameTooLarge: It is larger than the server's limit for a message.
            LocalProtocolError: The session has ended.
        """
        if session.state is State.ENDED:
            raise LocalProtocolError(f"session {session.sid[:6]}... is over: open another")
        request = ClientRequest(kind, self._checked(data), condition, deadline_ms)
        request.labels = labels
        session.unsent.append(request)
        self._send_unsent(session)
        return request

    def request_again(
        self, session: ClientSession, request: ClientRequest, condition: tuple[int, str | None] | None
    ) -> None:
        """Queue a request again whose recorded error the server rolled back; it gets another id.

        Args:
            session: Its session.
            request: The request; it stays the same object, so that it can still be cancelled.
            condition: Its condition from now on, as for `request`.

        Raises:
            LocalProtocolError: The session has ended.
        """
        if session.state is State.ENDED:
            raise LocalProtocolError(f"session {session.sid[:6]}... is over: open another")
        request.id, request.condition = None, condition
        session.unsent.append(request)
        self._send_unsent(session)

    def fork(
        self,
        session: ClientSession,
        t: int,
        child_sid: str,
        child_key: str,
        eid: str | None = None,
        labels: Labels | None = None,
    ) -> ClientRequest:
        """Queue a fork. When its reply arrives, the child becomes a session of this client and is resumed.

        Args:
            session: The parent.
            t: The delivery to continue from.
            child_sid: Session id of the child: random, as for `open`.
            child_key: Its key, likewise.
            eid: An earlier episode of the session; None for the current one.
            labels: All labels of the child; None gives it the parent's. A server whose extension
                `errata_protocol.labels.EXTENSION` has no version 2 ignores them.

        Raises:
            LocalProtocolError: This client has a session with that sid, or the parent has ended.
        """
        if child_sid in self.sessions:
            raise LocalProtocolError(f"session {child_sid[:6]}... is in use here")
        data = {"t": t, "child": {"sid": child_sid, "key": child_key}} | ({} if eid is None else {"eid": eid})
        request = self.request(session, "fork", msgspec.json.encode(data), labels=labels)
        request.child = (child_sid, child_key)
        return request

    def read(self, kind: ReadKind, session: ClientSession | None = None, data: bytes = b"{}") -> ClientRead:
        """Queue a read. After a lost socket or a temporary refusal it is sent again, until it is answered.

        Args:
            kind: state, capabilities, rewards, mcp (not tools/call) or close_group.
            session: The session to read from; None for capabilities and close_group.
            data: JSON text.

        Returns:
            The read; `Answered` events name it.

        Raises:
            InvalidRequest: ``data`` is not JSON, or its nesting is too deep.
            FrameTooLarge: ``data`` is larger than the server's limit for a message.
            LocalProtocolError: The session has ended.
        """
        if session is not None and session.state is State.ENDED:
            raise LocalProtocolError(f"session {session.sid[:6]}... is over: open another")
        self._q += 1
        read = self.reads[self._q] = ClientRead(self._q, kind, session, self._checked(data))
        if session is not None:
            session.reads[read.q] = read
        self._send_read(read)
        return read

    def apply_limits(self, limits: ServerLimits) -> None:
        """Use the limits of the server's capabilities from now on."""
        self.config = replace(
            self.config,
            in_flight_session=limits.in_flight_session,
            in_flight_socket=limits.in_flight_socket,
            max_frame=limits.max_frame,
        )
        self._outbox.under_way_bytes = limits.max_frame

    def _checked(self, data: bytes) -> bytes:
        size = len(data) + ENVELOPE_BYTES
        if size > self.config.max_frame:
            raise FrameTooLarge(
                f"{len(data)} bytes are more than the server takes in one message, {self.config.max_frame} with the "
                f"{ENVELOPE_BYTES} of its envelope: send less"
            )
        return checked_data(data)

    def cancel(self, session: ClientSession, request: ClientRequest) -> bool:
        """Cancel a request unless it has started. Its outcome is reported like that of any other.

        If it has to be sent again, because it was refused or its socket was lost, it is sent with ``deadline_ms`` 0: if
        the server had not accepted it before, its reply is TIMEOUT and it has no effect. It cannot be left out, because
        the server may have used its id.

        Returns:
            True if the request had never been sent; it is removed and no event follows.
        """
        request.cancelled = True
        if request.id is None and request in session.unsent:
            session.unsent.remove(request)
            return True
        self._send_cancel(session, request)
        return False

    def drop(self, read: ClientRead) -> None:
        """Forget a read; its answer is ignored."""
        if read.q in self.reads:
            self._finish_read(read)

    def lose(self, session: ClientSession, error: ErrataError) -> list[ClientEvent]:
        """End a session whose server is known to be lost, and return the events: its requests and reads fail.

        Args:
            session: The session.
            error: Why it has ended.
        """
        self._end(session, error)
        return self._take_events()

    def claim(self, session: ClientSession) -> None:
        """Resume a session that another process has taken over, now or when there is a socket.

        Raises:
            LocalProtocolError: It was not taken over.
        """
        session.state = transition(Role.CLIENT, session.state, Event.CLAIMED).next
        session.may_outbid = True
        self._connect(session)

    # -- socket -----------------------------------------------------------------------------------------------

    def connected(self, now: float) -> None:
        """Called when a socket is connected: opens and resumes the sessions on it.

        Raises:
            LocalProtocolError: The last socket was not given up with `disconnected`.
        """
        if self.online:
            raise LocalProtocolError("the socket before this one was not given up: call disconnected first")
        self.online, self.leaving = True, False
        for session in list(self.sessions.values()):
            if session.state in (State.UNOPENED, State.DISCONNECTED) and session.retry_at is None:
                self._connect(session)
        for read in list(self.reads.values()):
            self._send_read(read)

    def disconnected(self, now: float) -> None:
        """Called when the socket is lost or closed: what has no answer is sent again on the next one."""
        self.online = False
        self._outbox = Outbox(self.config.max_elements, self.config.max_frame)
        self._assembly = Assembly(self.config.max_message)
        self._in_flight = 0
        self._stalled.clear()
        self._resumes.clear()
        self._delayed_reads.clear()
        for read in self.reads.values():
            read.sent, read.retry_at = False, None
        for session in self.sessions.values():
            session.state = transition(Role.CLIENT, session.state, Event.SOCKET_LOST).next
            session.counted = False
            session.end_error = None  # the answer to the next resume says it again
            session.hold(None)

    def data_to_send(self, max_bytes: int | None = None) -> list[bytes]:
        """Return the next frames to write to the socket; call it again while `has_data`.

        Args:
            max_bytes: Return no further frame once the frames have this many bytes; None for all.
        """
        self._send_resumes()
        return self._outbox.take(max_bytes)

    @property
    def has_data(self) -> bool:
        """Whether there is something to send."""
        return bool(self._outbox or self._resumes)

    def receive(self, frame: bytes | str, now: float) -> list[ClientEvent]:
        """Process a frame and return its events.

        Args:
            frame: A complete WebSocket message.
            now: Time in seconds, on any clock that never goes back; the same clock in all calls.

        Raises:
            RemoteProtocolError: The server broke the protocol: close the socket and connect again. Events of this frame
                that came before the error are returned by the next call.
        """
        try:
            for envelope, data in read_server_frame(frame):
                self._handle(envelope, data, now)
        except (InvalidEnvelope, FrameTooLarge, Overloaded, LocalProtocolError, ValidationError) as error:
            raise RemoteProtocolError(f"the server sent what does not belong here: {error}; connect again") from error
        return self._take_events()

    def tick(self, now: float) -> list[ClientEvent]:
        """Retry what was scheduled for ``now`` or earlier; called at the time of `next_timer`."""
        for session in list(self._waiting.values()):
            if session.retry_at is not None and session.retry_at <= now:
                session.retry_at = None
                self._connect(session)
            held, give_up = session.held_until, session.give_up_at
            if (
                held is not None
                and give_up is not None
                and (give_up <= now or (held <= now and not session.awaiting_refusal))
            ):
                session.hold(None)
                self._send_unsent(session)
            if session.retry_at is None and session.held_until is None:
                self._waiting.pop(session.sid, None)
        for read in list(self._delayed_reads.values()):
            if read.retry_at is not None and read.retry_at <= now:
                read.retry_at = None
                del self._delayed_reads[read.q]
                self._send_read(read)
        return self._take_events()

    def next_timer(self) -> float | None:
        """Return the time at which to call `tick`, None if nothing is scheduled."""
        times = [read.retry_at for read in self._delayed_reads.values() if read.retry_at is not None]
        for session in self._waiting.values():
            if session.retry_at is not None:
                times.append(session.retry_at)
            if session.held_until is not None and session.give_up_at is not None:
                times.append(session.give_up_at if session.awaiting_refusal else session.held_until)
        return min(times, default=None)
