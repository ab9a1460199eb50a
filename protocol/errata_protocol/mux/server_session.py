"""What the server's state machine keeps of a socket, of a session and of its requests.

On each attachment the replies of a session are sent strictly in order of id. The latest few are kept in memory. Older
ones are read from the journal by `ReadReplies`, one range at a time; newer replies wait until they are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct

from ..capabilities import ServerLimits
from ..errors import ErrataError
from ..fleet import FleetMember
from ..labels import NO_LABELS, Labels
from ..payload import canonical
from .envelope import MAX_DEPTH, Condition, Envelope
from .parts import Allowance, Assembly, Outbox
from .records import EndReason, ForkSpec, RecordedReply, RequestKind
from .state import State

if TYPE_CHECKING:
    from .effects import ReadPushes, ReadReplies

REPLIES_READ_AT_ONCE = 16
"""Replies in one `ReadReplies`."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configuration of the server's machine.

    Args:
        limits: Limits that capabilities advertise.
        retry_after_s: ``retry_after`` of OVERLOADED.
        kept_replies: Replies of a session that are kept in memory; the journal has all of them.
        kept_bytes: Bytes of payload that are kept in memory for a session.
        high_water_bytes: While a socket has this much to send, the shell does not read from it, and further replies are
            left in the journal.
        held_bytes: Total size of the requests in flight on a socket; beyond it requests are refused with OVERLOADED. A
            request alone may have any size.
        production: Refuse state(t) and fork (PROTOCOL F1).
        shard: Name of the data directory, None where it has none; a sid that names another is refused (PROTOCOL F5).
        check_ours: Raises JournalUnavailable while another server may have the sessions: none is attached then. None
            where no other can.
        member: Returns the member that has a shard, as `check_shard` takes it.
    """

    limits: ServerLimits = field(default_factory=ServerLimits)
    retry_after_s: float = 0.1
    kept_replies: int = 1
    kept_bytes: int = 16 * 1024
    high_water_bytes: int = 4 * 1024 * 1024
    held_bytes: int = 64 * 1024 * 1024
    production: bool = False
    shard: str | None = None
    check_ours: Callable[[], None] | None = None
    member: Callable[[str], FleetMember | None] | None = None


class ServerConnection:
    """One multiplexed socket.

    Args:
        config: Limits.
        principal: Who opened it; None without authentication.
        handle: The shell's object for the socket.
        unfinished: Limits the bytes of unfinished messages that it holds together with other sockets.
    """

    __slots__ = (
        *(
            "assembly",
            "blocked",
            "config",
            "ended_sessions",
            "envelopes",
            "handle",
            "held_bytes",
            "in_flight",
            "lost",
            "outbox",
        ),
        *("principal", "sessions", "write_requested"),
    )

    def __init__(
        self, config: ServerConfig, principal: str | None, handle: object, unfinished: Allowance | None = None
    ) -> None:
        self.config = config
        self.principal = principal
        self.handle = handle
        self.sessions: dict[str, ServerSession] = {}
        """Sessions that are attached to it, or about to be, by sid."""
        self.outbox = Outbox(config.limits.max_elements)
        self.assembly = Assembly(config.limits.max_frame, config.retry_after_s, unfinished, levels=MAX_DEPTH)
        self.envelopes = 0
        """Number of envelopes that were read from it."""
        self.in_flight = 0
        self.held_bytes = 0
        """Total size of the requests that are queued or running; reads and repeats are not counted."""
        self.blocked: dict[str, ServerSession] = {}
        """Attached sessions whose replies wait until the socket has room, by sid."""
        self.ended_sessions: list[tuple[ServerSession, int, FinalReplies]] = []
        """Ended sessions whose last replies wait until the socket has room: (session, next id, what to send)."""
        self.write_requested = False
        """The shell got `Write` and has not taken all there is to send."""
        self.lost = False

    def data_to_send(self, max_bytes: int | None = None) -> list[bytes]:
        """Return the next frames to write to the socket; call it again while `has_data`.

        Args:
            max_bytes: Return no further frame once the frames have this many bytes; None for all.
        """
        frames = self.outbox.take(max_bytes)
        self.write_requested = bool(self.outbox)
        return frames

    @property
    def has_data(self) -> bool:
        """Whether there is more to send."""
        return bool(self.outbox)

    @property
    def has_waiting_replies(self) -> bool:
        """Whether replies wait for room: the shell has to call `drained` once `accepts_input` is true again."""
        return bool(self.blocked or self.ended_sessions)

    @property
    def accepts_input(self) -> bool:
        """Whether the shell may read from the socket: false while too much waits to be sent on it (PROTOCOL D9)."""
        return self.outbox.buffered < self.config.high_water_bytes


class Pending(Struct, eq=False, gc=False):
    """An admitted request that has no reply yet."""

    id: int
    kind: RequestKind
    data: bytes
    sha: bytes
    connection: ServerConnection
    condition: Condition | None
    deadline: float | None
    cancelled: bool = False
    fork: ForkSpec | None = None
    refusal: ErrataError | None = None
    labels: Labels | None = None

    def count_on(self, connection: ServerConnection) -> None:
        """Count the request as in flight on ``connection``, the socket of its session."""
        self.connection = connection
        connection.in_flight += 1
        connection.held_bytes += len(self.data)

    def uncount(self) -> None:
        """Count the request as in flight no longer."""
        self.connection.in_flight -= 1
        self.connection.held_bytes -= len(self.data)


class AttachRequest(Struct, frozen=True):
    """An open of a session, or one entry of a resume."""

    connection: ServerConnection
    sid: str
    key: str
    make: bool
    group: str | None
    last: int
    last_seq: int
    fence: int | None
    labels: Labels = NO_LABELS


class Message(Struct, frozen=True):
    """A message to a session, with the socket that it came from."""

    connection: ServerConnection
    envelope: Envelope
    data: bytes
    index: int


class RepeatedRequest(Struct, frozen=True):
    """A request whose id was used before; its recorded reply is read from the journal."""

    connection: ServerConnection
    id: int
    kind: str
    data: bytes
    sha: bytes


class FinalReplies(Struct, frozen=True):
    """What a socket is still sent of a session that ended: missed replies up to ``last``, then errors, then
    ``detached``."""

    connection: ServerConnection
    last: int
    """Id of the last reply."""
    errors: dict[int, ErrataError] = {}
    """Errors for requests that are no longer executed, by id."""
    detached: EndReason | None = None
    """Reason of the ``detached`` message; None to send none."""


class ServerSession:
    """One session in memory; only `server.ServerProtocol` changes it.

    Args:
        sid: Session id.
        key_hash: `hash_key` of its key.
        principal: Its owner; None without authentication.
    """

    __slots__ = (
        *("acked", "acked_seq", "attach_request", "connection", "detached_at", "eid", "fence", "group", "handle"),
        *("has_timer", "kept", "kept_bytes", "key_hash", "last_before_attach", "last_done", "last_reply_at"),
        *("labels", "last_sent", "last_seq_sent", "next_id", "parked", "principal", "queue", "reading_pushes"),
        *("reading_replies", "recovery", "seq", "sid", "state", "t"),
    )

    def __init__(self, sid: str, key_hash: bytes, principal: str | None) -> None:
        self.sid = sid
        self.key_hash = key_hash
        self.principal = principal
        self.group: str | None = None
        self.labels = NO_LABELS
        self.recovery = "none"
        self.handle: Any = None
        """The shell's object for the session."""
        self.state = State.ABSENT
        self.connection: ServerConnection | None = None
        self.attach_request: AttachRequest | None = None  # what the shell looks the session up for
        self.parked: list[AttachRequest | Message] = []
        self.fence = 0
        self.next_id = 1
        self.last_done = 0  # last id with a committed reply
        self.last_before_attach = 0  # last id that was admitted before this attachment, from any process
        self.last_sent = 0  # last id whose reply was sent on this attachment
        self.acked = 0
        self.queue: list[Pending] = []  # admitted requests; the first one is running
        self.kept: dict[int, RecordedReply] = {}
        self.kept_bytes = 0
        self.reading_replies: ReadReplies | None = None
        self.eid: str | None = None
        self.t: int | None = None
        self.seq = 0
        self.last_seq_sent = 0
        self.acked_seq = 0
        self.reading_pushes: ReadPushes | None = None
        self.detached_at = 0.0
        self.last_reply_at = 0.0
        self.has_timer = False  # it is in the heap of timers

    def keep(self, recorded: RecordedReply, config: ServerConfig) -> None:
        """Keep a reply in memory, and drop the oldest ones beyond ``kept_replies`` replies or ``kept_bytes`` bytes.

        A reply that is larger than ``kept_bytes`` is dropped at once.
        """
        kept, reply = self.kept, recorded.reply
        kept[recorded.id] = recorded
        self.kept_bytes += len(reply.data) if reply is not None else 0
        while len(kept) > config.kept_replies or (self.kept_bytes > config.kept_bytes and kept):
            oldest = kept.pop(next(iter(kept))).reply  # replies are kept in order of id
            self.kept_bytes -= len(oldest.data) if oldest is not None else 0

    def acknowledge(self, last: int, last_seq: int) -> bool:
        """Drop replies that the client has; return whether it acknowledged more than before."""
        if last <= self.acked and last_seq <= self.acked_seq:
            return False
        self.acked, self.acked_seq = max(self.acked, last), max(self.acked_seq, min(last_seq, self.seq))
        for id in [id for id in self.kept if id <= self.acked]:
            dropped = self.kept.pop(id).reply
            self.kept_bytes -= len(dropped.data) if dropped is not None else 0
        return True

    def position(self) -> bytes:
        """Return ``data`` of ``opened`` and ``resumed``."""
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


