"""`ReadRunner`: answers requests without an id of the session's order: reads (state, rewards, tools/list ...) and
close_group; and resends past replies (PROTOCOL D2, D8)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
from openenv.core.env_server.mcp_types import JsonRpcRequest
from pydantic_core import to_json

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import EnvironmentFailed, ErrataError
from errata_protocol.exception_text import text_of
from errata_protocol.json_text import is_readable
from errata_protocol.mux import AnswerRead, EncodedReply, ReadPushes, ReadReplies, RecordedReply

from ...episodes.reads import JournalReads
from ...ids import name_of
from ...journal.base import RewardRow, SessionRow
from ...runtime.rewards import push_data
from ...runtime.rows import encode_output, wire_digest
from ...sessions.session import Session
from ...sessions.sessions import Sessions
from ..capabilities import capabilities_data
from ..json_rpc import invalid_call, parse_rpc
from ..mcp import McpDoor
from .driver import ProtocolDriver, SocketHandle, journal_sid, wire_sid
from .lifetime import SessionLifetime
from .translation import object_of, recorded_of, unreadable

log = logging.getLogger("errata.mux")

READ_AGAIN_S = 1.0
"""Time after which a failed read of past replies or pushes is repeated, seconds."""

R = TypeVar("R")


class ReadRunner:
    """Handles `AnswerRead`, `ReadReplies` and `ReadPushes`.

    Args:
        driver: The state machine.
        sessions: The environment's sessions.
        lifetime: Ends a session that turns out to be lost.
        reads: Reads of the journal.
        mcp: Answers tools/list.
        capabilities: Returns what the environment offers.
    """

    def __init__(
        self,
        driver: ProtocolDriver,
        sessions: Sessions,
        lifetime: SessionLifetime,
        reads: JournalReads,
        mcp: McpDoor,
        capabilities: Callable[[], Capabilities],
    ) -> None:
        self._driver = driver
        self._sessions = sessions
        self._store = sessions.runtime.store
        self._lifetime = lifetime
        self._reads = reads
        self._mcp = mcp
        self._capabilities = capabilities
        self._fleet = sessions.runtime.fleet
        if self._fleet is not None:
            self._fleet.closes_groups(sessions.environment, self._close_group)

    def read_replies(self, effect: ReadReplies) -> None:
        """Read committed replies from the journal and pass them to the state machine."""
        self._driver.spawn(self._read_replies(effect))

    async def _read_replies(self, effect: ReadReplies) -> None:
        sid = journal_sid(effect.session.sid)
        rows = await self._read_rows(effect, lambda: self._store.replies(sid, effect.first, effect.last))
        if rows is None:
            return
        found = {row.id: recorded_of(row) for row in rows}
        replies = [found.get(id) or RecordedReply(id, "step", b"", None) for id in range(effect.first, effect.last + 1)]
        self._driver.replies_read(effect, replies)

    def read_pushes(self, effect: ReadPushes) -> None:
        """Read committed pushes from the journal and pass them to the state machine."""
        self._driver.spawn(self._read_pushes(effect))

    async def _read_pushes(self, effect: ReadPushes) -> None:
        sid = journal_sid(effect.session.sid)
        rows = await self._read_rows(effect, lambda: self._store.pushes(sid, effect.first, effect.last))
        if rows is None:
            return
        pushes = [(row.seq, push_data(row)) for row in rows if row.seq is not None]
        self._driver.pushes_read(effect, pushes)

    async def _read_rows(
        self, effect: ReadReplies | ReadPushes, read: Callable[[], Awaitable[list[R]]]
    ) -> list[R] | None:
        """Return the rows that ``read`` finds in the journal. A read that fails is repeated every `READ_AGAIN_S`.

        The session's later replies wait for these rows. No error can take their place, because the requests were
        executed and their replies are recorded.

        Returns:
            None if the rows are no longer wanted.
        """
        logged = False
        while effect.wanted:
            try:
                return await read()
            except Exception as error:
                if not logged:
                    log.warning(
                        "session %s: its past replies could not be read; they are read again every %g s: %s",
                        name_of(effect.session.sid),
                        READ_AGAIN_S,
                        error,
                        exc_info=None if isinstance(error, ErrataError) else error,
                    )
                    logged = True
            await asyncio.sleep(READ_AGAIN_S)
        return None

    def read(self, read: AnswerRead) -> None:
        """Answer a read, also with the error that it raises."""
        self._driver.spawn(self._answer_read(read))

    async def _answer_read(self, read: AnswerRead) -> None:
        socket: SocketHandle = read.connection.handle  # type: ignore[assignment]  # given to `Multiplexer.connect`
        try:
            # `socket.reads` bounds reads of the journal, which may be large. Other reads may wait for a step to end.
            async with socket.reads if read.kind == "rewards" or "t" in read.fields else contextlib.nullcontext():
                await socket.writable()
                reply = await self._reply(read)
        except ErrataError as error:
            reply = EncodedReply("error", msgspec.json.encode(error.to_wire()))
        except Exception as error:  # a defect of the server or of the environment's state
            log.exception("a read failed")
            reply = EncodedReply("error", msgspec.json.encode(EnvironmentFailed(text_of(error)).to_wire()))
        self._driver.read_answered(read, reply)
        machine = read.session
        if machine is not None and machine.handle is not None and machine.handle.lost is not None:
            self._lifetime.end_and_close(machine, "lost")  # now, because there may be no next request

    async def _reply(self, read: AnswerRead) -> EncodedReply:
        fields = read.fields
        session: Session | None = read.session.handle if read.session is not None else None
        if read.kind == "capabilities":
            return EncodedReply("capabilities", to_json(capabilities_data(self._capabilities())))
        if read.kind == "close_group":
            group, whose = fields["group"], read.connection.principal
            closed = await self._close_group(group, whose)
            if self._fleet is not None:
                closed += await self._fleet.close_group(self._sessions.environment, group, whose)
            return EncodedReply("group_closed", msgspec.json.encode({"closed": closed}))
        assert session is not None
        principal = session.row.principal
        socket: SocketHandle = read.connection.handle  # type: ignore[assignment]  # as in `_answer_read`
        if (eid := fields.get("eid")) is not None and eid != session.eid:
            if read.kind == "state" and self._fleet is not None:
                found = await self._fleet.state_at(eid, fields["t"], socket.reader.connection)
                if found is not None:
                    if not is_readable(found.payload):
                        raise unreadable(found)
                    return EncodedReply("state_at", found.payload, eid, found.t, found.digest, found.kind)
            if read.kind == "rewards" and self._fleet is not None and self._fleet.elsewhere.has(eid):
                rows = await self._fleet.elsewhere.rewards(eid, principal, socket.reader.key)
                return EncodedReply("rewards", await asyncio.to_thread(_listed, rows))
            await socket.reader.check(eid, sid=session.sid)
        if read.kind == "state" and fields:
            row = await self._reads.state_at(session.eid, fields["t"], fields.get("eid"), principal)
            if not is_readable(row.payload):
                raise unreadable(row)
            return EncodedReply("state_at", row.payload, row.eid, row.t, wire_digest(row.digest), row.wire_kind)
        if read.kind == "state":
            return EncodedReply("state", encode_output(await self._sessions.state(session)))
        if read.kind == "rewards":
            eid = fields.get("eid") or session.eid
            if eid is not None and eid != session.eid:
                rows = await self._store.owned_rewards(eid, principal)
            else:
                rows = [] if eid is None else await self._store.rewards(eid)
            return EncodedReply("rewards", _listed(rows))
        rpc = parse_rpc(object_of(read.data))
        if not isinstance(rpc, JsonRpcRequest):
            return EncodedReply("mcp", to_json(rpc))
        refused = invalid_call(rpc)
        if refused is not None:
            return EncodedReply("mcp", to_json(refused))
        answer = await self._mcp.on_session(session, rpc, read.data)
        assert isinstance(answer, dict)  # a Reply comes from a tools/call only, which is no read
        return EncodedReply("mcp", encode_output(answer))

    async def _close_group(self, group: str, principal: str | None) -> int:
        """Close all open sessions of a group and principal, hibernated ones too; return how many."""
        await self._sessions.runtime.start()
        rows = await self._store.open_sessions()
        members = [
            row
            for row in rows
            if row.group == group
            and row.principal == principal
            and row.key_hash is not None
            and row.environment == self._sessions.environment
        ]
        await asyncio.gather(*map(self._close, members))  # concurrently, so that their commits share a sync
        return len(members)

    async def _close(self, row: SessionRow) -> None:
        await self._sessions.lifetime.close(self._sessions.dormant(row, None))
        self._lifetime.end(wire_sid(row.sid), "closed")


def _listed(rows: Iterable[RewardRow]) -> bytes:
    return b"[" + b",".join(map(push_data, rows)) + b"]"
