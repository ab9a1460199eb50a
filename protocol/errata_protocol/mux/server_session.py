"""What the server's machine keeps of a socket and of a session, and how recorded replies leave.

Replies of a session leave strictly in order of id on each attachment. A few are kept at hand; older ones are the
journal's, and `Recall` asks for them, one range at a time, while newer ones wait behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct

from ..capabilities import ServerLimits
from ..errors import ErrataError
from ..payload import canonical
from .envelope import Condition, Envelope
from .parts import Allowance, Assembly, Outbox
from .records import EndReason, ForkRequest, Recorded, RequestKind
from .state import State

if TYPE_CHECKING:
    from .effects import Recall, RecallPushes

RECALLED_AT_ONCE = 16
"""Replies in one `Recall`."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server's machine is set up.

    Args:
        limits: What is advertised in capabilities.
        retry_after_s: What OVERLOADED tells.
        kept_replies: Replies of a session kept in memory; the journal has all.
        kept_bytes: Likewise in bytes of payload.
        high_water_bytes: While a socket has so much to send, the shell reads nothing from it, and further replies stay
            in the journal.
        held_bytes: Size of the requests of a socket in flight; beyond it OVERLOADED. One alone may be of any size.
        production: No state(t), no fork (PROTOCOL F1).
    """

    limits: ServerLimits = field(default_factory=ServerLimits)
    retry_after_s: float = 0.1
    kept_replies: int = 4
    kept_bytes: int = 16 * 1024
    high_water_bytes: int = 4 * 1024 * 1024
    held_bytes: int = 64 * 1024 * 1024
    production: bool = False


class ServerConnection:
    """One mux socket.

    Args:
        config: Limits.
        principal: Who opened it; None with auth off.
        handle: The shell's own object for it.
        unfinished: Bounds the parts that are held, together with other sockets.
    """

    __slots__ = (
        *("armed", "assembly", "behind", "config", "handle", "held_bytes", "in_flight", "lost", "outbox", "parting"),
        *("principal", "sessions"),
    )

    def __init__(
        self, config: ServerConfig, principal: str | None, handle: object, unfinished: Allowance | None = None
    ) -> None:
        self.config = config
        self.principal = principal
        self.handle = handle
        self.sessions: dict[str, ServerSession] = {}
        """Sessions that it attached or waits for, by sid."""
        self.outbox = Outbox(config.limits.max_elements)
        self.assembly = Assembly(config.limits.max_frame, config.retry_after_s, unfinished)
        self.in_flight = 0
        self.held_bytes = 0
        """Size of the requests in flight that have their session's turn before them."""
        self.behind: dict[str, ServerSession] = {}
        """Sessions with replies due that wait until the socket has room for them, by sid."""
        self.parting: list[tuple[ServerSession, int, Told]] = []
        """Likewise of sessions that are over: each with the next id to recall."""
        self.armed = False
        self.lost = False

    def data_to_send(self, max_bytes: int | None = None) -> list[bytes]:
        """Return frames for the socket; call again while `has_data`, as fast as the socket takes them.

        Args:
            max_bytes: Stop after about so many.
        """
        frames = self.outbox.take(max_bytes)
        self.armed = bool(self.outbox)
        return frames

    @property
    def has_data(self) -> bool:
        """There is more to send."""
        return bool(self.outbox)

    @property
    def holds_back(self) -> bool:
        """Whether the shell has to call `drained` once the socket accepts input."""
        return bool(self.behind or self.parting)

    @property
    def accepts_input(self) -> bool:
        """Whether the shell may read from the socket: not while what it has to send piles up (PROTOCOL D9)."""
        return self.outbox.buffered < self.config.high_water_bytes


class Pending:
    """An admitted request without a reply."""

    __slots__ = ("cancelled", "condition", "connection", "data", "deadline", "fork", "id", "kind", "refusal", "sha")

    def __init__(
        self,
        id: int,
        kind: RequestKind,
        data: bytes,
        sha: bytes,
        connection: ServerConnection,
        condition: Condition | None,
        deadline: float | None,
    ) -> None:
        self.id = id
        self.kind = kind
        self.data = data
        self.sha = sha
        self.connection = connection
        self.condition = condition
        self.deadline = deadline
        self.cancelled = False
        self.fork: ForkRequest | None = None
        self.refusal: ErrataError | None = None

    def hold(self, connection: ServerConnection) -> None:
        """Count it on the socket that speaks for its session now."""
        self.connection = connection
        connection.in_flight += 1
        connection.held_bytes += len(self.data)

    def release(self) -> None:
        """Count it no longer."""
        self.connection.in_flight -= 1
        self.connection.held_bytes -= len(self.data)


class Arrival(Struct, frozen=True):
    """An open or a resume of one session, as it came."""

    connection: ServerConnection
    sid: str
    key: str
    making: bool
    group: str | None
    last: int
    last_seq: int
    fence: int | None