MAX_COMPARED_BYTES = 16 * 1024
"""Most bytes of ``data`` whose RFC 8785 form is made: that of a long text takes longer than other sessions can wait."""


def same_request(kind: str, sha: bytes, data: bytes, other_kind: str, other_sha: bytes, other: bytes | None) -> bool:
    """Return whether two requests with one id are the same: equal type, and equal ``data`` as bytes or, where both have
    at most `MAX_COMPARED_BYTES`, as RFC 8785 form (PROTOCOL D4).

    Args:
        kind: Type of the one request.
        sha: sha256 of its ``data`` as received.
        data: Its ``data``.
        other_kind: Type of the other request.
        other_sha: sha256 of its ``data`` as received.
        other: Its ``data``; None if it is not in memory, and then only the hashes are compared.
    """
    if kind != other_kind:
        return False
    if sha == other_sha:
        return True
    if other is None or max(len(data), len(other)) > MAX_COMPARED_BYTES:
        return False
    try:
        forms = [canonical(msgspec.json.decode(text)) for text in (data, other)]
    except (msgspec.DecodeError, RecursionError):
        return False
    return forms[0] is not None and forms[0] == forms[1]


def optional(value: Any) -> Any:
    """Return ``value``, or None if it is UNSET (the field was not sent)."""
    return None if value is UNSET else value
