"""What the server's state machines ask of their shell, and what the shell answers with.

An effect whose description says "Waits" is answered by calling that method of `server.ServerProtocol`, once, whenever
the shell is done. Effects are performed in the order in which they were given; several can be under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from .records import ForkRequest, ReadKind, Reply, RequestKind
from .server_session import ServerConnection, ServerSession


@dataclass(frozen=True, slots=True)
class Stored:
    """A session as the journal knows it.

    Args:
        next_id: The id after the last committed one.
        eid: Current episode, None before the first reset.
        t: Last committed delivery.
        seq: Last push.
        recovery: `errata_protocol.environment.Recovery` value; ``none`` is never hibernated.
        status: ``open``, or why it is over.
        group: As it was opened with.
    """

    next_id: int = 1
    eid: str | None = None
    t: int | None = None
    seq: int = 0
    recovery: str = "none"
    status: Literal["open", "closed", "expired", "lost"] = "open"
    group: str | None = None


class Find(Struct, frozen=True):
    """Look for the session with this sid, key hash and principal; with ``make``, make and journal it if the sid is new.

    Waits: `found`, or `refused` with SESSION_LOST (the answer for an unknown sid and for one that exists with another
    key or principal), CAPACITY_REACHED or EXECUTION_ERROR.
    """

    session: ServerSession
    make: bool


class Run(Struct, frozen=True):
    """Execute a request and commit its row, under its session and id, before answering.

    One request of a session is under way at a time. Waits: `completed` once its reply or error is committed, or
    `rejected` if it had no effect and none was recorded.

    Args:
        session: Whose request it is.
        id: Its id, unique for ever in the session.
        kind: What to do.
        data: What to journal as the request: as received, but for a fork without the child's key.
        sha: sha256 of ``data`` as received.
        deadline: In the clock the shell gives as ``now``; None without one.
        fork: What a fork asks for.
    """

    session: ServerSession
    id: int
    kind: RequestKind
    data: bytes
    sha: bytes
    deadline: float | None = None
    fork: ForkRequest | None = None


class Record(Struct, frozen=True):
    """Commit an error as the reply to a request that does not run. Waits: `completed` with ``reply``."""

    session: ServerSession
    id: int
    kind: RequestKind
    data: bytes
    sha: bytes
    reply: Reply


class Recall(Struct, frozen=True):
    """Read the committed replies with ids ``first`` to ``last``. Waits: `recalled` with each of them, in order."""

    session: ServerSession
    first: int
    last: int
    token: object


class RecallPushes(Struct, frozen=True):
    """Read the pushes with ``first`` <= seq <= ``last``. Waits: `pushes_recalled`, with those there are, in order."""

    session: ServerSession
    first: int
    last: int


class Read(Struct, frozen=True):
    """Answer a read; it has no turn and is not journaled. Waits: `answered`.

    ``fields`` is the checked content of ``data`` for the protocol's own reads: ``group`` and the socket's principal
    decide which sessions close_group ends, and each that this process holds is told with `ended`.
    """

    connection: ServerConnection
    session: ServerSession | None
    q: int
    kind: ReadKind
    data: bytes
    fields: dict[str, Any]


class Hibernate(Struct, frozen=True):
    """Close the environment of a session that nobody is attached to. Waits: `slept`."""

    session: ServerSession


class Forget(Struct, frozen=True):
    """The client has every reply up to ``last`` and every push up to ``last_seq``: recorded errors need not be kept."""

    session: ServerSession
    last: int
    last_seq: int


class Write(Struct, frozen=True):
    """The connection has bytes to send: take them with `ServerConnection.data_to_send` as fast as the socket goes."""

    connection: ServerConnection


Effect = Find | Run | Record | Recall | RecallPushes | Read | Hibernate | Forget | Write
