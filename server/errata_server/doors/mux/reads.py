"""Answers requests without an id: past replies, pushes, state, rewards, tools/list, close_group (PROTOCOL D2, D8)."""

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
from ...runtime.ownership import owned_episode
from ...runtime.rewards import push_data
from ...runtime.rows import wire_digest
from ...sessions.session import Session
from ..mcp import McpDoor, invalid_call, parse_rpc
from .shell import PREFIX, Door, MuxShell, journal_sid
from .translation import object_of, recorded_of

log = logging.getLogger("errata.mux")


class Reads:
    """Answers reads.

    Args:
        shell: The machine.
        reads: Reads of the journal.
        mcp: Answers what JSON-RPC reads.
        capabilities: What a probe is answered.
    """

    def __init__(
        self, shell: MuxShell, reads: JournalReads, mcp: McpDoor, capabilities: Callable[[], Capabilities]
    ) -> None:
        self._shell = shell
        self._reads = reads
        self._mcp = mcp
        self._capabilities = capabilities

    def recall(self, recall: Recall) -> None:
        """Read committed replies."""
        self._shell.spawn(self._recall_replies(recall))

    async def _recall_replies(self, recall: Recall) -> None:
        sid = journal_sid(recall.session.sid)
        rows = await self._shell.runtime.store.replies(sid, recall.first, recall.last)
        found = {row.id: recorded_of(row) for row in rows}
        replies = [found.get(id) or Recorded(id, "step", b"", None) for id in range(recall.first, recall.last + 1)]
        self._shell.do(self._shell.protocol.recalled(recall, replies))

    def recall_pushes(self, recall: RecallPushes) -> None:
        """Read committed pushes."""
        self._shell.spawn(self._recall_rewards(recall))

    async def _recall_rewards(self, recall: RecallPushes) -> None:
        sid = journal_sid(recall.session.sid)
        rows = await self._shell.runtime.store.pushes(sid, recall.first, recall.last)
        pushes = [(row.seq, push_data(row)) for row in rows if row.seq is not None]
        self._shell.do(self._shell.protocol.pushes_recalled(recall, pushes))

    def read(self, read: Read) -> None:
        """Answer a read."""
        self._shell.spawn(self._answer_read(read))

    async def _answer_read(self, read: Read) -> None:
        door: Door = read.connection.handle  # type: ignore[assignment] # see `Multiplex.connect`
        try:
            # A few reads of the journal at a time, for each may be large; what waits for a step holds up no other.
            async with door.reading if read.kind == "rewards" or "t" in read.fields else contextlib.nullcontext():
                await door.room()
                reply = await self._looked_up(read)
        except ErrataError as error:
            reply = Reply("error", msgspec.json.encode(error.to_wire()))
        except Exception as error:  # a defect of ours, or what the environment's state is made of
            log.exception("a read failed")
            reply = Reply("error", msgspec.json.encode(EnvironmentFailed(str(error)).to_wire()))
        self._shell.do(self._shell.protocol.answered(read, reply))
        mine = read.session
        if mine is not None and mine.handle is not None and mine.handle.lost is not None:
            self._shell.let_go(mine, "lost")  # with this read: nobody may ever ask it for more

    async def _looked_up(self, read: Read) -> Reply:
        fields = read.fields
        session: Session | None = read.session.handle if read.session is not None else None
        if read.kind == "capabilities":
            return Reply("capabilities", to_json(self._capabilities().model_dump(mode="json", exclude={"session"})))
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
                return Reply("state", to_json(await self._shell.sessions.state(session), inf_nan_mode="null"))
            except ValueError as error:
                raise EnvironmentOutputInvalid(f"the environment's state has no JSON form: {error}") from error
        if read.kind == "rewards":
            eid = fields.get("eid") or session.eid
            if eid is not None and eid != session.eid:
                await owned_episode(self._shell.runtime.store, eid, principal)
            rows = [] if eid is None else await self._shell.runtime.store.rewards(eid)
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
        """End the sessions of a group, awake or not."""
        await self._shell.runtime.start()
        rows = await self._shell.runtime.store.open_sessions()
        mine = [
            row
            for row in rows
            if row.group == group
            and row.principal == principal
            and row.key_hash is not None
            and row.environment == self._shell.sessions.environment
        ]
        await asyncio.gather(*map(self._close, mine))  # together, or each would wait for a sync of its own
        return len(mine)

    async def _close(self, row: SessionRow) -> None:
        await self._shell.sessions.lifetime.close(self._shell.sessions.dormant(row, None))
        self._shell.end(row.sid.removeprefix(PREFIX), "closed")
