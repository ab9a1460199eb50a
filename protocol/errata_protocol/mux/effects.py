"""Effects: what the server's state machine asks its shell to do.

The shell is the code around the machine that does the I/O. It performs effects in the order in which it gets them, and
may have several under way. An effect that says "Answered by" has an outcome: the shell calls that method of
`server.ServerProtocol` exactly once, when it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct

from ..labels import Labels
from .records import EncodedReply, ForkSpec, ReadKind, RequestKind
from .server_session import FinalReplies, RepeatedRequest, ServerConnection, ServerSession


@dataclass(frozen=True, slots=True)
class Stored:
    """The state of a session as the journal has it.

    Args:
        next_id: The id after the last committed one.
        eid: Current episode, None before the first reset.
        t: Last committed delivery.
        seq: Last push.
        recovery: An `errata_protocol.environment.Recovery` value; sessions with ``none`` are never hibernated.
        status: ``open``, or why the session ended.
        group: The group that it was opened with.
    """

    next_id: int = 1
    eid: str | None = None
    t: int | None = None
    seq: int = 0
    recovery: str = "none"
    status: Literal["open", "closed", "expired", "lost"] = "open"
    group: str | None = None


class FindSession(Struct, frozen=True):
    """Look up the session with this sid, key hash and principal; with ``make``, create it in the journal if the sid is
    new.

    Answered by `found`; or by `find_failed` with SESSION_LOST (for an unknown sid, and also for one that exists with
    another key or principal), CAPACITY_REACHED or EXECUTION_ERROR.
    """

    session: ServerSession
    make: bool


class RunRequest(Struct, frozen=True, gc=False):
    """Execute a request, and commit its reply under its session and id before the reply is sent.

    A session has one request under way at a time. Answered by `completed` when the reply or error is committed, or by
    `rejected` if the request had no effect and nothing was recorded.

    Args:
        session: The session that executes it.
        id: Request id, never used again in the session.
        kind: What to do.
        data: What to journal as the request: ``data`` as received, except that a fork's has no key of the child.
        sha: sha256 of ``data`` as received.
        deadline: On the clock of the machine's ``now``; None without one.
        fork: What a fork asks for.
        labels: Labels that came with it: of a reset, those in place of the session's; of a fork, all of the child's.
            None where there were none.
    """

    session: ServerSession
    id: int
    kind: RequestKind
    data: bytes
    sha: bytes
    deadline: float | None = None
    fork: ForkSpec | None = None
    labels: Labels | None = None


class RecordError(Struct, frozen=True):
    """Commit ``reply``, an error, as the reply to a request that is not executed. Answered by `completed`."""

    session: ServerSession
    id: int
    kind: RequestKind
    data: bytes
    sha: bytes
    reply: EncodedReply


class ReadReplies(Struct, frozen=True):
    """Read the committed replies with ids ``first`` to ``last`` from the journal. Answered by `replies_read`, or not at
    all once it is no longer `wanted`.

    ``purpose`` is the machine's: the repeated request that one of them answers, the end of a session that they precede,
    or None for replies that are due on the session's socket.
    """

    session: ServerSession
    first: int
    last: int
    purpose: RepeatedRequest | FinalReplies | None

    @property
    def wanted(self) -> bool:
        """Whether the replies are still needed: not if the socket is lost, or the session was attached anew or over."""
        if self.purpose is not None:
            return not self.purpose.connection.lost
        return self.session.reading_replies is self and self.session.connection is not None


class ReadPushes(Struct, frozen=True):
    """Read the pushes with ``first`` <= seq <= ``last`` from the journal. Answered by `pushes_read`, or not at all once
    it is no longer `wanted`."""

    session: ServerSession
    first: int
    last: int

    @property
    def wanted(self) -> bool:
        """Whether the pushes are still needed: not if the socket is lost, or the session was attached anew or over."""
        return self.session.reading_pushes is self and self.session.connection is not None


class AnswerRead(Struct, frozen=True):
    """Answer a read. Reads are not journaled and do not wait for the session's requests. Answered by `read_answered`.

    ``fields`` is the validated content of ``data``, empty for MCP. For close_group the shell ends the open sessions of
    ``fields["group"]`` that have the connection's principal, and calls `ended` for each that the machine knows.
    """

    connection: ServerConnection
    session: ServerSession | None
    q: int
    kind: ReadKind
    data: bytes
    fields: dict[str, Any]


class Hibernate(Struct, frozen=True):
    """Close the environment of a session that has no socket. Answered by `hibernated`."""

    session: ServerSession


class ForgetReplies(Struct, frozen=True):
    """The client has all replies up to ``last`` and pushes up to ``last_seq``: the journal may drop their records."""

    session: ServerSession
    last: int
    last_seq: int


class Write(Struct, frozen=True):
    """The connection has bytes to send: write what `ServerConnection.data_to_send` returns, as fast as the socket takes
    it."""

    connection: ServerConnection


Effect = (
    FindSession | RunRequest | RecordError | ReadReplies | ReadPushes | AnswerRead | Hibernate | ForgetReplies | Write
)
