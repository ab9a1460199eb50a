"""What the client's machine tells the trainer, in order."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ErrataError
from .client_session import ClientRead, ClientRequest, ClientSession
from .messages import PositionData


@dataclass(frozen=True, slots=True)
class Opened:
    """The session is attached; ``position`` is the server's."""

    session: ClientSession
    position: PositionData


@dataclass(frozen=True, slots=True)
class Replied:
    """A recorded reply: executed once, and this is the answer.

    Args:
        session: Whose.
        id: Request id.
        request: What it answers; None if a process before this one sent it.
        type: Reply type; ``error`` never comes here.
        payload: The exact bytes of ``data``.
        eid: Episode of a delivery.
        t: Its delivery index.
        digest: ``sha256:<hex>`` of ``payload``, checked; empty where the server sent none.
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
    """A request is over without effect or with a recorded error; nothing sends it again.

    Args:
        session: Whose.
        id: Request id, None if it was never given one.
        request: Which; None if a process before this one sent it.
        error: Why.
        recorded: The error is the reply to that id for ever.
    """

    session: ClientSession
    id: int | None
    request: ClientRequest | None
    error: ErrataError
    recorded: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a read; ``error`` in place of ``payload`` where it failed."""

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
    """A late reward, once and in order of ``seq``."""

    session: ClientSession
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The server takes the session or request later; it is sent again at ``retry_at``. For logs and patience."""

    session: ClientSession
    error: ErrataError
    retry_at: float


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another process resumed the session; `ClientProtocol.claim` takes it back."""

    session: ClientSession


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session is over; its requests without a reply have `Failed` before."""

    session: ClientSession
    error: ErrataError


@dataclass(frozen=True, slots=True)
class GoneAway:
    """The server wants the socket closed once its replies are here, and a new one after ``retry_after_s``."""

    retry_after_s: float


ClientEvent = Opened | Replied | Failed | Answered | Pushed | Refused | TakenOver | SessionEnded | GoneAway
