"""The server's state machine of the multiplexed protocol, without I/O (PROTOCOL D).

The shell, the I/O code around it, passes frames and outcomes to it, and performs the `effects` that it returns:

    connection = protocol.connect(principal)
    for effect in protocol.receive(connection, frame, now): ...     FindSession, RunRequest, AnswerRead, Write, ...
    for effect in protocol.completed(run, reply, now): ...          sends the reply, starts the next request

Its state is in memory and can be lost at any time; `effects.FindSession` then restores a session from the journal.

Decisions that PROTOCOL D states:

- One request of a session runs at a time; the next one starts when its reply is committed. ``if``, cancel and
  ``deadline_ms`` are decided when a request would start. Their outcomes are recorded in order, like replies.
- An open of a session that exists is a resume that acknowledges nothing. Replies acknowledged before stay forgotten.
- A resume that acknowledges an id which was never answered shows that the journal lost its end: it gets SESSION_LOST,
  and the session stays as it is.
- A wrong key, another principal and an unknown sid take the same path (hash, compare, `effects.FindSession`), so that
  the answers do not tell them apart.
- A resume of a session that has ended, with its key, gets the error of the end, and then the replies it missed.
- ``detach_ttl`` counts from the last recorded reply or from the time of detaching, whichever is later.
- `rejected` makes the request's id the next one again; everything queued behind it is OUT_OF_ORDER.
- PROTOCOL D4 compares the type of a request, not its ``if`` and ``deadline_ms``. Forks are compared by bytes only,
  because the child's key is not kept.
- A resume of no session is INVALID_ENVELOPE. CAPACITY_REACHED has no ``retry_after`` where waiting does not help.
- mcp with ``id`` is tools/call, and nothing else is. A fork does not attach its child.
- A fork whose child's sid is taken, by any session, is VALIDATION_ERROR and recorded. CONFLICT is never a recorded
  reply: it consumes no id, and says that the id belongs to another request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct

from ..errors import (
    CODES,
    ErrataError,
    FrameTooLarge,
    InvalidEnvelope,
    JournalUnavailable,
    LocalProtocolError,
    Misdirected,
    NotAttached,
    NotSupported,
    Overloaded,
    SessionLost,
    UnknownType,
    Unparsable,
)
from ..json_text import is_readable
from ..labels import NO_LABELS
from ..shards import check_shard
from .effects import (
    AnswerRead,
    Effect,
    FindSession,
    Hibernate,
    ReadPushes,
    ReadReplies,
    RecordError,
    RunRequest,
    Stored,
)
from .envelope import Envelope, Malformed, is_sid, read_assembled, read_frame, write_envelope
from .messages import (
    ACK_DATA,
    GROUP_DATA,
    MUTATING,
    OPEN_DATA,
    PART_DATA,
    READS,
    RESUME_DATA,
    REWARDS_DATA,
    STATE_DATA,
    read_data,
)
from .parts import Allowance, Whole
from .records import EncodedReply, EndReason, ReadKind, RecordedReply
from .server_attach import Attachments
from .server_output import Output
from .server_requests import Requests
from .server_session import AttachRequest, Message, ServerConfig, ServerConnection, ServerSession, optional
from .state import Action, Event, Role, State, transition


class _Method(Struct, gc=False):
    method: str


_NOTHING: tuple[Effect, ...] = ()

_METHOD = msgspec.json.Decoder(_Method)


class ServerProtocol:
    """The state machine of all multiplexed sessions of one environment path.

    Its methods return the effects that the shell has to perform next, in order. ``now`` is in seconds, on any clock
    that never goes back; the same clock in all calls.

    Args:
        config: Limits and mode.
        attached: Called with each session that gets a socket and had none, or has none any more: detached, or ended.
    """

    def __init__(
        self, config: ServerConfig | None = None, attached: Callable[[ServerSession], None] = lambda session: None
    ) -> None:
        self.config = config or ServerConfig()
        self._out = Output()
        self._requests = Requests(self.config, self._out)
        self._attachments = Attachments(self.config, self._out, self._message, attached)
        self._connections: dict[ServerConnection, None] = {}  # a dict, because its order is the same in every process

    def refuse(self, why: ErrataError | None) -> None:
        """Refuse all new requests with an error, e.g. JOURNAL_UNAVAILABLE, until called with None.

        Raises:
            LocalProtocolError: The error's code consumes ids, so that it would have to be recorded.
        """
        if why is not None and CODES[why.code].consumes_id:
            raise LocalProtocolError(f"{why.code} consumes ids and cannot refuse them")
        self._requests.refuse_with = why

    @property
    def sessions(self) -> int:
        """Number of sessions in memory."""
        return len(self._attachments.sessions)

    def in_memory(self) -> Iterable[ServerSession]:
        """Return all sessions in memory."""
        return self._attachments.sessions.values()

    def session(self, sid: str) -> ServerSession | None:
        """Return the session with this sid if it is in memory, regardless of its owner; None otherwise."""
        return self._attachments.sessions.get(sid)

    # -- sockets ----------------------------------------------------------------------------------------------

    def connect(
        self, principal: str | None = None, handle: object = None, unfinished: Allowance | None = None
    ) -> ServerConnection:
        """Add a new socket.

        Args:
            principal: Who opened it; None without authentication.
            handle: The shell's object for it.
            unfinished: Limits the bytes of unfinished messages, together with the principal's other sockets.
        """
        connection = ServerConnection(self.config, principal, handle, unfinished)
        self._connections[connection] = None
        return connection

    def disconnect(self, connection: ServerConnection, now: float) -> list[Effect]:
        """Called when a socket is closed: its sessions are detached, and their admitted requests go on."""
        self._connections.pop(connection, None)
        connection.assembly.clear()
        self._attachments.disconnect(connection, now)
        return self._out.take()

    def receive(
        self, connection: ServerConnection, frame: bytes | str, now: float, *, shallow: bool = False
    ) -> list[Effect]:
        """Process a frame. It never raises: what is wrong in it is answered with an error.

        Args:
            connection: The socket that it came from.
            frame: A complete WebSocket message.
            now: Time in seconds.
            shallow: Whether it is known to nest no deeper than an envelope may.
        """
        limits = self.config.limits
        try:
            elements = read_frame(frame, max_bytes=limits.max_frame, max_elements=limits.max_elements, shallow=shallow)
        except (Unparsable, FrameTooLarge) as error:
            self._out.error(connection, error)
            return self._out.take()
        connection.envelopes += len(elements)
        sessions = connection.sessions
        for index, element in enumerate(elements):
            if isinstance(element, Malformed):
                self._out.error(connection, element.error, element.sid, id=element.id, q=element.q, index=index)
                continue
            envelope, data = element
            # A short path for nearly all of the traffic: the table's ATTACHED x MESSAGE -> ADMIT.
            if (
                (envelope.type == "step" or envelope.type == "reset")
                and envelope.id is not UNSET
                and envelope.q is UNSET
            ):
                session = sessions.get(envelope.sid)  # type: ignore[arg-type] # None and UNSET are never keys
                if session is not None and session.connection is connection and session.state is State.ATTACHED:
                    self._requests.admit(session, connection, envelope, data, now)
                    continue
            self._handle(connection, envelope, data, index, now)
        return self._out.take()

    def frame_discarded(self, connection: ServerConnection, why: FrameTooLarge | Overloaded) -> list[Effect]:
        """Called when the shell discarded a frame unread: its sender gets ``why`` as an error."""
        self._out.error(connection, why)
        return self._out.take()

    def _check_ours(self) -> None:
        """Refuse to attach sessions while another server may have them.

        Raises:
            JournalUnavailable: Another server may.
        """
        if self.config.check_ours is not None:
            self.config.check_ours()

    def _handle(self, connection: ServerConnection, envelope: Envelope, data: bytes, index: int, now: float) -> None:
        """Process one envelope; what is wrong with it is answered with an error that has its ``index``."""
        sid, id, q = optional(envelope.sid), optional(envelope.id), optional(envelope.q)
        try:
            if sid is not None and not is_sid(sid):
                sid = None
                raise InvalidEnvelope("sid is 21 to 128 characters of A-Z a-z 0-9 _ -: pick 122 random bits")
            if sid is not None:
                check_shard(self.config.shard, sid, member=self.config.member)
            match envelope.type:
                case "open":
                    _address(envelope, "sid")
                    self._check_ours()
                    asked = read_data(OPEN_DATA, data)
                    self._attachments.attach(
                        AttachRequest(
                            connection,
                            sid,
                            asked.key,
                            True,
                            asked.group,
                            0,
                            0,
                            asked.fence,
                            optional(envelope.labels) or NO_LABELS,
                        ),
                        now,
                    )
                case "resume":
                    _address(envelope)
                    entries = read_data(RESUME_DATA, data)
                    if not entries:
                        raise InvalidEnvelope("resume names no session: data lists {sid, key, last, last_seq}")
                    for entry in entries:
                        try:
                            check_shard(self.config.shard, entry.sid, member=self.config.member)
                            self._check_ours()
                        except (Misdirected, SessionLost, JournalUnavailable) as error:
                            self._out.error(connection, error, entry.sid)
                            continue
                        last, seq, fence = entry.last, entry.last_seq, entry.fence
                        self._attachments.attach(
                            AttachRequest(connection, entry.sid, entry.key, False, None, last, seq, fence), now
                        )
                case "part":
                    piece = read_data(PART_DATA, data)
                    whole = connection.assembly.add((sid, id, q), piece.n, piece.of, piece.text)
                    if whole is not None:
                        self._handle_assembled(connection, sid, whole, index, now)
                case "capabilities" | "close_group":
                    self._read(None, Message(connection, envelope, data, index))
                case known if known in MUTATING or known in READS or known in ("cancel", "ack"):
                    self._message(Message(connection, envelope, data, index), now)
                case other:
                    unknown = UnknownType(f"unknown message type {other[:40]!r}")
                    self._out.error(connection, unknown, sid, id=id, q=q, index=index)
        except (Misdirected, SessionLost, JournalUnavailable) as error:  # its session is another server's, or may be
            self._out.error(connection, error, sid, id=id, q=q)
        except (InvalidEnvelope, FrameTooLarge, Overloaded) as error:
            self._out.error(connection, error, sid, id=id, q=q, index=index)

    def _handle_assembled(
        self, connection: ServerConnection, sid: str | None, whole: Whole, index: int, now: float
    ) -> None:
        """Process an envelope that was assembled from parts.

        Args:
            connection: The socket that the parts came from.
            sid: Session that the parts address; None where they address none.
            whole: The envelope, with its values and levels.
            index: Index of the last part in its frame; errors are sent with it.
            now: Time in seconds.

        Raises:
            InvalidEnvelope: The envelope cannot be read, is another session's than its parts, or is a part itself.
        """
        element = read_assembled(whole.text, whole.values, max_bytes=self.config.limits.max_frame)
        if isinstance(element, Malformed):
            raise element.error
        envelope = element[0]
        if envelope.type == "part":
            raise InvalidEnvelope("parts of a part")
        if sid is not None and optional(envelope.sid) != sid:
            raise InvalidEnvelope("the parts of one session make an envelope of another, or of none")
        self._handle(connection, element[0], element[1], index, now)

    # -- sessions -----------------------------------------------------------------------------------------------

    def found(self, effect: FindSession, stored: Stored, now: float) -> list[Effect]:
        """Attach a session to the socket that asked for it, or report to the client that it has ended.

        If that socket is lost, or its attach is refused, the session stays in memory, detached. Messages for the
        session that waited for the outcome are then processed.

        Args:
            effect: The effect that the shell carried out: it found the session or created it.
            stored: The session's state in the journal.
            now: Current time, in seconds of a monotonic clock.

        Returns:
            The effects to carry out next.

        Raises:
            LocalProtocolError: The session was not being looked up.
        """
        self._attachments.found(effect, stored, now)
        return self._out.take()

    def find_failed(self, effect: FindSession, error: ErrataError, now: float) -> list[Effect]:
        """Send the error to the client that asked for a session that the shell could not find or create.

        Messages for the session that waited for the outcome are then processed.

        Args:
            effect: The effect that the shell could not carry out.
            error: The reason. A `SessionLost` is sent with one text for an unknown sid, a wrong key and another
                principal.
            now: Current time, in seconds of a monotonic clock.

        Returns:
            The effects to carry out next.

        Raises:
            LocalProtocolError: The session was not being looked up.
        """
        self._attachments.find_failed(effect, error, now)
        return self._out.take()

    def tick(self, now: float) -> list[Effect]:
        """Hibernate the sessions that were detached for ``detach_ttl``; called at the time of `next_timer`."""
        self._attachments.tick(now)
        return self._out.take()

    def next_timer(self) -> float | None:
        """Return the time at which to call `tick`, None if nothing is scheduled."""
        return self._attachments.next_timer()

    def hibernated(self, effect: Hibernate, now: float) -> list[Effect]:
        """Remove a session from memory because the shell has closed its environment.

        Messages that came for the session meanwhile are then processed; for a resume, the shell is asked to look the
        session up. Ignored if the session is no longer being hibernated.

        Args:
            effect: The effect that the shell carried out.
            now: Current time, in seconds of a monotonic clock.

        Returns:
            The effects to carry out next.
        """
        self._attachments.hibernated(effect, now)
        return self._out.take()

    def ended(self, sid: str, reason: EndReason, now: float) -> list[Effect]:
        """Called when the shell ended a session: it was closed with its group, it expired, or it is lost.

        Ignored if the session is not in memory.
        """
        session = self.session(sid)
        if session is not None:
            self._attachments.end(session, reason, send_detached=True, now=now)
        return self._out.take()

    def go_away(self, retry_after_s: float) -> list[Effect]:
        """Send ``goaway`` on every open connection, and admit no more requests on any connection.

        New requests are refused with OVERLOADED, also on connections that are opened later; those get no ``goaway``.
        Requests that were admitted before are completed and answered. Opens and resumes are served as before; so are
        reads, unless the attach of their session is in progress. The shell closes the connections.

        Args:
            retry_after_s: Seconds after which clients are to connect again; sent in ``goaway`` and in refusals.

        Returns:
            The effects to carry out next.
        """
        self._requests.going_away_s = retry_after_s
        for connection in self._connections:
            message = write_envelope({"type": "goaway"}, b'{"retry_after":%s}' % str(retry_after_s).encode())
            self._out.send(connection, "", message)
        return self._out.take()

    # -- requests ---------------------------------------------------------------------------------------------

    def _message(self, message: Message, now: float) -> None:
        connection, envelope = message.connection, message.envelope
        _check_address(envelope, message.data)
        sid: str = envelope.sid  # type: ignore[assignment] # checked
        session = connection.sessions.get(sid)
        if session is not None and session.connection is not connection and session.state is State.ATTACHED:
            session = None
        state = State.ABSENT if session is None else session.state
        step = transition(Role.SERVER, state, Event.MESSAGE)
        if step.action is Action.REFUSE_UNATTACHED or session is None:
            refusal = NotAttached("this socket does not speak for the session: open or resume it first")
            self._out.error(connection, refusal, sid, id=optional(envelope.id), q=optional(envelope.q))
        elif step.action is Action.PARK:
            if self._refuse_if_full(session, len(session.parked), message):
                return
            connection.in_flight += 1
            session.parked.append(message)
        elif envelope.type == "cancel":
            for pending in session.queue[1:]:
                pending.cancelled = pending.cancelled or pending.id == envelope.id
        elif envelope.type == "ack":
            ack = read_data(ACK_DATA, message.data)
            if ack.last > session.last_done or ack.last_seq > session.seq:
                raise InvalidEnvelope(f"nothing was sent after id {session.last_done} and seq {session.seq}")
            self._attachments.acknowledge(session, ack.last, ack.last_seq)
        elif envelope.q is not UNSET:
            self._read(session, message)
        else:
            self._requests.admit(session, connection, envelope, message.data, now)

    def _refuse_if_full(self, session: ServerSession, used: int, message: Message) -> bool:
        """Answer a message that cannot be admitted with its error (PROTOCOL D5, D9); return whether it was refused."""
        refusal = self._requests.refusal(used, message.connection)
        if refusal is None:
            return False
        id, q = optional(message.envelope.id), optional(message.envelope.q)
        self._out.error(message.connection, refusal, session.sid, id=id, q=q)
        return True

    # -- outcomes ---------------------------------------------------------------------------------------------

    def drained(self, connection: ServerConnection) -> list[Effect]:
        """Called when a socket with `ServerConnection.has_waiting_replies` accepts input again: sends those replies."""
        self._requests.drained(connection)
        return self._out.take()

    def completed(self, effect: RunRequest | RecordError, reply: EncodedReply, now: float) -> Sequence[Effect]:
        """Called when a request and its reply are committed: sends the reply and starts the session's next request.

        Raises:
            LocalProtocolError: The request is not the one that is running.
        """
        self._requests.completed(effect, reply, now)
        session = effect.session
        if reply.type == "closed" and session.state is not State.ABSENT:
            self._attachments.end(session, "closed", send_detached=False, now=now)
        return self._out.take() if self._out.effects else _NOTHING

    def rejected(self, effect: RunRequest, error: ErrataError) -> list[Effect]:
        """Called when a request had no effect and nothing was recorded: its id is the session's next one again.

        Raises:
            LocalProtocolError: The error's code consumes the id: it has to be committed and `completed`.
        """
        self._requests.rejected(effect, error)
        return self._out.take()

    def replies_read(self, effect: ReadReplies, replies: Sequence[RecordedReply]) -> list[Effect]:
        """Called with committed replies that the shell read.

        Args:
            effect: The effect that asked for them.
            replies: One for each id, in order; its ``reply`` is None if the journal no longer keeps it.
        """
        self._requests.replies_read(effect, replies)
        return self._out.take()

    def pushed(self, sid: str, seq: int, data: bytes) -> list[Effect]:
        """Called when a late reward is committed as push ``seq``; ignored if the session is not in memory."""
        session = self._attachments.sessions.get(sid)
        if session is not None:
            self._requests.pushed(session, seq, data)
        return self._out.take()

    def pushes_read(self, effect: ReadPushes, pushes: Sequence[tuple[int, bytes]]) -> list[Effect]:
        """Called with committed pushes that the shell read: (seq, data) in order, without those of deleted episodes."""
        self._requests.pushes_read(effect, pushes)
        return self._out.take()

    # -- reads ------------------------------------------------------------------------------------------------

    def _read(self, session: ServerSession | None, message: Message) -> None:
        """Check a read and ask the shell to answer it; at the limit of the socket it is refused with OVERLOADED."""
        connection, envelope, data = message.connection, message.envelope, message.data
        kind: ReadKind = envelope.type  # type: ignore[assignment] # only reads come here
        _address(
            envelope, *(() if session is None else ("sid",)), "q", optional=("sid",) if kind == "capabilities" else ()
        )
        q: int = envelope.q  # type: ignore[assignment] # checked
        fields: dict[str, object] = {}
        if kind == "state":
            fields = read_data(STATE_DATA, data).model_dump(exclude_none=True)
            if self.config.production and fields:
                self._out.error(connection, NotSupported("no state(t) in production mode"), optional(envelope.sid), q=q)
                return
        elif kind == "rewards":
            fields = read_data(REWARDS_DATA, data).model_dump(exclude_none=True)
        elif kind == "close_group":
            fields = read_data(GROUP_DATA, data).model_dump()
        if connection.in_flight >= self.config.limits.in_flight_socket:
            full = Overloaded("too much is in flight on this socket", retry_after=self.config.retry_after_s)
            self._out.error(connection, full, optional(envelope.sid), q=q)
            return
        connection.in_flight += 1
        self._out.effects.append(AnswerRead(connection, session, q, kind, data, fields))

    def read_answered(self, effect: AnswerRead, reply: EncodedReply) -> list[Effect]:
        """Called with the answer to a read; ``reply.type`` is ``error`` if it failed."""
        effect.connection.in_flight -= 1
        self._out.answer(effect.connection, effect.session.sid if effect.session else None, effect.q, reply)
        return self._out.take()


_Field = Literal["sid", "id", "q"]


def _address(envelope: Envelope, *needed: _Field, optional: tuple[_Field, ...] = ()) -> None:
    """Check that a message has the fields ``needed`` of sid, id and q, and no others but those in ``optional``.

    Raises:
        InvalidEnvelope: One is missing, or one is not allowed.
    """
    for name in ("sid", "id", "q"):
        value = getattr(envelope, name)
        if name in needed and (value is UNSET or value is None):
            raise InvalidEnvelope(f"{envelope.type[:40]} needs {name}")
        if name not in needed and name not in optional and value is not UNSET and value is not None:
            raise InvalidEnvelope(f"{envelope.type[:40]} has no {name}")


def _check_address(envelope: Envelope, data: bytes) -> None:
    """Check that a message to a session has the address that its type needs; mcp has an id for tools/call, else q."""
    kind = envelope.type
    if kind == "mcp":
        try:
            calls = _METHOD.decode(data).method == "tools/call"
        except msgspec.DecodeError:  # half of a surrogate pair is refused by who reads the data, under either address
            calls = envelope.id is not UNSET and not is_readable(data)
        _address(envelope, "sid", "id" if calls else "q")
    elif kind == "ack":
        _address(envelope, "sid")
    elif kind in READS:
        _address(envelope, "sid", "q")
    else:
        _address(envelope, "sid", "id")
