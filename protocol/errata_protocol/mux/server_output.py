"""How the server's machine writes messages and asks its shell for effects."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import ErrataError, ReplyExpired
from .effects import Effect, Recall, RecallPushes, Write
from .envelope import write_envelope, write_reply
from .records import EndReason, Recorded, Reply
from .server_session import RECALLED_AT_ONCE, ServerConnection, ServerSession, Told


class Out:
    """Collects effects and writes messages.

    Attributes:
        effects: What the shell has to do next.
    """

    __slots__ = ("effects",)

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def take(self) -> list[Effect]:
        """Return the collected effects and begin anew."""
        effects, self.effects = self.effects, []
        return effects

    def send(self, connection: ServerConnection, sid: str, message: bytes, **address: int) -> None:
        """Queue an envelope on a socket, unless it is gone."""
        if connection.lost:
            return
        connection.outbox.put(sid, message, **address)
        if not connection.armed:
            connection.armed = True
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
        """Queue an error."""
        address = {k: v for k, v in (("id", id), ("q", q)) if v is not None}
        head: dict[str, object] = {"sid": sid, **address}
        if index is not None:
            head["index"] = index
        head["type"] = "error"
        self.send(connection, sid or "", write_envelope(head, msgspec.json.encode(error.to_wire())), **address)

    def reply(self, connection: ServerConnection, session: ServerSession, id: int, reply: Reply, sha: bytes) -> None:
        """Queue a recorded reply; ``sha`` of the request lets a client tell its own from another process's."""
        asked = sha if id <= session.inherited else None
        message = write_reply(session.sid, id, reply.type, reply.eid, reply.t, reply.digest, reply.data, asked)
        self.send(connection, session.sid, message, id=id)

    def answer(self, connection: ServerConnection, sid: str | None, q: int, reply: Reply) -> None:
        """Queue the answer to a read."""
        head: dict[str, object] = {} if sid is None else {"sid": sid}
        head |= {"q": q, "type": reply.type}
        if reply.eid is not None:
            head |= {"eid": reply.eid, "t": reply.t}
        if reply.kind is not None:
            head["kind"] = reply.kind
        if reply.digest:
            head["digest"] = reply.digest
        self.send(connection, sid or "", write_envelope(head, reply.data), q=q)

    def flush(self, session: ServerSession) -> None:
        """Send the replies that are due, as far as they are at hand, and ask for the next ones that are not."""
        connection = session.connection
        if connection is None:
            return
        while session.sent < session.done:
            if not connection.accepts_input:
                connection.behind[session.sid] = session
                return
            recorded = session.kept.get(session.sent + 1)
            if recorded is None:
                kept = next(iter(session.kept), session.done + 1)
                first = session.sent + 1
                last = min(kept - 1 if kept > first else session.done, first + RECALLED_AT_ONCE - 1)
                session.recall = Recall(session, first, last, None)
                self.effects.append(session.recall)
                return
            self.recorded(connection, session, recorded)
            session.sent += 1

    def recorded(self, connection: ServerConnection, session: ServerSession, recorded: Recorded) -> None:
        """Queue a recorded reply, or that it is kept no longer."""
        if recorded.reply is not None:
            self.reply(connection, session, recorded.id, recorded.reply, recorded.sha)
        else:
            told = ReplyExpired(f"request {recorded.id} was executed, and its reply is kept no longer")
            self.error(connection, told, session.sid, id=recorded.id)

    def flush_pushes(self, session: ServerSession) -> None:
        """Ask for pushes that are due."""
        if session.connection is not None and session.seq_sent < session.seq and session.recall_pushes is None:
            session.recall_pushes = RecallPushes(session, session.seq_sent + 1, session.seq)
            self.effects.append(session.recall_pushes)

    def push(self, connection: ServerConnection, session: ServerSession, seq: int, data: bytes) -> None:
        """Queue a late reward."""
        message = write_envelope({"sid": session.sid, "seq": seq, "type": "reward"}, data)
        self.send(connection, session.sid, message, seq=seq)

    def part(self, session: ServerSession, first: int, told: Told) -> None:
        """Ask for what the owner of a session that is over missed from ``first`` on, a few replies at a time and while
        its socket has room; then tell the rest."""
        connection = told.connection
        if first > told.last:
            for id, error in told.refused.items():
                self.error(connection, error, session.sid, id=id)
            if told.detached is not None:
                self.detached(connection, session.sid, told.detached)
        elif connection.accepts_input:
            last = min(told.last, first + RECALLED_AT_ONCE - 1)
            self.effects.append(Recall(session, first, last, told))
        else:
            connection.parting.append((session, first, told))

    def detached(self, connection: ServerConnection, sid: str, reason: EndReason | Literal["taken_over"]) -> None:
        """Queue the push that ends an attachment."""
        head = {"sid": sid, "type": "detached"}
        self.send(connection, sid, write_envelope(head, b'{"reason":"%s"}' % reason.encode()))
