"""What the client's state machine keeps of a session, a request and a read."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..errors import ErrataError
from ..labels import NO_LABELS, Labels
from .records import ReadKind, RequestKind
from .state import State

ENVELOPE_BYTES = 2304
"""Most bytes that an envelope adds to its ``data``: its sid and the eid of its ``if`` have up to 128 characters, and so
have two labels of up to 4 bytes each."""


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Configuration of the client's machine; `ClientProtocol.apply_limits` takes limits from the server's capabilities.

    Args:
        in_flight_session: Most requests of a session that are sent and not answered.
        in_flight_socket: Most requests of all sessions that are sent and not answered.
        max_elements: Most envelopes in one frame.
        max_frame: Most bytes of a message, and of all messages that are being sent in parts.
        max_message: Most bytes of messages that are arriving in parts.
        retry_after_s: Wait before a retry if the refusal has no ``retry_after``.
        drain_s: Longest wait for the refusals of requests that were sent behind a refused one.
        ack_every: Number of replies, or of pushes, after which they are acknowledged.
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
    """A mutating request. It gets an ``id`` when it is sent, which may change until the server accepts the request."""

    __slots__ = ("cancelled", "child", "condition", "data", "deadline_ms", "id", "kind", "labels")

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
        self.labels: Labels | None = None

    def envelope(self, sid: str, id: int) -> bytes:
        """Return the request's envelope, with the exact bytes of ``data``; a cancelled one has ``deadline_ms`` 0."""
        extra = ""
        if self.condition is not None:
            t, eid = self.condition
            place = {"t": t} if eid is None else {"t": t, "eid": eid}
            extra = f',"if":{msgspec.json.encode(place).decode()}'
        deadline_ms = 0 if self.cancelled else self.deadline_ms
        if deadline_ms is not None:
            extra += f',"deadline_ms":{deadline_ms}'
        if self.labels is not None:
            extra += f',"labels":{msgspec.json.encode(self.labels).decode()}'
        return f'{{"sid":"{sid}","id":{id},"type":"{self.kind}"{extra},"data":'.encode() + self.data + b"}"


class ClientRead:
    """A read; it is sent again until it is answered."""

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
        last: Id of the last reply that was reported.
        last_seq: ``seq`` of the last push that was reported.
        eid: Episode of the last delivery.
        t: Its delivery index.
    """

    __slots__ = (
        *("accepted", "acked", "acked_seq", "awaiting_refusal", "counted", "eid", "end_error", "fence", "gap_at"),
        *(
            "give_up_at",
            "group",
            "held_at",
            "held_until",
            "key",
            "labels",
            "last",
            "last_seq",
            "may_outbid",
            "next_id",
            "reads",
        ),
        *("retry_at", "sent", "sid", "state", "t", "unsent"),
    )

    def __init__(self, sid: str, key: str, state: State) -> None:
        self.sid = sid
        self.key = key
        self.state = state
        self.group: str | None = None
        self.labels = NO_LABELS
        self.fence = 0
        self.may_outbid = False  # a refused attach goes on above the server's fence; else it means a takeover
        self.next_id: int | None = 1
        self.last = 0
        self.last_seq = 0
        self.acked = 0
        self.acked_seq = 0
        self.accepted = 0
        self.eid: str | None = None
        self.t: int | None = None
        self.unsent: list[ClientRequest] = []  # in order; those that are to be sent again have an id
        self.sent: dict[int, ClientRequest] = {}  # by id, in order; without a reply
        self.counted = False  # `sent` counts towards the socket's limit
        self.held_until: float | None = None
        self.held_at = 0
        self.give_up_at: float | None = None
        self.awaiting_refusal: set[int] = set()  # ids sent behind a refused request and not refused yet
        self.reads: dict[int, ClientRead] = {}
        self.retry_at: float | None = None
        self.gap_at: int | None = None
        self.end_error: ErrataError | None = None  # why it ended, while missed replies still come

    def hold(self, until: float | None, *, at: int = 0, give_up_at: float | None = None) -> None:
        """Stop sending the session's requests because one was refused; or end this hold.

        `ClientProtocol` sends no request of a session on hold. It ends the hold, and sends the requests from ``at`` on
        again, when ``until`` has passed and the server has refused every request that was sent after the refused one
        (`awaiting_refusal` is empty), but at the latest at ``give_up_at``.

        Args:
            until: Earliest time to send again; None ends the hold now, and no more refusals are awaited.
            at: Id of the first request to send again.
            give_up_at: Time to send again even if refusals are missing; given whenever ``until`` is.
        """
        self.held_until, self.held_at, self.give_up_at = until, at, give_up_at
        if until is None:
            self.awaiting_refusal.clear()

    def next_fence(self) -> int:
        """Increment the fence and return it; called for each attach that is sent."""
        self.fence += 1
        return self.fence

    def resume_entry(self) -> dict[str, object]:
        """Return the session's entry in the ``data`` of a resume request.

        It has the session's id and key, the id of the last reply and ``seq`` of the last push that were reported, and
        the fence.
        """
        known = {"last": self.last, "last_seq": self.last_seq, "fence": self.fence}
        return {"sid": self.sid, "key": self.key, **known}

    def split_sent(self, next_id: int) -> None:
        """Split the requests: those before ``next_id`` were accepted and wait for replies, the others are sent again.

        The others get new ids, from ``next_id`` on. These are the same as before, unless ids before them belonged to
        requests of a process that crashed and were never accepted.
        """
        back = [request for id, request in self.sent.items() if id >= next_id]
        kept = [request for request in self.unsent if request.id is not None and request.id < next_id]
        self.sent = {id: request for id, request in self.sent.items() if id < next_id}
        self.sent |= {request.id: request for request in kept if request.id is not None}
        self.unsent = back + self.unsent[len(kept) :]
        self.next_id = next_id

    def answered(self, id: int) -> ClientRequest | None:
        """Remove the request that a reply answers, and return it; None if an earlier process sent it."""
        if self.next_id is not None and id >= self.next_id:
            self.next_id = id + 1
        request = self.sent.pop(id, None)
        if request is None and self.unsent and self.unsent[0].id == id:
            return self.unsent.pop(0)  # it was going to be sent again
        return request
