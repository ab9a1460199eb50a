"""The client's side of the multiplexed socket, without sockets (PROTOCOL D).

    protocol.open(sid, key); request = protocol.request(sid, "reset", b"{}")
    protocol.connected(now)                         send protocol.data_to_send()
    for event in protocol.receive(frame, now): ...  Opened, Replied, Failed, Answered, Pushed, ...
    protocol.disconnected(now)                      connect again, `connected`: it resumes and repeats what is needed

What the trainer gets is in order and once: replies of a session by id, pushes by seq. A request is sent again until it
has a recorded reply; which of them the server has accepted is what ``resumed`` says.

Decisions of this client:

- Go-back-n waits until the refusals of everything sent behind a refused request have come, then sends again from there:
  an answer to the first round is never taken for one to the second. `ClientConfig.drain_s` bounds that wait.
- A request that can never be admitted (UNKNOWN_TYPE, INVALID_ENVELOPE) fails; those behind it move up one id.
- A reply or push that does not follow on the one before makes the client resume on the same socket.
- After ``taken_over`` it does not fight: the trainer calls `claim`.
- A reply to what was asked before the attach names the sha256 of its request: an id that another process used meanwhile
  is no answer to what this one sent under it, and that request fails without effect.
- Each attach has a higher ``fence`` than the one before, so what a dead socket still holds comes too late. Who is told
  so on a living socket (a process that adopts a session does not know the number) goes on from the number it is told.
- A session that is over by ``close`` still gets the replies it missed; what the server never accepted fails.
- After a crash, `adopt` continues from the last reply and push that the trainer kept; replies to requests that only the
  dead process knew come as `Replied` without a request.
- A digest that does not fit its payload is the peer's fault: RemoteProtocolError.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from pydantic import ValidationError

from ..capabilities import ServerLimits
from ..errors import FrameTooLarge, InvalidEnvelope, LocalProtocolError, Overloaded, RemoteProtocolError
from .client_receiving import Receiving
from .client_session import ENVELOPE_BYTES, ClientConfig, ClientRead, ClientRequest, ClientSession
from .envelope import read_server_frame
from .events import ClientEvent
from .parts import Assembly, Outbox
from .reading import checked_data
from .records import ReadKind, RequestKind
from .state import Event, Role, State, transition


class ClientProtocol(Receiving):
    """All sessions of one client on one environment path, over one socket at a time.

    Args:
        config: Bounds and waits.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        super().__init__(config or ClientConfig())

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
            FrameTooLarge: It is more than the server takes in one message.
            LocalProtocolError: The session is over.
        """
        if session.state is State.ENDED:
            raise LocalProtocolError(f"session {session.sid[:6]}... is over: open another")
        request = ClientRequest(kind, self._checked(data), condition, deadline_ms)
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
        """Queue a read; it is repeated until it is answered. ``capabilities`` and ``close_group`` have no session.

        Raises:
            InvalidRequest: ``data`` is not JSON, or nests deeper than the wire allows.
            FrameTooLarge: It is more than the server takes in one message.
            LocalProtocolError: The session is over.
        """
        if session is not None and session.state is State.ENDED:
            raise LocalProtocolError(f"session {session.sid[:6]}... is over: open another")
        self._q += 1
        read = self.reads[self._q] = ClientRead(self._q, kind, session, self._checked(data))
        if session is not None:
            session.reads[read.q] = read
        self._send_read(read)
        return read

    def keep_to(self, limits: ServerLimits) -> None:
        """Keep to the bounds that the server tells in its capabilities."""
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
        """Take a request back if it has not started; its outcome comes as for any other.

        Where it has to be sent again, because it was refused or its socket was lost, it goes with ``deadline_ms`` 0: if
        the server had not accepted it before, its reply is TIMEOUT, and it has no effect. Its id may be used already,
        so it is not left out.

        Returns:
            It was not even sent, and is gone: no event follows.
        """
        request.cancelled = True
        if request.id is None and request in session.unsent:
            session.unsent.remove(request)
            return True
        self._send_cancel(session, request)
        return False

    def drop(self, read: ClientRead) -> None:
        """Forget a read whose answer nobody waits for any more."""
        if read.q in self.reads:
            self._finish_read(read)

    def claim(self, session: ClientSession) -> None:
        """Take a session back that another process took over."""
        session.state = transition(Role.CLIENT, session.state, Event.CLAIMED).next
        self._connect(session)

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
        self._outbox = Outbox(self.config.max_elements, self.config.max_frame)
        self._assembly = Assembly(self.config.max_message)
        self._in_flight = 0
        self._stalled.clear()
        self._resumes.clear()
        self._late.clear()
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
        except (InvalidEnvelope, FrameTooLarge, Overloaded, LocalProtocolError, ValidationError) as error:
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
        for read in list(self._late.values()):
            if read.retry_at is not None and read.retry_at <= now:
                read.retry_at = None
                del self._late[read.q]
                self._send_read(read)
        return self._taken()

    def next_timer(self) -> float | None:
        """Return when to call `tick`, None if nothing waits."""
        times = [read.retry_at for read in self._late.values() if read.retry_at is not None]
        for session in self._waiting.values():
            if session.retry_at is not None:
                times.append(session.retry_at)
            if session.held_until is not None and session.give_up_at is not None:
                times.append(session.give_up_at if session.behind else session.held_until)
        return min(times, default=None)