class Message(Struct, frozen=True):
    """Any other message to a session, parked."""

    connection: ServerConnection
    envelope: Envelope
    data: bytes
    index: int


class Asked(Struct, frozen=True):
    """Why a reply is recalled: a request was repeated whose reply had been sent already."""

    connection: ServerConnection
    id: int
    kind: str
    data: bytes
    sha: bytes


class Told(Struct, frozen=True):
    """Why replies are recalled: a session is over, and its owner missed some."""

    connection: ServerConnection
    last: int
    """Id of the last reply."""
    refused: dict[int, ErrataError] = {}
    """What to tell after it, by id: of requests that nobody runs any more."""
    detached: EndReason | None = None
    """And last, unless the client knows by a reply."""


class ServerSession:
    """One session in memory; only `server.ServerProtocol` changes it.

    Args:
        sid: Session id.
        key_hash: `hash_key` of its key.
        principal: Whose it is.
    """

    __slots__ = (
        *("acked", "acked_seq", "connection", "detached_at", "done", "eid", "fence", "group", "handle", "kept"),
        *("kept_bytes", "key_hash", "last_reply_at", "next_id", "origin", "parked", "principal", "queue", "recall"),
        *("inherited", "recall_pushes", "recovery", "sent", "seq", "seq_sent", "sid", "state", "t", "timed"),
    )

    def __init__(self, sid: str, key_hash: bytes, principal: str | None) -> None:
        self.sid = sid
        self.key_hash = key_hash
        self.principal = principal
        self.group: str | None = None
        self.recovery = "none"
        self.handle: Any = None
        """The shell's own object for it."""
        self.state = State.ABSENT
        self.connection: ServerConnection | None = None
        self.origin: Arrival | None = None  # what is being looked for
        self.parked: list[Arrival | Message] = []
        self.fence = 0
        self.next_id = 1
        self.done = 0  # last id with a committed reply
        self.inherited = 0  # last id that was admitted before this attachment, from whichever process
        self.sent = 0  # last id whose reply left on this attachment
        self.acked = 0
        self.queue: list[Pending] = []  # the first one runs
        self.kept: dict[int, Recorded] = {}
        self.kept_bytes = 0
        self.recall: Recall | None = None
        self.eid: str | None = None
        self.t: int | None = None
        self.seq = 0
        self.seq_sent = 0
        self.acked_seq = 0
        self.recall_pushes: RecallPushes | None = None
        self.detached_at = 0.0
        self.last_reply_at = 0.0
        self.timed = False  # it stands in the heap of timers

    def keep(self, recorded: Recorded, config: ServerConfig) -> None:
        """Remember a reply, as far as there is room for it."""
        size = len(recorded.reply.data) if recorded.reply is not None else 0
        self.kept[recorded.id] = recorded
        self.kept_bytes += size
        while len(self.kept) > config.kept_replies or (self.kept_bytes > config.kept_bytes and self.kept):
            self._drop(next(iter(self.kept)))  # the oldest: replies are kept in order of id

    def _drop(self, id: int) -> None:
        dropped = self.kept.pop(id)
        self.kept_bytes -= len(dropped.reply.data) if dropped.reply is not None else 0

    def acknowledge(self, last: int, last_seq: int) -> bool:
        """Forget what the client has; return whether it is more than before: the journal may forget it too."""
        if last <= self.acked and last_seq <= self.acked_seq:
            return False
        self.acked, self.acked_seq = max(self.acked, last), max(self.acked_seq, min(last_seq, self.seq))
        for id in [id for id in self.kept if id <= self.acked]:
            self._drop(id)
        return True

    def position(self) -> bytes:
        """Return the ``data`` of ``opened`` and ``resumed``."""
        return msgspec.json.encode(
            {
                "next_id": self.next_id,
                "eid": self.eid,
                "t": self.t,
                "seq": self.seq,
                "recovery": self.recovery,
                "fence": self.fence,
            }
        )


def same_request(kind: str, sha: bytes, data: bytes, other_kind: str, other_sha: bytes, other: bytes | None) -> bool:
    """Say whether two requests under one id are the same one (PROTOCOL D4).

    Args:
        kind: Type of the one.
        sha: sha256 of its ``data`` as received.
        data: Its ``data``.
        other_kind: Likewise of the other.
        other_sha: Likewise.
        other: Likewise; None where it is not at hand.
    """
    if kind != other_kind:
        return False
    if sha == other_sha:
        return True
    if other is None:
        return False
    try:
        forms = [canonical(msgspec.json.decode(text)) for text in (data, other)]
    except (msgspec.DecodeError, RecursionError):
        return False
    return forms[0] is not None and forms[0] == forms[1]


def optional(value: Any) -> Any:
    """Return None for a field that was not sent."""
    return None if value is UNSET else value
