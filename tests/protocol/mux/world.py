"""A world for the two machines: a journal that lasts, wires that lose, repeat and delay, and shells that crash."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from errata_protocol.capabilities import ServerLimits
from errata_protocol.errors import CapacityReached, ErrataError, JournalUnavailable, SessionLost
from errata_protocol.mux import (
    Answered,
    AnswerRead,
    Attached,
    ClientConfig,
    ClientProtocol,
    ClientSession,
    Effect,
    EncodedReply,
    Failed,
    FindSession,
    ForgetReplies,
    Hibernate,
    Pushed,
    ReadPushes,
    ReadReplies,
    RecordedReply,
    RecordError,
    Replied,
    RunRequest,
    ServerConfig,
    ServerConnection,
    ServerProtocol,
    SessionEnded,
    Stored,
    TakenOver,
    Write,
)
from errata_protocol.payload import digest

TYPES = {"reset": "observation", "step": "observation", "mcp": "mcp"}


def sid_of(n: int) -> str:
    """Return the n-th session id, as long as the protocol wants it."""
    return f"session-{n:0>20}"


def key_of(n: int) -> str:
    return f"key-{n:0>24}"


@dataclass
class Row:
    """A session in the journal."""

    key_hash: bytes
    principal: str | None
    group: str | None = None
    status: str = "open"
    requests: list[RecordedReply] = field(default_factory=list)
    pushes: list[bytes] = field(default_factory=list)
    eid: str | None = None
    t: int | None = None
    episodes: int = 0

    def stored(self) -> Stored:
        return Stored(
            next_id=len(self.requests) + 1,
            eid=self.eid,
            t=self.t,
            seq=len(self.pushes),
            recovery="snapshot",
            status=self.status,  # type: ignore[arg-type]
            group=self.group,
        )


class Journal:
    """What survives a crash of the server."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def find(self, effect: FindSession) -> Stored | ErrataError:
        session = effect.session
        row = self.rows.get(session.sid)
        if row is None and effect.make:
            row = self.rows[session.sid] = Row(session.key_hash, session.principal, session.group)
        if row is None or row.key_hash != session.key_hash or row.principal != session.principal:
            return SessionLost("no")
        return row.stored()

    def execute(self, effect: RunRequest) -> EncodedReply:
        """Run a request and commit it: one step, as the environment is recoverable."""
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
            fork = effect.fork
            assert fork is not None
            if row.t is None or fork.t > row.t:
                return EncodedReply("error", b'{"message":"none","code":"T_OUT_OF_RANGE"}')
            eid = f"{row.eid}-{fork.sid[-3:]}-{effect.id}"
            self.rows[fork.sid] = Row(fork.key_hash, row.principal, eid=eid, t=0)
            data = {"sid": fork.sid, "eid": eid, "t": 0, "origin": {"eid": row.eid, "t": fork.t}}
            return EncodedReply("forked", json.dumps(data).encode())
        if effect.kind == "reset" or row.eid is None:
            row.episodes += 1
            row.eid, row.t = f"{effect.session.sid}.e{row.episodes}", 0
        else:
            assert row.t is not None
            row.t += 1
        payload = b'{"observation":{"echo":' + effect.data + b'},"reward":null,"done":false}'
        return EncodedReply(TYPES[effect.kind], payload, row.eid, row.t, digest(payload))

    def record(self, effect: RecordError) -> None:
        row = self.rows[effect.session.sid]
        assert effect.id == len(row.requests) + 1
        row.requests.append(RecordedReply(effect.id, effect.kind, effect.sha, effect.reply, effect.data))


class ServerShell:
    """Performs effects, one at a time, whenever it is told to."""

    def __init__(self, journal: Journal, config: ServerConfig) -> None:
        self.journal = journal
        self.protocol = ServerProtocol(config)
        self.due: list[Effect] = []
        self.writable: set[ServerConnection] = set()
        self.forgotten: list[ForgetReplies] = []

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Write):
                self.writable.add(effect.connection)
            elif isinstance(effect, ForgetReplies):
                self.forgotten.append(effect)
            else:
                self.due.append(effect)

    def perform(self, index: int, now: float, *, fail: bool = False) -> None:
        """Perform one due effect; with ``fail`` one that can be refused is."""
        effect = self.due.pop(index)
        protocol, journal = self.protocol, self.journal
        if isinstance(effect, FindSession):
            if fail and effect.make and effect.session.sid not in journal.rows:
                self.take(protocol.find_failed(effect, CapacityReached("full", retry_after=0.1), now))
                return
            found = journal.find(effect)
            if isinstance(found, Stored):
                self.take(protocol.found(effect, found, now))
            else:
                self.take(protocol.find_failed(effect, found, now))
        elif isinstance(effect, RunRequest):
            if fail:
                self.take(protocol.rejected(effect, JournalUnavailable("no space", retry_after=0.0)))
            else:
                self.take(protocol.completed(effect, journal.execute(effect), now))
        elif isinstance(effect, RecordError):
            journal.record(effect)
            self.take(protocol.completed(effect, effect.reply, now))
        elif isinstance(effect, ReadReplies):
            rows = journal.rows[effect.session.sid].requests[effect.first - 1 : effect.last]
            assert len(rows) == effect.last - effect.first + 1
            self.take(protocol.replies_read(effect, rows))
        elif isinstance(effect, ReadPushes):
            pushes = journal.rows[effect.session.sid].pushes
            seqs = range(effect.first, effect.last + 1)
            self.take(protocol.pushes_read(effect, [(seq, pushes[seq - 1]) for seq in seqs]))
        elif isinstance(effect, AnswerRead):
            self.take(protocol.read_answered(effect, EncodedReply("state", b'{"step_count":1}')))
        elif isinstance(effect, Hibernate):
            self.take(protocol.hibernated(effect, now))
        else:
            raise AssertionError(effect)


