"""The server's side of the multiplexed socket, without sockets (PROTOCOL D).

The shell feeds it frames and outcomes and performs the `effects` it returns:

    connection = protocol.connect(principal)
    for effect in protocol.receive(connection, frame, now): ...     Find, Run, Read, Recall, Write, ...
    for effect in protocol.completed(run, reply, now): ...          the reply leaves, the next request starts

All of it is in memory and can be lost at any time: what a session was is then found in the journal, by `effects.Find`.

Decisions that PROTOCOL D states:

- One request of a session runs at a time, and the next one starts when its reply is committed. ``if``, cancel and
  ``deadline_ms`` are decided when its turn comes; each of these outcomes is recorded, in order, like a reply.
- An open of a session that exists is a resume that acknowledges nothing; replies it acknowledged before stay forgotten.
- A resume that acknowledges an id that was never answered meets a journal that lost its end: SESSION_LOST, and the
  session stays as it is.
- A wrong key, a foreign principal and an unknown sid take one path: hash, compare with something, `effects.Find`.
- A session that is over is told by its error to whoever resumes it with its key, and then the replies it missed.
- ``detach_ttl`` counts from the last recorded reply or from the detaching, whichever is later.
- A reply without a record (`rejected`) gives the id back: everything queued behind it is OUT_OF_ORDER.
- The type of a request belongs to what PROTOCOL D4 compares, ``if`` and ``deadline_ms`` do not. For forks only the
  bytes are compared, since the key of the child is not kept.
- A resume of no session is INVALID_ENVELOPE. CAPACITY_REACHED without ``retry_after``: it does not help to wait.
- mcp with ``id`` is tools/call, and nothing else is; a fork does not attach its child.
- A fork whose child has a sid that is taken, by whomever, is VALIDATION_ERROR and recorded. CONFLICT is never a
  recorded reply: it consumes no id, and says that the id is another request's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct

from ..errors import (
    CODES,
    ErrataError,
    FrameTooLarge,
    InvalidEnvelope,
    LocalProtocolError,
    NotAttached,
    NotSupported,
    Overloaded,
    UnknownType,
    Unparsable,
)
from .effects import Effect, Find, Hibernate, Read, Recall, RecallPushes, Record, Run, Stored
from .envelope import Envelope, Malformed, is_sid, read_frame, write_envelope
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
from .parts import Allowance
from .records import EndReason, ReadKind, Recorded, Reply
from .server_attach import Attachments
from .server_output import Out
from .server_requests import Requests
from .server_session import Arrival, Message, ServerConfig, ServerConnection, ServerSession, optional
from .state import Action, Event, Role, State, transition


class _Method(Struct, gc=False):
    method: str


_METHOD = msgspec.json.Decoder(_Method)


class ServerProtocol:
    """All mux sessions of one environment path.

    Args:
        config: Limits and mode.
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        self._out = Out()
        self._requests = Requests(self.config, self._out)
        self._attachments = Attachments(self.config, self._out, self._message)
        self._connections: dict[ServerConnection, None] = {}  # in order: a set's is another in each process

    def refuse(self, why: ErrataError | None) -> None:
        """Refuse everything that would be admitted, e.g. with JOURNAL_UNAVAILABLE, until called with None.

        Raises:
            LocalProtocolError: The error's code would consume ids.
        """
        if why is not None and CODES[why.code].consumes_id:
            raise LocalProtocolError(f"{why.code} consumes ids and cannot refuse them")
        self._requests.refusing = why

    @property
    def sessions(self) -> int:
        """Sessions in memory."""
        return len(self._attachments.sessions)

    def in_memory(self) -> Iterable[ServerSession]:
        """Return all sessions in memory."""
        return self._attachments.sessions.values()

    def session(self, sid: str) -> ServerSession | None:
        """Return a session in memory, whoever's it is."""
        return self._attachments.sessions.get(sid)

    # -- sockets ----------------------------------------------------------------------------------------------

    def connect(
        self, principal: str | None = None, handle: object = None, unfinished: Allowance | None = None
    ) -> ServerConnection:
        """Take a new socket.

        Args:
            principal: Who opened it.
            handle: The shell's own object for it.
            unfinished: Bounds the parts of unfinished messages, together with the principal's other sockets.
        """
        connection = ServerConnection(self.config, principal, handle, unfinished)
        self._connections[connection] = None
        return connection

    def disconnect(self, connection: ServerConnection, now: float) -> list[Effect]:
        """Let go of a socket; its sessions are detached, and what was admitted runs on."""
        self._connections.pop(connection, None)
        connection.assembly.clear()
        self._attachments.disconnect(connection, now)
        return self._out.take()

    def receive(self, connection: ServerConnection, frame: bytes | str, now: float) -> list[Effect]:
        """Take a frame. Nothing a client sends raises: whatever is wrong is answered.

        Args:
            connection: Where it came from.
            frame: The message, whole.
            now: Seconds, in any clock that does not go back.
        """
        limits = self.config.limits
        try:
            elements = read_frame(frame, max_bytes=limits.max_frame, max_elements=limits.max_elements)
        except (Unparsable, FrameTooLarge) as error:
            self._out.error(connection, error)
            return self._out.take()
        sessions = connection.sessions
        for index, element in enumerate(elements):
            if isinstance(element, Malformed):
                self._out.error(connection, element.error, element.sid, id=element.id, q=element.q, index=index)
                continue
            envelope, data = element
            # The table's ATTACHED x MESSAGE -> ADMIT for what is nearly all of the traffic.
            if (
                (envelope.type == "step" or envelope.type == "reset")
                and envelope.id is not UNSET
                and envelope.q is UNSET
            ):
                session = sessions.get(envelope.sid)  # type: ignore[arg-type] # None and UNSET are never keys
                if session is not None and session.connection is connection and session.state is State.ATTACHED:
                    self._requests.admit(session, connection, envelope, data, now)
                    continue
            self._take(connection, envelope, data, index, now)
        return self._out.take()

    def unread(self, connection: ServerConnection, why: FrameTooLarge | Overloaded) -> list[Effect]:
        """Take that a frame came that the shell did not keep; its sender is told ``why``."""
        self._out.error(connection, why)
        return self._out.take()

    def _take(self, connection: ServerConnection, envelope: Envelope, data: bytes, index: int, now: float) -> None:
        sid, id, q = optional(envelope.sid), optional(envelope.id), optional(envelope.q)
        try:
            if sid is not None and not is_sid(sid):
                sid = None
                raise InvalidEnvelope("sid is 21 to 128 characters of A-Z a-z 0-9 _ -: pick 122 random bits")
            match envelope.type:
                case "open":
                    _address(envelope, "sid")
                    said = read_data(OPEN_DATA, data)
                    self._attachments.arrive(
                        Arrival(connection, sid, said.key, True, said.group, 0, 0, said.fence), now
                    )
                case "resume":
                    _address(envelope)
                    entries = read_data(RESUME_DATA, data)
                    if not entries:
                        raise InvalidEnvelope("resume names no session: data lists {sid, key, last, last_seq}")
                    for entry in entries:
                        last, seq, fence = entry.last, entry.last_seq, entry.fence
                        self._attachments.arrive(
                            Arrival(connection, entry.sid, entry.key, False, None, last, seq, fence), now
                        )
                case "part":
                    piece = read_data(PART_DATA, data)
                    whole = connection.assembly.add((sid, id, q), piece.n, piece.of, piece.text)
                    if whole is not None:
                        self._take_whole(connection, whole, index, now)
                case "capabilities" | "close_group":
                    self._read(None, Message(connection, envelope, data, index))
                case known if known in MUTATING or known in READS or known in ("cancel", "ack"):
                    self._message(Message(connection, envelope, data, index), now)
                case other:
                    unknown = UnknownType(f"unknown message type {other[:40]!r}")
                    self._out.error(connection, unknown, sid, id=id, q=q, index=index)
        except (InvalidEnvelope, FrameTooLarge, Overloaded) as error:
            self._out.error(connection, error, sid, id=id, q=q, index=index)

    def _take_whole(self, connection: ServerConnection, whole: bytes, index: int, now: float) -> None:
        """Take an envelope that came in parts."""
        try:
            elements = read_frame(whole, max_bytes=self.config.limits.max_frame, max_elements=1)
        except (Unparsable, FrameTooLarge) as error:
            raise InvalidEnvelope(f"the parts make no envelope: {error}") from error
        (element,) = elements
        if isinstance(element, Malformed):
            raise element.error
        if element[0].type == "part":
            raise InvalidEnvelope("parts of a part")
        self._take(connection, element[0], element[1], index, now)

    # -- sessions -----------------------------------------------------------------------------------------------

    def found(self, effect: Find, stored: Stored, now: float) -> list[Effect]:
        """Take a session that the shell found or made."""
        self._attachments.found(effect, stored, now)
        return self._out.take()

    def refused(self, effect: Find, error: ErrataError, now: float) -> list[Effect]:
        """Take that the shell neither found nor made a session."""
        self._attachments.refused(effect, error, now)
        return self._out.take()

    def tick(self, now: float) -> list[Effect]:
        """Hibernate what has been detached for long enough; see `next_timer`."""
        self._attachments.tick(now)
        return self._out.take()

    def next_timer(self) -> float | None:
        """Return when to call `tick`, None if nothing waits."""
        return self._attachments.next_timer()

    def slept(self, effect: Hibernate, now: float) -> list[Effect]:
        """Take that a session's environment is closed: it is the journal's now."""
        self._attachments.slept(effect, now)
        return self._out.take()

    def ended(self, sid: str, reason: EndReason, now: float) -> list[Effect]:
        """Take that a session is over for a reason of the shell's: closed by its group, expired, lost."""
        session = self.session(sid)
        if session is not None:
            self._attachments.bury(session, reason, told=True, now=now)
        return self._out.take()

    def go_away(self, retry_after_s: float) -> list[Effect]:
        """Ask every client to finish and to connect again later; nothing new is admitted."""
        self._requests.leaving = retry_after_s
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
            if self._full(session, len(session.parked), message):
                return
            connection.in_flight += 1
            session.parked.append(message)
        elif envelope.type == "cancel":
            for pending in session.queue[1:]:
                pending.cancelled = pending.cancelled or pending.id == envelope.id
        elif envelope.type == "ack":
            ack = read_data(ACK_DATA, message.data)
            if ack.last > session.done or ack.last_seq > session.seq:
                raise InvalidEnvelope(f"nothing was sent after id {session.done} and seq {session.seq}")
            self._attachments.acknowledge(session, ack.last, ack.last_seq)
        elif envelope.q is not UNSET:
            self._read(session, message)
        else:
            self._requests.admit(session, connection, envelope, message.data, now)

    def _full(self, session: ServerSession, used: int, message: Message) -> bool:
        """Refuse a message over the bounds of its session or socket, or while nothing is admitted (PROTOCOL D5, D9)."""
        refusal = self._requests.refusal(used, message.connection)
        if refusal is None:
            return False
        id, q = optional(message.envelope.id), optional(message.envelope.q)
        self._out.error(message.connection, refusal, session.sid, id=id, q=q)
        return True

    # -- outcomes ---------------------------------------------------------------------------------------------

    def drained(self, connection: ServerConnection) -> list[Effect]:
        """Take that a socket that `ServerConnection.holds_back` accepts input again."""
        self._requests.drained(connection)
        return self._out.take()

    def completed(self, effect: Run | Record, reply: Reply, now: float) -> list[Effect]:
        """Take that a request and its reply are committed; the reply leaves, and the next request starts."""
        self._requests.completed(effect, reply, now)
        session = effect.session
        if reply.type == "closed" and session.state is not State.ABSENT:
            self._attachments.bury(session, "closed", told=False, now=now)
        return self._out.take()

    def rejected(self, effect: Run, error: ErrataError) -> list[Effect]:
        """Take that a request had no effect and nothing was recorded: its id is the next one again.

        Raises:
            LocalProtocolError: The error's code consumes the id: it has to be committed and `completed`.
        """
        self._requests.rejected(effect, error)
        return self._out.take()

    def recalled(self, effect: Recall, replies: Sequence[Recorded]) -> list[Effect]:
        """Take committed replies.

        Args:
            effect: What was asked for.
            replies: One for each id, in order; ``reply`` None where it is kept no longer.
        """
        self._requests.recalled(effect, replies)
        return self._out.take()

    def pushed(self, sid: str, seq: int, data: bytes) -> list[Effect]:
        """Take a late reward that was committed under ``seq``."""
        session = self._attachments.sessions.get(sid)
        if session is not None:
            self._requests.pushed(session, seq, data)
        return self._out.take()

    def pushes_recalled(self, effect: RecallPushes, pushes: Sequence[tuple[int, bytes]]) -> list[Effect]:
        """Take committed pushes, in order of seq; those of deleted episodes are left out."""
        self._requests.pushes_recalled(effect, pushes)
        return self._out.take()

    # -- reads ------------------------------------------------------------------------------------------------

    def _read(self, session: ServerSession | None, message: Message) -> None:
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
        self._out.effects.append(Read(connection, session, q, kind, data, fields))

    def answered(self, effect: Read, reply: Reply) -> list[Effect]:
        """Take the answer to a read; ``reply.type`` is ``error`` where it failed."""
        effect.connection.in_flight -= 1
        self._out.answer(effect.connection, effect.session.sid if effect.session else None, effect.q, reply)
        return self._out.take()


_Field = Literal["sid", "id", "q"]


def _address(envelope: Envelope, *needed: _Field, optional: tuple[_Field, ...] = ()) -> None:
    """Check which of sid, id and q a message has.

    Raises:
        InvalidEnvelope: One is missing or does not belong there.
    """
    for name in ("sid", "id", "q"):
        value = getattr(envelope, name)
        if name in needed and (value is UNSET or value is None):
            raise InvalidEnvelope(f"{envelope.type[:40]} needs {name}")
        if name not in needed and name not in optional and value is not UNSET and value is not None:
            raise InvalidEnvelope(f"{envelope.type[:40]} has no {name}")


def _check_address(envelope: Envelope, data: bytes) -> None:
    kind = envelope.type
    if kind == "mcp":
        try:
            calls = _METHOD.decode(data).method == "tools/call"
        except msgspec.DecodeError:
            calls = False
        _address(envelope, "sid", "id" if calls else "q")
    elif kind == "ack":
        _address(envelope, "sid")
    elif kind in READS:
        _address(envelope, "sid", "q")
    else:
        _address(envelope, "sid", "id")
