"""`ReadRunner`: answers past replies, pushes, state, rewards, tools/list and close_group (PROTOCOL D2, D8)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec
from openenv.core.env_server.mcp_types import JsonRpcRequest
from pydantic_core import to_json

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import EnvironmentFailed, EnvironmentOutputInvalid, ErrataError, InvalidRequest
from errata_protocol.mux import Read, Recall, RecallPushes, Recorded, Reply

from ...episodes.reads import JournalReads
from ...journal.base import SessionRow
from ...runtime.rewards import push_data
from ...runtime.rows import wire_digest
from ...sessions.session import Session
from ...sessions.sessions import Sessions
from ..capabilities import capabilities_data
from ..mcp import McpDoor, invalid_call, parse_rpc
from .driver import ProtocolDriver, SocketHandle, journal_sid, wire_sid
from .lifetime import SessionLifetime
from .translation import object_of, recorded_of

log = logging.getLogger("errata.mux")


class ReadRunner:
    """Handles `Read`, `Recall` and `RecallPushes`.

    Args:
        driver: The state machine.
        sessions: The environment's sessions.
        lifetime: Ends the session where a read finds that it is lost.
        reads: Reads of the journal.
        mcp: Answers JSON-RPC reads.
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

    def recall(self, recall: Recall) -> None:
        """Read committed replies from the journal."""
        self._driver.spawn(self._recall_replies(recall))

    async def _recall_replies(self, recall: Recall) -> None:
        sid = journal_sid(recall.session.sid)
        rows = await self._store.replies(sid, recall.first, recall.last)
        found = {row.id: recorded_of(row) for row in rows}
        replies = [found.get(id) or Recorded(id, "step", b"", None) for id in range(recall.first, recall.last + 1)]
        self._driver.recalled(recall, replies)

    def recall_pushes(self, recall: RecallPushes) -> None:
        """Read committed pushes from the journal."""
        self._driver.spawn(self._recall_rewards(recall))

    async def _recall_rewards(self, recall: RecallPushes) -> None:
        sid = journal_sid(recall.session.sid)
        rows = await self._store.pushes(sid, recall.first, recall.last)
        pushes = [(row.seq, push_data(row)) for row in rows if row.seq is not None]
        self._driver.pushes_recalled(recall, pushes)

    def read(self, read: Read) -> None:
        """Answer a read."""
        self._driver.spawn(self._answer_read(read))

    async def _answer_read(self, read: Read) -> None:
        socket: SocketHandle = read.connection.handle  # type: ignore[assignment]  # given to `Multiplexer.connect`
        try:
            # Few reads of the journal at a time, because each may be large. One that waits for a step is not counted.
            async with socket.reads if read.kind == "rewards" or "t" in read.fields else contextlib.nullcontext():
                await socket.writable()
                reply = await self._reply(read)
        except ErrataError as error:
            reply = Reply("error", msgspec.json.encode(error.to_wire()))
        except Exception as error:  # a defect of ours, or of the environment's state
            log.exception("a read failed")
            reply = Reply("error", msgspec.json.encode(EnvironmentFailed(str(error)).to_wire()))
        self._driver.answered(read, reply)
        machine = read.session
        if machine is not None and machine.handle is not None and machine.handle.lost is not None:
            self._lifetime.end_and_close(machine, "lost")  # now: there may never be another request

    async def _reply(self, read: Read) -> Reply:
        fields = read.fields
        session: Session | None = read.session.handle if read.session is not None else None
        if read.kind == "capabilities":
            return Reply("capabilities", to_json(capabilities_data(self._capabilities())))
        if read.kind == "close_group":
            closed = await self._close_group(fields["group"], read.connection.principal)
            return Reply("group_closed", msgspec.json.encode({"closed": closed}))
        assert session is not None
        principal = session.row.principal
        if read.kind == "state" and fields:
            if "t" not in fields:
                raise InvalidRequest("state with eid needs t")
            row = await self._reads.state_at(session.eid, fields["t"], fields.get("eid"), principal)
            return Reply("state_at", row.payload, row.eid, row.t, wire_digest(row.digest), row.wire_kind)
        if read.kind == "state":
            try:
                return Reply("state", to_json(await self._sessions.state(session), inf_nan_mode="null"))
            except ValueError as error:
                raise EnvironmentOutputInvalid(f"the environment's state has no JSON form: {error}") from error
        if read.kind == "rewards":
            eid = fields.get("eid") or session.eid
            if eid is not None and eid != session.eid:
                rows = await self._store.owned_rewards(eid, principal)
            else:
                rows = [] if eid is None else await self._store.rewards(eid)
            return Reply("rewards", b"[" + b",".join(map(push_data, rows)) + b"]")
        rpc = parse_rpc(object_of(read.data))
        if not isinstance(rpc, JsonRpcRequest):
            return Reply("mcp", to_json(rpc))
        refused = invalid_call(rpc)
        if refused is not None:
            return Reply("mcp", to_json(refused))
        answer = await self._mcp.on_session(session, rpc, read.data)
        assert isinstance(answer, dict)  # only a tools/call delivers, and that is no read
        return Reply("mcp", to_json(answer))

    async def _close_group(self, group: str, principal: str | None) -> int:
        """Close all sessions of a group, hibernated ones too; return how many."""
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
        await asyncio.gather(*map(self._close, members))  # together, so that they share a sync
        return len(members)

    async def _close(self, row: SessionRow) -> None:
        await self._sessions.lifetime.close(self._sessions.dormant(row, None))
        self._lifetime.end(wire_sid(row.sid), "closed")