@dataclass(eq=False)
class Wire:
    """One connection. Either end may be gone while the other does not know."""

    server: ServerConnection | None
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)


class World:
    """A client, a server, and what is between them."""

    def __init__(self, server: ServerConfig | None = None, client: ClientConfig | None = None) -> None:
        self.now = 1000.0
        self.server_config = server or ServerConfig(
            limits=ServerLimits(in_flight_session=3, in_flight_socket=6, detach_ttl_s=10.0, max_elements=8),
            retry_after_s=0.5,
            kept_replies=1,
        )
        self.client_config = client or ClientConfig(
            in_flight_session=4, in_flight_socket=7, max_elements=8, retry_after_s=0.5, drain_s=2.0, ack_every=3
        )
        self.journal = Journal()
        self.shell = ServerShell(self.journal, self.server_config)
        self.client = ClientProtocol(self.client_config)
        self.wires: list[Wire] = []
        self.wire: Wire | None = None  # the client's
        self.tokens = 0
        # What the trainer keeps through its own crashes.
        self.keys: dict[str, str] = {}
        self.replies: dict[str, list[Any]] = {}
        self.pushes: dict[str, list[int]] = {}
        self.opened: set[str] = set()
        self.over: set[str] = set()
        self.given_up: set[str] = set()
        self.failures: list[Failed] = []
        self.events: list[Any] = []
        self.crashed = False
        self.answers = 0

    # -- the client -----------------------------------------------------------------------------------------------

    def open(self) -> ClientSession:
        n = len(self.keys)
        sid, key = sid_of(n), key_of(n)
        self._know(sid, key)
        return self.client.open(sid, key)

    def _know(self, sid: str, key: str) -> None:
        self.keys[sid] = key
        self.replies[sid], self.pushes[sid] = [], []

    def live(self) -> list[ClientSession]:
        return list(self.client.sessions.values())

    def request(self, session: ClientSession, kind: Any, **more: Any) -> None:
        self.tokens += 1
        data = {"token": self.tokens}
        if kind == "mcp":
            data |= {"method": "tools/call"}
        self.client.request(session, kind, json.dumps(data).encode() if kind != "close" else b"{}", **more)

    def fork(self, session: ClientSession, t: int) -> None:
        n = len(self.keys)
        self._know(sid_of(n), key_of(n))
        self.client.fork(session, t, sid_of(n), key_of(n))

    def heard(self, events: list[Any]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, Replied) or (isinstance(event, Failed) and event.recorded):
                sid = event.session.sid
                log = self.replies[sid]
                assert event.id == len(log) + 1, "a reply came twice, was missed, or came out of order"
                row = self.journal.rows[sid].requests[event.id - 1]
                if isinstance(event, Replied):
                    assert event.payload == row.reply.data  # type: ignore[union-attr]
                else:
                    assert row.reply is not None and json.loads(row.reply.data)["code"] == event.error.code
                if event.request is not None and event.request.kind not in ("fork", "close"):
                    assert event.request.data == row.request, "the reply to another request"
                log.append(event)
            elif isinstance(event, Failed):
                self.failures.append(event)
            elif isinstance(event, Pushed):
                log_ = self.pushes[event.session.sid]
                assert event.seq == len(log_) + 1, "a push came twice, was missed, or came out of order"
                assert event.payload == self.journal.rows[event.session.sid].pushes[event.seq - 1]
                log_.append(event.seq)
            elif isinstance(event, Attached):
                self.opened.add(event.session.sid)
            elif isinstance(event, SessionEnded):
                assert event.error.code == "SESSION_CLOSED", event.error
                self.over.add(event.session.sid)
            elif isinstance(event, Answered):
                self.answers += 1
            elif isinstance(event, TakenOver):
                assert self.crashed, "nobody else is there"
                self.client.claim(event.session)  # what took it was sent by the process before this one

    def connect(self) -> None:
        self.wire = Wire(self.shell.protocol.connect())
        self.wires.append(self.wire)
        self.client.connected(self.now)

    def hang_up(self) -> None:
        """The client gives its socket up; what it sent may still arrive."""
        self.client.disconnected(self.now)
        assert self.wire is not None
        self.wire.down.clear()
        self.wire = None

    def client_sends(self, max_bytes: int | None = None) -> None:
        assert self.wire is not None
        frames = self.client.data_to_send(max_bytes)
        if self.wire.server is not None:
            self.wire.up.extend(frames)

    def client_hears(self, *, twice: bool = False) -> None:
        assert self.wire is not None
        frame = self.wire.down[0] if twice else self.wire.down.popleft()
        self.heard(self.client.receive(frame, self.now))

    def client_crashes(self) -> None:
        """The trainer starts again with what it kept: keys, and how far it has got."""
        if self.wire is not None:
            self.wire.down.clear()
            self.wire = None
        self.client = ClientProtocol(self.client_config)
        self.crashed = True
        for sid, key in self.keys.items():
            if sid in self.over or sid in self.given_up:
                continue
            if sid not in self.opened:
                self.given_up.add(sid)  # it may or may not be there: nobody counts on it
                continue
            self.client.adopt(sid, key, last=len(self.replies[sid]), last_seq=len(self.pushes[sid]))

    # -- the server -----------------------------------------------------------------------------------------------

    def server_sends(self) -> None:
        for connection in list(self.shell.writable):
            frames = connection.data_to_send()
            for wire in self.wires:
                if wire.server is connection and wire is self.wire:
                    wire.down.extend(frames)
        self.shell.writable.clear()

    def server_hears(self, wire: Wire, *, twice: bool = False) -> None:
        assert wire.server is not None
        frame = wire.up[0] if twice else wire.up.popleft()
        self.shell.take(self.shell.protocol.receive(wire.server, frame, self.now))

    def server_notices(self, wire: Wire) -> None:
        """The server sees that a socket is gone."""
        assert wire.server is not None
        self.shell.take(self.shell.protocol.disconnect(wire.server, self.now))
        wire.server = None
        wire.up.clear()

    def server_crashes(self) -> None:
        self.shell = ServerShell(self.journal, self.server_config)
        for wire in self.wires:
            wire.server = None
            wire.up.clear()

    def push(self, sid: str) -> None:
        row = self.journal.rows[sid]
        row.pushes.append(
            b'{"eid":"%s","t":0,"value":1.0,"source":"s","reward_id":"%d"}'
            % ((row.eid or "e").encode(), len(row.pushes))
        )
        self.shell.take(self.shell.protocol.pushed(sid, len(row.pushes), row.pushes[-1]))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.shell.take(self.shell.protocol.tick(self.now))
        self.heard(self.client.tick(self.now))

    # -- the end --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """A new socket and no more accidents: everything comes to its end."""
        if self.wire is not None:
            self.hang_up()
        for wire in self.wires:
            if wire.server is not None:
                while wire.up:
                    self.server_hears(wire)
                self.server_notices(wire)
        self.shell.protocol.refuse(None)
        self.connect()
        assert self.wire is not None
        for _ in range(2000):
            self.client_sends()
            while self.wire.up:
                self.server_hears(self.wire)
            while self.shell.due:
                self.shell.perform(0, self.now)
            self.server_sends()
            while self.wire.down:
                self.client_hears()
            if not self.client.has_data and not self.wire.up and not self.shell.due and not self.shell.writable:
                timer = self.client.next_timer()
                if timer is None:
                    break
                self.pass_time(max(timer - self.now, 0.001))
        else:
            raise AssertionError("it never comes to rest")

    def check_rest(self) -> None:
        """Everything that was asked has its end, exactly once."""
        for session in self.live():
            assert not session.sent and not session.unsent, "requests without an answer"
            row = self.journal.rows[session.sid]
            assert len(self.replies[session.sid]) == len(row.requests), "replies that never came"
            assert len(self.pushes[session.sid]) == len(row.pushes), "pushes that never came"
        assert not self.client.reads
        assert self.client._in_flight == 0
        for wire in self.wires:
            assert wire.server is None or wire.server.in_flight == 0
        executed = [r.request for row in self.journal.rows.values() for r in row.requests if r.kind in TYPES]
        assert len(executed) == len(set(executed)), "a request was executed twice"
        for failed in self.failures:
            if failed.error.code != "SESSION_CLOSED":
                raise AssertionError(f"a request failed without a reason: {failed.error!r}")
