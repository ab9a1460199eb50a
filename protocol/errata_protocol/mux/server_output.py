"""Output of the server's state machine: messages to sockets, and effects for the I/O code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ..errors import ErrataError, ReplyExpired
from .effects import Effect, ReadPushes, ReadReplies, Write
from .envelope import write_envelope, write_reply
from .parts import NO_ADDRESS
from .records import EncodedReply, EndReason, RecordedReply
from .server_session import REPLIES_READ_AT_ONCE, FinalReplies, ServerConnection, ServerSession


class Output:
    """Queues messages on sockets and collects effects.

    Attributes:
        effects: Effects that the shell has not been given yet, in order.
    """

    __slots__ = ("effects",)

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def take(self) -> list[Effect]:
        """Return the collected effects, and clear them."""
        effects, self.effects = self.effects, []
        return effects

    def send(
        self, connection: ServerConnection, sid: str, message: bytes, address: Mapping[str, int] = NO_ADDRESS
    ) -> None:
        """Queue an envelope on a socket, and ask the shell to write unless it was asked; ignored if the socket is lost.

        Args:
            connection: The socket.
            sid: Session of the message, empty for none.
            message: The envelope.
            address: ``id``, ``q`` or ``seq``, repeated on parts.
        """
        if connection.lost:
            return
        connection.outbox.put(sid, message, address)
        if not connection.write_requested:
            connection.write_requested = True
            self.effects.append(Write(connection))

    def error(
        self,
        connection: ServerConnection,
        error: ErrataError,
        sid: str | None = None,
        *,
        id: int | None = None,
        q: int | None = None,
        index: int | None = None,
    ) -> None:
        """Queue an ``error`` message.

        Args:
            connection: The socket.
            error: What to report.
            sid: Session that it concerns; None for none.
            id: Request that it answers.
            q: Read that it answers.
            index: Position in its frame of an element that could not be read.
        """
        address = {k: v for k, v in (("id", id), ("q", q)) if v is not None}
        head: dict[str, object] = {"sid": sid, **address}
        if index is not None:
            head["index"] = index
        head["type"] = "error"
        self.send(connection, sid or "", write_envelope(head, msgspec.json.encode(error.to_wire())), address)

    def reply(
        self, connection: ServerConnection, session: ServerSession, id: int, reply: EncodedReply, sha: bytes
    ) -> None:
        """Queue a recorded reply.

        If the request was admitted before this attachment, its hash ``sha`` is sent along: another process may have
        sent it, and the client can compare.
        """
        request_sha = sha if id <= session.last_before_attach else None
        message = write_reply(session.sid, id, reply.type, reply.eid, reply.t, reply.digest, reply.data, request_sha)
        self.send(connection, session.sid, message, {"id": id})

    def answer(self, connection: ServerConnection, sid: str | None, q: int, reply: EncodedReply) -> None:
        """Queue the answer to a read."""
        head: dict[str, object] = {} if sid is None else {"sid": sid}
        head |= {"q": q, "type": reply.type}
        if reply.eid is not None:
            head |= {"eid": reply.eid, "t": reply.t}
        if reply.kind is not None:
            head["kind"] = reply.kind
        if reply.digest:
            head["digest"] = reply.digest
        self.send(connection, sid or "", write_envelope(head, reply.data), {"q": q})

    def flush(self, session: ServerSession) -> None:
        """Send a session's replies that are due, in order.

        Stops at a reply that is not in memory, after asking the shell for it and those that follow, and when the socket
        has no room: then `Requests.drained` goes on.
        """
        connection = session.connection
        if connection is None:
            return
        while session.last_sent < session.last_done:
            if not connection.accepts_input:
                connection.blocked[session.sid] = session
                return
            recorded = session.kept.get(session.last_sent + 1)
            if recorded is None:
                kept = next(iter(session.kept), session.last_done + 1)
                first = session.last_sent + 1
                last = min(kept - 1 if kept > first else session.last_done, first + REPLIES_READ_AT_ONCE - 1)
                session.reading_replies = ReadReplies(session, first, last, None)
                self.effects.append(session.reading_replies)
                return
            self.recorded(connection, session, recorded)
            session.last_sent += 1

    def recorded(self, connection: ServerConnection, session: ServerSession, recorded: RecordedReply) -> None:
        """Queue a recorded reply, or REPLY_EXPIRED if the journal no longer keeps it."""
        if recorded.reply is not None:
            self.reply(connection, session, recorded.id, recorded.reply, recorded.sha)
        else:
            expired = ReplyExpired(f"request {recorded.id} was executed, and its reply is kept no longer")
            self.error(connection, expired, session.sid, id=recorded.id)

    def flush_pushes(self, session: ServerSession) -> None:
        """Ask the shell for the pushes that a session's socket has not been sent; their texts are not in memory."""
        if session.connection is not None and session.last_seq_sent < session.seq and session.reading_pushes is None:
            session.reading_pushes = ReadPushes(session, session.last_seq_sent + 1, session.seq)
            self.effects.append(session.reading_pushes)

    def push(self, connection: ServerConnection, session: ServerSession, seq: int, data: bytes) -> None:
        """Queue a late reward."""
        message = write_envelope({"sid": session.sid, "seq": seq, "type": "reward"}, data)
        self.send(connection, session.sid, message, {"seq": seq})

    def send_final_replies(self, session: ServerSession, first: int, final: FinalReplies) -> None:
        """Send what an ended session's client missed from id ``first`` on, then the errors and ``detached``.

        The replies are read from the journal, a few at a time and only while the socket has room.
        """
        connection = final.connection
        if first > final.last:
            for id, error in final.errors.items():
                self.error(connection, error, session.sid, id=id)
            if final.detached is not None:
                self.detached(connection, session.sid, final.detached)
        elif connection.accepts_input:
            last = min(final.last, first + REPLIES_READ_AT_ONCE - 1)
            self.effects.append(ReadReplies(session, first, last, final))
        else:
            connection.ended_sessions.append((session, first, final))

    def detached(self, connection: ServerConnection, sid: str, reason: EndReason | Literal["taken_over"]) -> None:
        """Queue a ``detached`` message."""
        head = {"sid": sid, "type": "detached"}
        self.send(connection, sid, write_envelope(head, b'{"reason":"%s"}' % reason.encode()))
