"""The multiplexed sessions of one environment: performs what the state machine of `errata_protocol.mux` asks for.

The machine decides what is admitted, in which order, and what is answered; sessions run it and the journal keeps it.
Everything here happens on one event loop, the one of the sockets.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace
from openenv.core.env_server.mcp_types import JsonRpcRequest
from pydantic_core import to_json

from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import (
    CODES,
    Conflict,
    EnvironmentFailed,
    EnvironmentOutputInvalid,
    ErrataError,
    InvalidRequest,
    JournalUnavailable,
    SessionClosed,
    SessionLost,
    SessionUnknown,
    StateNotReady,
    UnknownEpisode,
)
from errata_protocol.mux import (
    Effect,
    Find,
    Forget,
    Hibernate,
    Read,
    Recall,
    RecallPushes,
    Record,
    Recorded,
    Reply,
    Run,
    ServerConfig,
    ServerConnection,
    ServerProtocol,
    ServerSession,
    Stored,
    Write,
    injected_fork,
)
from errata_protocol.mux.effects import EndReason
from errata_protocol.mux.state import State

from .delivery import Admitted, error_row, forked_row, refused_row, replied_row, wire_digest
from .ids import name_of
from .journal.base import DeliveryRow, RewardRow, SessionRow
from .mcp import McpDoor, invalid_call, parse_rpc
from .mux_requests import Reading, RpcRefused, object_of, recorded_of, reply_of
from .replay import Replay
from .rewards import push_data
from .room import Room
from .session import Address, Session
from .session import Reply as SessionReply
from .sessions import Sessions

log = logging.getLogger("errata.mux")

_PREFIX = "mux."
"""Stands before a sid in the journal; a sid cannot hold a dot, and neither can the id of a plain session."""


RETURN_S = 1.0
"""When clients of a server that stops shall come again: another process needs about so long to start."""

SOUGHT_AT_ONCE = 256
"""Sessions that are looked for in the journal in one go: a thousand that resume would each wait for a thread."""

LOOK_S = 0.02
"""How often a server that stops looks whether all is answered."""


def journal_sid(sid: str) -> str:
    """Return the session id under which a multiplexed session is journaled."""
    return _PREFIX + sid


class Multiplex:
    """All multiplexed sessions of one environment.

    Args:
        sessions: The environment's sessions.
        replay: Reads of the journal.
        reading: Reads requests.
        mcp: Answers what JSON-RPC reads.
        capabilities: What a probe is answered.
        production: No state(t), no fork (PROTOCOL F1).
    """

    def __init__(
        self,
        sessions: Sessions,
        replay: Replay,
        reading: Reading,
        mcp: McpDoor,
        capabilities: Callable[[], Capabilities],
        *,
        production: bool,
    ) -> None:
        self._sessions = sessions
        self._runtime = sessions.runtime
        self._replay = replay
        self._reading = reading
        self._mcp = mcp
        self._capabilities = capabilities
        self.protocol = ServerProtocol(ServerConfig(limits=self._runtime.settings.limits, production=production))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: set[ServerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._sought: list[Find] = []
        self._idle: OrderedDict[str, Session] = OrderedDict()  # by sid, in the order of their detaching
        self._perform: dict[type, Callable[[Any], None]] = {
            Write: self._write,
            Run: self._run,
            Record: self._record,
            Find: self._find,
            Recall: self._recall,
            RecallPushes: self._recall_pushes,
            Read: self._read,
            Hibernate: self._hibernate,
            Forget: lambda effect: None,  # retention decides what the journal forgets
        }
        sessions.multiplexed = self
        self._runtime.drains.append(self.drain)
        self._runtime.rewards.on_pushed.append(self._pushed)

    # -- sockets ----------------------------------------------------------------------------------------------------

    def connect(self, principal: str | None, handle: object) -> ServerConnection:
        """Take a new socket.

        Args:
            principal: Who opened it.
            handle: Its ``wake()`` is called when there is something to send.

        Raises:
            NotSupported: Sockets of another event loop are connected.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._connections:
                raise JournalUnavailable("multiplexed sockets of another event loop are connected: use one server")
            self._loop = loop
            self._timer = None
        connection = self.protocol.connect(principal, handle)
        self._connections.add(connection)
        return connection

    def receive(self, connection: ServerConnection, frame: bytes | str) -> None:
        """Take a frame. Whatever is wrong with it is answered."""
        self._do(self.protocol.receive(connection, frame, asyncio.get_running_loop().time()))

    def disconnect(self, connection: ServerConnection) -> None:
        """Let go of a socket; its sessions are kept for ``detach_ttl_s``."""
        self._connections.discard(connection)
        left: list[ServerSession] = []
        for mine in connection.sessions.values():
            if mine.connection is connection and mine.handle is not None:
                self._idle[mine.sid] = mine.handle
                self._idle.move_to_end(mine.sid)
                left.append(mine)
        loop = asyncio.get_running_loop()
        self._do(self.protocol.disconnect(connection, loop.time()))
        if self._sessions.session_timeout_s is not None:
            for mine in left:
                loop.call_later(self._sessions.session_timeout_s, self._expire, mine, mine.detached_at)

    async def drain(self) -> None:
        """Admit nothing more, and return when all that was admitted is answered and sent (PROTOCOL D8)."""
        self._do(self.protocol.go_away(RETURN_S))
        while self._busy():  # noqa: ASYNC110 - once in a server's life, and its end has many causes
            await asyncio.sleep(LOOK_S)

    def _busy(self) -> bool:
        return any(mine.queue for mine in self.protocol.in_memory()) or any(c.has_data for c in self._connections)

    def _do(self, effects: Sequence[Effect]) -> None:
        perform = self._perform
        for effect in effects:
            perform[type(effect)](effect)
        due = self.protocol.next_timer()
        if due is not None and (self._timer is None or self._timer.when() > due or self._timer.cancelled()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._do(self.protocol.tick(asyncio.get_running_loop().time()))

    def _write(self, effect: Write) -> None:
        effect.connection.handle.wake()  # type: ignore[attr-defined] # see connect

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a defect of the multiplexed door", exc_info=error)

    # -- opening and resuming -----------------------------------------------------------------------------------

    def _find(self, effect: Find) -> None:
        if effect.make:
            mine = effect.session
            address = Address(journal_sid(mine.sid), mine.key_hash, mine.group)
            if not self._sessions.begin_open(address, mine.principal, partial(self._opened, effect)):
                self._spawn(self._make(effect))
        else:
            self._seek(effect)

    def _seek(self, find: Find) -> None:
        """Look for a session in the journal, together with all others that are looked for now."""
        self._sought.append(find)
        if len(self._sought) == 1:
            asyncio.get_running_loop().call_soon(lambda: self._spawn(self._seek_all()))

    def _opened(self, find: Find, session: Session | None, error: Exception | None) -> None:
        """Take a session that was opened, or why it was not: the journal says if there is one of that id."""
        if isinstance(error, Conflict):
            self._seek(find)
        elif session is None:
            self._refuse(find, error or EnvironmentFailed("the session could not be opened"))
        else:
            mine = find.session
            mine.handle = session
            now = asyncio.get_running_loop().time()
            self._do(self.protocol.found(find, Stored(recovery=session.row.recovery, group=mine.group), now))

    async def _make(self, find: Find) -> None:
        """Open a new session, waiting for what it needs."""
        mine = find.session
        address = Address(journal_sid(mine.sid), mine.key_hash, mine.group)
        try:
            session = await self._sessions.open(principal=mine.principal, address=address)
        except Exception as error:
            self._opened(find, None, error)
        else:
            self._opened(find, session, None)

    async def _seek_all(self) -> None:
        while self._sought:
            finds, self._sought = self._sought[:SOUGHT_AT_ONCE], self._sought[SOUGHT_AT_ONCE:]
            try:
                await self._runtime.start()
                sids = [journal_sid(find.session.sid) for find in finds]
                found = await self._runtime.read(self._stored_all, sids)
            except Exception as error:
                for find in finds:
                    self._refuse(find, error)
                continue
            for find, stored in zip(finds, found, strict=True):
                self._found(find, *stored)

    def _found(self, find: Find, row: SessionRow | None, last: DeliveryRow | None, next_id: int, seq: int) -> None:
        mine = find.session
        try:
            known = (
                row is not None and row.principal == mine.principal and row.environment == self._sessions.environment
            )
            kept = row.key_hash if row is not None and known and row.key_hash is not None else bytes(32)
            if not hmac.compare_digest(kept, mine.key_hash) or row is None:
                raise SessionLost("no session with this sid and key: open another")
        except Exception as error:
            self._refuse(find, error)
            return
        if row.status == "open":
            mine.handle = self._sessions.dormant(row, last)
        stored = Stored(
            next_id=next_id,
            eid=last.eid if last is not None else None,
            t=last.t if last is not None else None,
            seq=seq,
            recovery=row.recovery,
            status=row.status,
            group=row.group,
        )
        self._do(self.protocol.found(find, stored, asyncio.get_running_loop().time()))

    def _stored_all(self, sids: Sequence[str]) -> list[tuple[SessionRow | None, DeliveryRow | None, int, int]]:
        return [self._stored(sid) for sid in sids]

    def _stored(self, sid: str) -> tuple[SessionRow | None, DeliveryRow | None, int, int]:
        journal = self._runtime.journal
        row = journal.session(sid)
        if row is None:
            return None, None, 1, 0
        return row, journal.last_delivery(sid), journal.last_id(sid) + 1, journal.last_seq(sid)

    def _refuse(self, find: Find, error: Exception) -> None:
        if not isinstance(error, ErrataError):
            log.error("session could not be opened", exc_info=error)
            error = EnvironmentFailed(str(error))
        self._do(self.protocol.refused(find, error, asyncio.get_running_loop().time()))

    # -- requests -------------------------------------------------------------------------------------------------

    def _run(self, run: Run) -> None:
        if run.kind == "step":
            session: Session = run.session.handle
            try:
                request = self._reading.request(run, self._remaining(run))
            except (ErrataError, RpcRefused):
                pass  # told below
            else:
                if self._sessions.begin(session, request, None, partial(self._settled, run)):
                    return
        self._spawn(self._answer(run))

    def _remaining(self, run: Run) -> float | None:
        return None if run.deadline is None else run.deadline - asyncio.get_running_loop().time()

    def _settled(self, run: Run, done: SessionReply | None, error: Exception | None) -> None:
        """Take the outcome of a step that was begun."""
        if done is not None:
            reply = Reply("observation", done.payload, done.eid, done.t, done.digest)
            self._do(self.protocol.completed(run, reply, asyncio.get_running_loop().time()))
        else:
            assert error is not None
            self._spawn(self._answer_failure(run, error))

    async def _answer(self, run: Run) -> None:
        """Run a request to its commit, or commit its error, or give its id back."""
        session: Session = run.session.handle
        try:
            reply = await self._executed(session, run)
        except Exception as error:
            await self._answer_failure(run, error)
        else:
            self._do(self.protocol.completed(run, reply, asyncio.get_running_loop().time()))

    async def _answer_failure(self, run: Run, error: Exception) -> None:
        if not isinstance(error, ErrataError):  # a defect of ours must not cost the client its session
            log.error("request failed", exc_info=error)
            error = EnvironmentFailed(str(error))
        if not CODES[error.code].consumes_id:
            self._give_back(run, error)
            return
        reply = await self._recorded_error(run.session.handle, run, error)
        if reply is not None:
            self._do(self.protocol.completed(run, reply, asyncio.get_running_loop().time()))

    async def _executed(self, session: Session, run: Run) -> Reply:
        if run.kind == "fork":
            return await self._fork(session, run)
        if run.kind == "close":
            return await self._close(session, run)
        if run.kind == "reset" and not self.protocol.config.production:
            injected = injected_fork(object_of(run.data))
            if injected is not None:
                return await self._reset_to(session, run, *injected)
        try:
            request = self._reading.request(run, self._remaining(run))
        except RpcRefused as refused:
            row = self._row(session, run, to_json(refused.response))
            await self._runtime.journal.commit(row)
            return reply_of(row)
        done = await self._sessions.run(session, request)
        kind = "mcp" if run.kind == "mcp" else "observation"
        return Reply(kind, done.payload, done.eid, done.t, done.digest)

    def _give_back(self, run: Run, error: ErrataError) -> None:
        """Take an error that consumes no id: nothing ran, or the session is over."""
        if isinstance(error, SessionLost | SessionUnknown | SessionClosed):
            reason: EndReason = "lost" if isinstance(error, SessionLost) else "closed"
            self._end(run.session.sid, reason)
            self._spawn(self._sessions.close(run.session.handle))  # its row says already what became of it
        else:
            self._do(self.protocol.rejected(run, error))

    async def _recorded_error(self, session: Session, run: Run | Record, error: ErrataError) -> Reply | None:
        """Commit an error as the reply to a request; None where that could not be."""
        row = error_row(self._admitted(session, run), error)
        return await self._committed(run, row)

    async def _committed(self, run: Run | Record, row: DeliveryRow) -> Reply | None:
        try:
            await self._runtime.journal.commit(row)
        except ErrataError as refusal:
            log.error("session %s: a reply could not be journaled: %s", name_of(run.session.sid), refusal.message)
            if isinstance(run, Run):
                self._give_back(
                    run, refusal if not CODES[refusal.code].consumes_id else JournalUnavailable(str(refusal))
                )
            return None
        return reply_of(row)

    def _admitted(self, session: Session, run: Run | Record) -> Admitted:
        return Admitted(
            eid=session.eid or "",
            t=(session.t or 0) + 1,
            sid=session.sid,
            id=run.id,
            kind=run.kind,
            request=run.data,
            created=self._runtime.clock.time(),
            request_sha=run.sha,
        )

    def _row(self, session: Session, run: Run, payload: bytes) -> DeliveryRow:
        """Return the row of a reply that is no delivery."""
        return replied_row(self._admitted(session, run), payload)

    def _record(self, record: Record) -> None:
        self._spawn(self._record_refusal(record))

    async def _record_refusal(self, record: Record) -> None:
        session: Session = record.session.handle
        data: dict[str, Any] = msgspec.json.decode(record.reply.data)
        row = refused_row(self._admitted(session, record), record.reply.data, data["code"])
        reply = await self._committed(record, row)
        if reply is not None:
            self._do(self.protocol.completed(record, reply, asyncio.get_running_loop().time()))

    async def _fork(self, session: Session, run: Run) -> Reply:
        """Make a child in one commit with the reply that says so."""
        fork = run.fork
        assert fork is not None
        eid = fork.eid or session.eid
        if eid is None:
            raise StateNotReady("this session has delivered nothing yet: reset it first")
        if eid == session.eid and fork.t > (session.t or 0):
            raise StateNotReady(f"t={fork.t} is beyond the last commit, t={session.t}: step first", t=session.t)
        parent = await self._replay.delivery(eid, fork.t, session.row.principal)
        if parent.sid != session.sid:
            raise UnknownEpisode(eid)
        child = await self._replay.child(
            parent, journal_sid(fork.sid), run.data, key_hash=fork.key_hash, group=session.row.group
        )
        told = {"sid": fork.sid, "eid": child.eid, "t": 0, "origin": {"eid": eid, "t": fork.t}}
        row = self._row(session, run, msgspec.json.encode(told))
        async with session.turn:
            await self._runtime.journal.commit(*child.records, row)
        return reply_of(row)

    async def _reset_to(self, session: Session, run: Run, eid: str, t: int) -> Reply:
        """Let a session go on from a state(t), as a fork in place (PROTOCOL D11)."""
        parent = await self._replay.delivery(eid, t, session.row.principal)
        child = await self._replay.child(parent, session.sid, run.data)
        _, episode, _ = child.records
        admitted = replace(self._admitted(session, run), eid=child.eid, t=0)
        row = forked_row(parent, admitted)
        async with session.turn:
            await self._runtime.journal.commit(episode, row)
            host, session.host = session.host, None  # the next request wakes another one there
            session.eid, session.t = child.eid, 0
            if host is not None:
                await host.close()
        return reply_of(row)

    async def _close(self, session: Session, run: Run) -> Reply:
        row = self._row(session, run, b"{}")
        await self._sessions.close(session, with_records=(row,))
        self._idle.pop(run.session.sid, None)
        return reply_of(row)

    # -- what was said before ---------------------------------------------------------------------------------------

    def _recall(self, recall: Recall) -> None:
        self._spawn(self._recall_replies(recall))

    async def _recall_replies(self, recall: Recall) -> None:
        sid = journal_sid(recall.session.sid)
        rows = await self._runtime.read(self._runtime.journal.replies, sid, recall.first, recall.last)
        found = {row.id: recorded_of(row) for row in rows}
        replies = [found.get(id) or Recorded(id, "step", b"", None) for id in range(recall.first, recall.last + 1)]
        self._do(self.protocol.recalled(recall, replies))

    def _recall_pushes(self, recall: RecallPushes) -> None:
        self._spawn(self._recall_rewards(recall))

    async def _recall_rewards(self, recall: RecallPushes) -> None:
        sid = journal_sid(recall.session.sid)
        rows = await self._runtime.read(self._runtime.journal.pushes, sid, recall.first, recall.last)
        pushes = [(row.seq, push_data(row)) for row in rows if row.seq is not None]
        self._do(self.protocol.pushes_recalled(recall, pushes))

    def _pushed(self, sid: str, row: RewardRow) -> None:
        """Take a late reward that was committed, on whatever event loop it was posted."""
        if self._loop is None or self._loop.is_closed() or row.seq is None:
            return
        if self._loop is not asyncio.get_running_loop():
            self._loop.call_soon_threadsafe(self._pushed, sid, row)
            return
        self._do(self.protocol.pushed(sid.removeprefix(_PREFIX), row.seq, push_data(row)))

    # -- reads ------------------------------------------------------------------------------------------------------

    def _read(self, read: Read) -> None:
        self._spawn(self._answer_read(read))

    async def _answer_read(self, read: Read) -> None:
        try:
            reply = await self._looked_up(read)
        except ErrataError as error:
            reply = Reply("error", msgspec.json.encode(error.to_wire()))
        except Exception as error:  # a defect of ours, or what the environment's state is made of
            log.exception("a read failed")
            reply = Reply("error", msgspec.json.encode(EnvironmentFailed(str(error)).to_wire()))
        self._do(self.protocol.answered(read, reply))

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
            row = await self._replay.state_at(session, fields["t"], fields.get("eid"), principal)
            return Reply("state_at", row.payload, row.eid, row.t, wire_digest(row.digest), row.wire_kind)
        if read.kind == "state":
            try:
                return Reply("state", to_json(await self._sessions.state(session), inf_nan_mode="null"))
            except ValueError as error:
                raise EnvironmentOutputInvalid(f"the environment's state has no JSON form: {error}") from error
        if read.kind == "rewards":
            eid = fields.get("eid") or session.eid
            rows = [] if eid is None else await self._runtime.read(self._runtime.journal.rewards, eid)
            mine = [push_data(row) for row in rows if row.sid == session.sid]
            return Reply("rewards", b"[" + b",".join(mine) + b"]")
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
        await self._runtime.start()
        rows = await self._runtime.read(self._runtime.journal.open_sessions)
        mine = [
            row
            for row in rows
            if row.group == group
            and row.principal == principal
            and row.key_hash is not None
            and row.environment == self._sessions.environment
        ]
        for row in mine:
            await self._sessions.close(self._sessions.dormant(row, None))
            self._end(row.sid.removeprefix(_PREFIX), "closed")
        return len(mine)

    # -- sleep ------------------------------------------------------------------------------------------------------

    def _hibernate(self, effect: Hibernate) -> None:
        self._spawn(self._sleep(effect))

    async def _sleep(self, effect: Hibernate) -> None:
        session: Session | None = effect.session.handle
        self._idle.pop(effect.session.sid, None)
        if session is not None:
            await self._sessions.sleep(session)
        self._do(self.protocol.slept(effect, asyncio.get_running_loop().time()))

    def oldest(self, room: Room) -> Session | None:
        """Return the session detached longest whose instance another may have, where that frees a place of ``room``."""
        for sid, session in list(self._idle.items()):
            mine = self.protocol.session(sid)
            if mine is None or mine.connection is not None or session.host is None:
                del self._idle[sid]
            elif not session.turn.busy and not mine.queue and room.freed_by(session.room):
                return session
        return None

    def lost(self, session: Session) -> None:
        """Take that a session's instance was taken, and it cannot be continued."""
        self._end(session.sid.removeprefix(_PREFIX), "lost")

    def _expire(self, mine: ServerSession, since: float) -> None:
        """End a session that nobody came back to, as upstream does after its ``session_timeout``."""
        if mine.state is State.DETACHED and mine.detached_at == since and not mine.queue:
            self._spawn(self._end_expired(mine))

    async def _end_expired(self, mine: ServerSession) -> None:
        await self._sessions.close(mine.handle, status="expired")
        self._end(mine.sid, "expired")

    def _end(self, sid: str, reason: EndReason) -> None:
        self._idle.pop(sid, None)
        self._do(self.protocol.ended(sid, reason, asyncio.get_running_loop().time()))
