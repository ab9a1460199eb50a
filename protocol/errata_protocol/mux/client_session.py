"""What the client's machine keeps of a session, a request and a read."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..errors import ErrataError
from .records import ReadKind, RequestKind
from .state import State

ENVELOPE_BYTES = 1024
"""What an envelope adds to its ``data`` at most: its sid and the eid of its condition have up to 128 characters."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How a client's machine is set up; capabilities say what the server allows.

    Args:
        in_flight_session: Requests of a session sent and not answered.
        in_flight_socket: Likewise of the socket.
        max_elements: Envelopes in one frame.
        max_frame: Bytes of one message, and of the messages that are sent in parts at a time.
        max_message: Bytes of messages held that arrive in parts.
        retry_after_s: Wait after a refusal that names none.
        drain_s: How long refusals of what was sent behind a refused request are waited for.
        ack_every: Replies, or pushes, after which they are acknowledged.
    """

    in_flight_session: int = 16
    in_flight_socket: int = 1024
    max_elements: int = 256
    max_frame: int = 16 * 1024 * 1024
    max_message: int = 256 * 1024 * 1024
    retry_after_s: float = 0.5
    drain_s: float = 5.0
    ack_every: int = 64


class ClientRequest:
    """A mutating request; its ``id`` is given when it is sent, and holds once the server accepted it."""

    __slots__ = ("cancelled", "child", "condition", "data", "deadline_ms", "id", "kind")

    def __init__(
        self, kind: RequestKind, data: bytes, condition: tuple[int, str | None] | None, deadline_ms: int | None
    ) -> None:
        self.id: int | None = None
        self.kind = kind
        self.data = data
        self.condition = condition
        self.deadline_ms = deadline_ms
        self.child: tuple[str, str] | None = None
        self.cancelled = False

    def envelope(self, sid: str, id: int) -> bytes:
        """Return the envelope with the exact bytes of ``data``."""
        extra = ""
        if self.condition is not None:
            t, eid = self.condition
            place = {"t": t} if eid is None else {"t": t, "eid": eid}
            extra = f',"if":{msgspec.json.encode(place).decode()}'
        deadline_ms = 0 if self.cancelled else self.deadline_ms
        if deadline_ms is not None:
            extra += f',"deadline_ms":{deadline_ms}'
        return f'{{"sid":"{sid}","id":{id},"type":"{self.kind}"{extra},"data":'.encode() + self.data + b"}"


class ClientRead:
    """A read; repeated until it is answered."""

    __slots__ = ("data", "kind", "q", "retry_at", "sent", "session")

    def __init__(self, q: int, kind: ReadKind, session: ClientSession | None, data: bytes) -> None:
        self.q = q
        self.kind = kind
        self.session = session
        self.data = data
        self.sent = False
        self.retry_at: float | None = None


class ClientSession:
    """One session; only `client.ClientProtocol` changes it.

    Attributes:
        last: Last id whose reply was delivered.
        last_seq: Last push that was.
        eid: Episode of the last delivery.
        t: Its index.
    """

    __slots__ = (
        *("accepted", "acked", "acked_seq", "behind", "counted", "eid", "fence", "gap_at", "give_up_at", "group"),
        *(
            "held_at",
            "held_until",
            "key",
            "last",
            "last_seq",
            "next_id",
            "over",
            "reads",
            "retry_at",
            "sent",
            "sid",
            "state",
        ),
        *("t", "unsent"),
    )

    def __init__(self, sid: str, key: str, state: State) -> None:
        self.sid = sid
        self.key = key
        self.state = state
        self.group: str | None = None
        self.fence = 0
        self.next_id: int | None = 1
        self.last = 0
        self.last_seq = 0
        self.acked = 0
        self.acked_seq = 0
        self.accepted = 0
        self.eid: str | None = None
        self.t: int | None = None
        self.unsent: list[ClientRequest] = []  # in order; those that were sent before have an id
        self.sent: dict[int, ClientRequest] = {}  # without a reply, in order
        self.counted = False  # what was sent counts for the socket's bound
        self.held_until: float | None = None
        self.held_at = 0
        self.give_up_at: float | None = None
        self.behind: set[int] = set()  # sent behind a refused request, and not refused yet
        self.reads: dict[int, ClientRead] = {}
        self.retry_at: float | None = None
        self.gap_at: int | None = None
        self.over: ErrataError | None = None  # why it is over, while missed replies still come

    def hold(self, until: float | None, *, at: int = 0, give_up_at: float | None = None) -> None:
        """Send nothing until then, and until all refusals from id ``at`` on have come; None ends it."""
        self.held_until, self.held_at, self.give_up_at = until, at, give_up_at
        if until is None:
            self.behind.clear()

    def next_fence(self) -> int:
        """Return the number of the attach that is sent now."""
        self.fence += 1
        return self.fence

    def resume_entry(self) -> dict[str, object]:
        """Return this session's entry of a resume."""
        known = {"last": self.last, "last_seq": self.last_seq, "fence": self.fence}
        return {"sid": self.sid, "key": self.key, **known}

    def settle(self, next_id: int) -> None:
        """Sort what was sent: what the server accepted waits for its reply, the rest is sent again from ``next_id`` on.

        Its ids are given anew. They stay what they were, unless ids before them were lost with a process that died.
        """
        back = [request for id, request in self.sent.items() if id >= next_id]
        kept = [request for request in self.unsent if request.id is not None and request.id < next_id]
        self.sent = {id: request for id, request in self.sent.items() if id < next_id}
        self.sent |= {request.id: request for request in kept if request.id is not None}
        self.unsent = back + self.unsent[len(kept) :]
        self.next_id = next_id

    def answered(self, id: int) -> ClientRequest | None:
        """Take the request that a reply answers out of what waits."""
        if self.next_id is not None and id >= self.next_id:
            self.next_id = id + 1
        request = self.sent.pop(id, None)
        if request is None and self.unsent and self.unsent[0].id == id:
            return self.unsent.pop(0)  # it was going to be sent again
        return request
