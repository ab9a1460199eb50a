"""Events that the client's state machine reports to its caller, in order."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ErrataError
from .client_session import ClientRead, ClientRequest, ClientSession
from .messages import PositionData


@dataclass(frozen=True, slots=True)
class Attached:
    """The session was opened or resumed on this socket; ``position`` is where the server has it."""

    session: ClientSession
    position: PositionData


@dataclass(frozen=True, slots=True)
class Replied:
    """A request was executed, once, and this is its recorded reply.

    Args:
        session: The session of the request.
        id: Request id.
        request: The request; None if an earlier process sent it.
        type: Reply type, never ``error``: a recorded error is `Failed`.
        payload: The exact bytes of ``data``.
        eid: Episode of a delivery.
        t: Its delivery index.
        digest: ``sha256:<hex>`` of ``payload``, verified; empty where the server sent none.
    """

    session: ClientSession
    id: int
    request: ClientRequest | None
    type: str
    payload: bytes
    eid: str | None
    t: int | None
    digest: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A request failed, and is not sent again.

    Args:
        session: The session of the request.
        id: Request id, None if it had none yet.
        request: The request; None if an earlier process sent it.
        error: Why.
        recorded: The error is the recorded reply to that id. If False, the request had no effect.
    """

    session: ClientSession
    id: int | None
    request: ClientRequest | None
    error: ErrataError
    recorded: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a read. If the read failed, ``error`` is set and ``payload`` is empty."""

    read: ClientRead
    type: str
    payload: bytes
    eid: str | None = None
    t: int | None = None
    kind: str | None = None
    digest: str = ""
    error: ErrataError | None = None


@dataclass(frozen=True, slots=True)
class Pushed:
    """A late reward; each comes once, in order of ``seq``."""

    session: ClientSession
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The server refused a session or a request for now; the client sends it again at ``retry_at`` by itself."""

    session: ClientSession
    error: ErrataError
    retry_at: float


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another process resumed the session; `ClientProtocol.claim` takes it back."""

    session: ClientSession


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session ended. A `Failed` for each of its requests without a reply came before."""

    session: ClientSession
    error: ErrataError


@dataclass(frozen=True, slots=True)
class GoneAway:
    """The server asks the client to close the socket once its replies are here, and to reconnect ``retry_after_s``
    later."""

    retry_after_s: float


ClientEvent = Attached | Replied | Failed | Answered | Pushed | Refused | TakenOver | SessionEnded | GoneAway
