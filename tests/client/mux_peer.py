"""A multiplexed server for the client's tests: the real `ServerProtocol` on a loopback WebSocket, and accidents.

The environment counts; the journal outlives restarts. Everything runs in the loop that started it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from errata_protocol.capabilities import PROTOCOL_NAME, Capabilities, ServerLimits
from errata_protocol.errors import CapacityReached, ErrataError, SessionLost, StateOutOfRange, UnknownEpisode
from errata_protocol.mux import (
    AnswerRead,
    Effect,
    EncodedReply,
    FindSession,
    ForgetReplies,
    Hibernate,
    ReadPushes,
    ReadReplies,
    RecordedReply,
    RecordError,
    RunRequest,
    ServerConfig,
    ServerProtocol,
    Stored,
    Write,
)
from errata_protocol.mux.server_session import ServerConnection as Peer
from errata_protocol.payload import digest

TYPES = {"reset": "observation", "step": "observation", "mcp": "mcp"}


class Row:
    """A session in the journal."""

    def __init__(self, key_hash: bytes, group: str | None = None) -> None:
        self.key_hash = key_hash
        self.group = group
        self.status: Any = "open"
        self.requests: list[RecordedReply] = []
        self.pushes: list[bytes] = []
        self.episodes: dict[str, list[EncodedReply]] = {}
        self.eid: str | None = None
        self.count = 0

    @property
    def t(self) -> int | None:
        """The last delivery."""
        return None if self.eid is None else len(self.episodes[self.eid]) - 1

    def stored(self) -> Stored:
        """As the machine asks for it."""
        next_id, seq = len(self.requests) + 1, len(self.pushes)
        return Stored(next_id, self.eid, self.t, seq, "snapshot", self.status, self.group)


class MuxPeer:
    """The server's memory, its journal and its accidents.

    Attributes:
        rows: Journal by sid.
        executed: (sid, what) of every request the environment ran, in order.
        held: While set, actions with this text wait for `release`.
        broken: Errors that the next steps are answered with, recorded.
        capacity: Sessions that may be made.
        garble: Frames to spoil on their way to the client.
        twice: Send every frame twice.
        silent: Take frames and do nothing with them.
        cut_at: Abort the socket at these counts of frames sent, counted over all sockets.
        paths: Paths of the handshakes.

    Args:
        limits: Limits that the server says it has.
        member: Shard of this member of a server that has several; None for a server of one process.
    """

    def __init__(self, limits: ServerLimits | None = None, member: str | None = None) -> None:
        self.config = ServerConfig(limits=limits or ServerLimits(), retry_after_s=0.02, shard=member)
        self.protocol = ServerProtocol(self.config)
        self.rows: dict[str, Row] = {}
        self.executed: list[tuple[str, Any]] = []
        self.broken: list[ErrataError] = []
        self.capacity = 1 << 30
        self.garble: list[Callable[[bytes], bytes]] = []
        self.twice = False
        self.silent = False
        self.cut_at: set[int] = set()
        self.frames_sent = 0
        self.frames_received = 0
        self.headers: list[str | None] = []
        self.paths: list[str] = []
        self.url = ""
        self.arrived = asyncio.Semaphore(0)
        """Released for each request that is held."""
        self._held = asyncio.Event()
        self._held.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: dict[Peer, ServerConnection] = {}
        self._server: Server | None = None

    # -- control

    def hold(self) -> None:
        """Let requests wait before they act."""
        self._held.clear()

    def release(self) -> None:
        """Let them act."""
        self._held.set()

    def cut(self) -> None:
        """Abort every socket."""
        for socket in list(self._sockets.values()):
            socket.transport.abort()

    def go_half_open(self) -> None:
        """Neither read from nor write to the sockets there are, pongs included."""
        for socket in self._sockets.values():
            socket.transport.pause_reading()

    def lose_memory(self) -> None:
        """Crash and start again: only the journal is left."""
        self.protocol = ServerProtocol(self.config)
        for task in self._tasks:
            task.cancel()
        self.cut()

    async def stop(self) -> None:
        """Take no connections any more and abort those there are."""
        assert self._server is not None
        self._server.close(close_connections=False)
        self.cut()
        await self._server.wait_closed()

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._server = await serve(
            self._serve, "127.0.0.1", port, subprotocols=[PROTOCOL_NAME], compression=None, max_size=1 << 26
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def push(self, sid: str, value: float) -> None:
        """Commit a late reward."""
        row = self.rows[sid]
        data = {"eid": row.eid, "t": row.t, "value": value, "source": "judge", "reward_id": f"r{len(row.pushes)}"}
        row.pushes.append(json.dumps(data).encode())
        self._take(self.protocol.pushed(sid, len(row.pushes), row.pushes[-1]))

    def go_away(self, retry_after_s: float) -> None:
        """Ask every client to leave; the next socket meets a server that stays."""
        self._take(self.protocol.go_away(retry_after_s))

    def come_back(self) -> None:
        """Be the successor."""
        self.protocol = ServerProtocol(self.config)

    def steps(self, sid: str | None = None) -> list[Any]:
        """Actions that ran."""
        return [what for who, what in self.executed if sid is None or who == sid]

    @property
    def sids(self) -> list[str]:
        """Sessions ever made."""
        return list(self.rows)

    # -- sockets

    async def _serve(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        self.headers.append(socket.request.headers.get("authorization"))
        self.paths.append(socket.request.path)
        protocol = self.protocol
        peer = protocol.connect()
        self._sockets[peer] = socket
        try:
            async for frame in socket:
                self.frames_received += 1
                if not self.silent and protocol is self.protocol:
                    self._take(protocol.receive(peer, frame, self._now()))
        except ConnectionClosed:
            pass
        finally:
            del self._sockets[peer]
            if protocol is self.protocol:
                self._take(protocol.disconnect(peer, self._now()))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            task = asyncio.get_running_loop().create_task(self._perform(self.protocol, effect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _perform(self, protocol: ServerProtocol, effect: Effect) -> None:
        now = self._now()
        if isinstance(effect, Write):
            await self._write(effect.connection)
        elif isinstance(effect, FindSession):
            found = self._find(effect)
            if isinstance(found, Stored):
                self._take(protocol.found(effect, found, now))
            else:
                self._take(protocol.find_failed(effect, found, now))
        elif isinstance(effect, RunRequest):
            if not self._held.is_set():
                self.arrived.release()
                await self._held.wait()
            if protocol is self.protocol:
                self._take(protocol.completed(effect, self._execute(effect), self._now()))
        elif isinstance(effect, RecordError):
            row = self.rows[effect.session.sid]
            row.requests.append(RecordedReply(effect.id, effect.kind, effect.sha, effect.reply, effect.data))
            self._take(protocol.completed(effect, effect.reply, now))
        elif isinstance(effect, ReadReplies):
            rows = self.rows[effect.session.sid].requests[effect.first - 1 : effect.last]
            self._take(protocol.replies_read(effect, rows))
        elif isinstance(effect, ReadPushes):
            pushes = self.rows[effect.session.sid].pushes
            seqs = range(effect.first, effect.last + 1)
            self._take(protocol.pushes_read(effect, [(seq, pushes[seq - 1]) for seq in seqs]))
        elif isinstance(effect, AnswerRead):
            self._take(protocol.read_answered(effect, self._answer(effect)))
        elif isinstance(effect, Hibernate):
            self._take(protocol.hibernated(effect, now))
        else:
            assert isinstance(effect, ForgetReplies)

    async def _write(self, peer: Peer) -> None:
        try:
            while peer.has_data and (socket := self._sockets.get(peer)) is not None:
                for frame in peer.data_to_send():
                    self.frames_sent += 1
                    if self.frames_sent in self.cut_at:
                        socket.transport.abort()
                        return
                    spoiled = self.garble.pop(0)(frame) if self.garble else frame
                    for _ in range(2 if self.twice else 1):
                        await socket.send(spoiled.decode())
                if peer.has_waiting_replies and peer.accepts_input:
                    self._take(self.protocol.drained(peer))
        except ConnectionClosed:
            pass

    # -- journal and environment

    def _find(self, effect: FindSession) -> Stored | ErrataError:
        session = effect.session
        row = self.rows.get(session.sid)
        if row is None and effect.make:
            if len(self.rows) >= self.capacity:
                return CapacityReached("no room", retry_after=0.1)
            row = self.rows[session.sid] = Row(session.key_hash, session.group)
        if row is None or row.key_hash != session.key_hash:
            return SessionLost("no")
        return row.stored()

    def _execute(self, effect: RunRequest) -> EncodedReply:
        row = self.rows[effect.session.sid]
        assert effect.id == len(row.requests) + 1, "executed out of order"
        reply = self._reply(row, effect)
        row.requests.append(RecordedReply(effect.id, effect.kind, effect.sha, reply, effect.data))
        return reply

    def _reply(self, row: Row, effect: RunRequest) -> EncodedReply:
        if effect.kind == "close":
            row.status = "closed"
            return EncodedReply("closed", b"{}")
        if effect.kind == "fork":
            return self._fork(row, effect)
        said = json.loads(effect.data)
        if self.broken:
            return EncodedReply("error", json.dumps(self.broken.pop(0).to_wire()).encode())
        self.executed.append((effect.session.sid, said.get("text", effect.kind)))
        if effect.kind == "reset" or row.eid is None:
            row.eid, row.count = f"{effect.session.sid[:6]}.e{len(row.episodes) + 1}", 0
            row.episodes[row.eid] = []
        else:
            row.count += 1
        if effect.kind == "mcp":
            payload = b'{"jsonrpc":"2.0","id":1,"result":{"count":%d}}' % row.count
        else:
            text = said.get("text", "") * said.get("repeat", 1)
            observation = b'{"count": %d,"text":%s}' % (row.count, json.dumps(text).encode())
            payload = b'{"observation":' + observation + b',"reward": %d.0e0,"done":false}' % row.count
        deliveries = row.episodes[row.eid]
        reply = EncodedReply(TYPES[effect.kind], payload, row.eid, len(deliveries), digest(payload), effect.kind)  # type: ignore[arg-type]
        deliveries.append(reply)
        return reply

    def _fork(self, row: Row, effect: RunRequest) -> EncodedReply:
        fork = effect.fork
        assert fork is not None
        eid = fork.eid or row.eid
        if eid not in row.episodes:
            return EncodedReply("error", json.dumps(UnknownEpisode(str(eid)).to_wire()).encode())
        if fork.t >= len(row.episodes[eid]):
            error = StateOutOfRange(eid, fork.t, len(row.episodes[eid]))
            return EncodedReply("error", json.dumps(error.to_wire()).encode())
        child = self.rows[fork.sid] = Row(fork.key_hash, row.group)
        first = row.episodes[eid][fork.t]
        child.eid, child.count = f"{fork.sid[:6]}.f1", json.loads(first.data)["observation"]["count"]
        child.episodes[child.eid] = [first]
        origin = {"eid": eid, "t": fork.t}
        return EncodedReply(
            "forked", json.dumps({"sid": fork.sid, "eid": child.eid, "t": 0, "origin": origin}).encode()
        )

    def _answer(self, effect: AnswerRead) -> EncodedReply:
        if effect.kind == "capabilities":
            extensions = {"state_at": 1, "fork": 1, "mux": 1, "delayed_rewards": 1}
            if self.config.shard is not None:
                extensions["fleet"] = 1
            offered = Capabilities(
                environment="counter", extensions=extensions, limits=self.config.limits, shard=self.config.shard
            )
            return EncodedReply("capabilities", offered.model_dump_json().encode())
        if effect.kind == "close_group":
            ended = [
                sid for sid, row in self.rows.items() if row.group == effect.fields["group"] and row.status == "open"
            ]
            for sid in ended:
                self.rows[sid].status = "closed"
                self._take(self.protocol.ended(sid, "closed", self._now()))
            return EncodedReply("group_closed", b'{"closed":%d}' % len(ended))
        assert effect.session is not None
        row = self.rows[effect.session.sid]
        if effect.kind == "rewards":
            if effect.fields.get("eid", row.eid) not in row.episodes:
                return EncodedReply("error", json.dumps(UnknownEpisode(effect.fields["eid"]).to_wire()).encode())
            return EncodedReply("rewards", b"[" + b",".join(row.pushes) + b"]")
        if effect.kind == "mcp":
            return EncodedReply("mcp", b'{"jsonrpc":"2.0","id":1,"result":{"tools":[]}}')
        if "t" not in effect.fields:
            return EncodedReply("state", b'{"episode_id":null,"step_count":%d}' % row.count)
        eid, t = effect.fields.get("eid", row.eid), effect.fields["t"]
        if eid not in row.episodes:
            return EncodedReply("error", json.dumps(UnknownEpisode(str(eid)).to_wire()).encode())
        if t >= len(row.episodes[eid]):
            error = StateOutOfRange(eid, t, len(row.episodes[eid]))
            return EncodedReply("error", json.dumps(error.to_wire()).encode())
        past = row.episodes[eid][t]
        return EncodedReply("state_at", past.data, eid, t, past.digest, past.kind)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for something that has no event of its own."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@asynccontextmanager
async def peered(limits: ServerLimits | None = None, member: str | None = None) -> AsyncIterator[MuxPeer]:
    """Serve a peer on a loopback port."""
    peer = MuxPeer(limits, member)
    await peer.start()
    try:
        yield peer
    finally:
        peer.release()
        await peer.stop()


@contextmanager
def peered_in_a_thread() -> Iterator[MuxPeer]:
    """Serve a peer from a thread, for blocking clients."""
    started: list[MuxPeer] = []
    ready, over = threading.Event(), threading.Event()

    async def run() -> None:
        async with peered() as peer:
            started.append(peer)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="mux-peer", daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield started[0]
    finally:
        over.set()
        thread.join(60)
        assert not thread.is_alive(), "the peer did not stop"
