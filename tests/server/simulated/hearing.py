"""One client process of the simulated server: the real machine on connections that break, and what it hears."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import ErrataError, RemoteProtocolError
from errata_protocol.mux import (
    Answered,
    Attached,
    ClientConfig,
    ClientEvent,
    ClientProtocol,
    ClientRead,
    ClientRequest,
    ClientSession,
    Failed,
    GoneAway,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
)
from errata_protocol.mux.state import State
from errata_server.simulation import SimulatedSocket

from .environments import Tools
from .ledger import EXPIRED, NOT_MADE, Asked, Known, Outcome

if TYPE_CHECKING:
    from .server import Server
    from .world import World


class Wanted(NamedTuple):
    """What a read must be answered with: tools, or what was delivered.

    Args:
        eid: Of a delivery's episode, None for tools.
        payload: What was delivered.
        deleted: Its episode was deleted before it was asked for.
    """

    eid: str | None = None
    payload: bytes = b""
    deleted: bool = False


CONFIG = ClientConfig(
    in_flight_session=4, in_flight_socket=10, max_elements=4, retry_after_s=0.1, drain_s=1.0, ack_every=3
)


class Hearing:
    """The half of a `trainer.Trainer` that connects, listens, and checks what it is told.

    Args:
        world: What it lives in.
        name: For traces.
        principal: Who it is to the server.
        chance: Draws what it does.

    Attributes:
        protocol: The client's machine of this process.
        socket: Its connection, None while there is none.
        refusals_of_reads: Codes that a read may be refused with though nothing is wrong.
    """

    refusals_of_reads: tuple[str, ...] = ()

    def __init__(self, world: World, name: str, principal: str, chance: random.Random) -> None:
        self.world, self.name, self.principal, self.chance = world, name, principal, chance
        self.protocol = ClientProtocol(CONFIG)
        self.socket: SimulatedSocket | None = None
        self.group = self._secret()
        self._server: Server | None = None
        self._at: dict[str, int] = {}  # last id that this process heard, by sid
        self._seq: dict[str, int] = {}
        self._asked: dict[ClientRequest, Asked] = {}
        self._wanted: dict[ClientRead, Wanted] = {}
        self._intruding: set[str] = set()
        self._over_here: set[str] = set()  # sessions that ended on this socket, and may be told so more than once
        self._durable: dict[str, tuple[int, int]] = {}  # what it finds after a crash
        self._draw = chance
        self._keeps = chance.choice([1.0, 1.0, 0.5])  # chance that a reply is kept at once
        self._mangled = False
        self._left: list[str] = []
        self._away_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._latency_s = chance.choice([(0.0, 0.0), (0.001, 0.001), (0.0, 0.03), (0.0, 0.5)])

    # -- the server and the network ---------------------------------------------------------------------------------

    def server_is_up(self, server: Server) -> None:
        """Take that a server listens; called on its event loop."""
        self._timer = None  # the one before was of another loop
        for text in self._left:
            if self.socket is not None:
                self._hear(text)
        self._left = []
        if self.socket is not None:
            self._lost()
        self._server = server
        self._arm()
        self._connect_later()

    def server_died(self) -> None:
        """Take that the server went down, in that moment; what it had sent may still be heard."""
        self._server = None
        if self.socket is not None:
            self._left = self.socket.orphaned()

    @property
    def idle(self) -> bool:
        """All that was asked has its outcome, and every session is attached."""
        if not self.protocol.online or self.protocol.has_data or self.protocol.reads:
            return False
        return all(s.state is State.ATTACHED and not s.sent and not s.unsent for s in self.protocol.sessions.values())

    def stuck(self) -> str:
        """Say what it waits for."""
        waits = [
            f"{s.sid[-6:]} {s.state.name} sent {list(s.sent)} unsent {len(s.unsent)} held {s.held_until}"
            for s in self.protocol.sessions.values()
            if s.state is not State.ATTACHED or s.sent or s.unsent
        ]
        return f"{self.name} online={self.protocol.online} reads={list(self.protocol.reads)} {waits}"

    def _connect_later(self) -> None:
        asyncio.get_running_loop().call_later(self.chance.uniform(0.0, 0.2), self._connect)

    def _connect(self) -> None:
        if self.socket is not None or self._server is None:
            return
        self._mangled = False
        self._over_here.clear()
        self._away_s = None
        self.socket = socket = SimulatedSocket(
            self._server.app,
            self.chance,
            on_open=lambda _: self._online(socket),
            on_frame=lambda text: self._hear(text) if self.socket is socket else None,
            on_lost=lambda: self._lost() if self.socket is socket else None,
            latency_s=self._latency_s if self.world.faults else (0.0, 0.0),
            window_bytes=4096,
            scope={"errata.principal": self.principal},
            subprotocols=(PROTOCOL_NAME,),
            server_loop=self._server.loop,
        )
        self.world.serve(socket)

    def _online(self, socket: SimulatedSocket) -> None:
        if self.socket is socket:
            self.note("online")
            self.protocol.connected(self._now())
            self._flush()

    def _lost(self) -> None:
        self.socket = None
        self.note("lost its socket")
        if self.protocol.online:
            self.protocol.disconnected(self._now())
        if self._server is not None:
            self._connect_later()

    def hang_up(self) -> None:
        """Give the socket up, for good or until the next `server_is_up`."""
        self._server = None
        self._leave()

    def _leave(self, again_s: float | None = None) -> None:
        if self.socket is None:
            return
        self.note("leaves its socket")
        socket, self.socket = self.socket, None
        socket.leave(after_s=self.chance.choice([0.0, 0.1, 2.0]) if self.world.faults else 0.0)
        if self.protocol.online:
            self.protocol.disconnected(self._now())
        if self._server is not None:
            wait_s = self.chance.uniform(0.0, 0.1) if again_s is None else again_s
            asyncio.get_running_loop().call_later(wait_s, self._connect)

    def _flush(self) -> None:
        if self.socket is not None and self.protocol.online:
            while self.protocol.has_data:
                for frame in self.protocol.data_to_send():
                    self.socket.send(frame)
        self._arm()

    def _arm(self) -> None:
        due = self.protocol.next_timer()
        if due is not None and self._server is not None and (self._timer is None or self._timer.when() > due):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._take(self.protocol.tick(self._now()))
        self._flush()

    def _hear(self, text: str) -> None:
        try:
            events = self.protocol.receive(text, self._now())
        except RemoteProtocolError as error:
            if not self._mangled:
                raise AssertionError(f"{self.name}: the server broke the protocol: {error}") from error
            self.note(f"gives up a mangled socket: {error}")
            if self._server is None:
                self._lost()
            else:
                self._leave()
            return
        self._take(events)
        if self.socket is not None and self._server is not None:
            self._flush()
            if self._away_s is not None and all(not s.sent for s in self.protocol.sessions.values()):
                self._leave(again_s=self._away_s)

    # -- what it hears ----------------------------------------------------------------------------------------------

    def _take(self, events: Sequence[ClientEvent]) -> None:
        for event in events:
            match event:
                case Attached():
                    self._opened(event)
                case Replied():
                    place = (event.eid, event.t) if event.t is not None else (None, None)
                    self._answered(event.session, event.id, event.request, Outcome(event.type, *place, event.payload))
                    if event.type == "forked":
                        self._forked(event)
                case Failed(recorded=True):
                    assert event.id is not None
                    outcome = Outcome("error", None, None, event.error.code.encode())
                    self._answered(event.session, event.id, event.request, outcome)
                case Failed():
                    self.note(f"{event.session.sid[-6:]} request failed: {event.error.code}")
                    if event.error.code == "CONFLICT":
                        self.world.conflicts += 1
                    asked = self._asked.pop(event.request, None) if event.request is not None else None
                    self.world.ledger.failed(asked.token if asked is not None else None, event.error.code)
                case Pushed():
                    self._pushed(event)
                case Answered():
                    self._read(event)
                case Refused():
                    self.note(f"{event.session.sid[-6:]} refused: {event.error.code}")
                    if event.error.code == "MISDIRECTED":
                        self._misdirected()
                case TakenOver():
                    self._taken_over(event.session)
                case SessionEnded():
                    self._ended(event.session.sid, event.error)
                case GoneAway():
                    self.note(f"is told to come again in {event.retry_after_s:g} s")
                    self._away_s = event.retry_after_s

    def _opened(self, event: Attached) -> None:
        sid, position = event.session.sid, event.position
        assert sid not in self._intruding, f"{self.name} got into {sid[-6:]}, which is not its own"
        known = self.world.ledger.sessions[sid]
        known.opened = True
        assert position.next_id > self._at.get(sid, 0), f"{sid[-6:]} is at {position.next_id}: it lost replies"
        assert position.seq >= self._seq.get(sid, 0), f"{sid[-6:]} is at seq {position.seq}: it lost pushes"
        self._durable.setdefault(sid, (0, 0))
        self.note(f"{sid[-6:]} attached: next {position.next_id} t={position.t} seq={position.seq}")

    def _answered(self, session: ClientSession, id: int, request: ClientRequest | None, outcome: Outcome) -> None:
        sid = session.sid
        assert id == self._at.get(sid, 0) + 1, f"{sid[-6:]}: id {id} after {self._at.get(sid, 0)}"
        self._at[sid] = id
        said = outcome.payload.decode() if outcome.type == "error" else f"t={outcome.t}"
        asked = self._asked.pop(request, None) if request is not None else None
        self.note(f"{sid[-6:]} {id}: {outcome.type} {said} token={asked.token if asked else None}")
        if outcome == EXPIRED:
            self.world.expired += 1
        if outcome.type == "mcp" and outcome.t is not None:
            said = json.loads(outcome.payload)
            if asked is not None:
                assert said["id"] == asked.token, f"{sid[-6:]} id {id} answers {said}, asked was {asked.token}"
            self.world.tool_calls += 1
        if asked is not None and asked.kind in ("step", "reset") and outcome.type == "observation":
            observation = json.loads(outcome.payload)["observation"]
            assert observation["n"] == asked.token, (
                f"{self.name}: {sid[-6:]} id {id} answers {observation['n']}, asked was {asked.token}"
            )
        self.world.ledger.heard(sid, id, outcome, self.name)
        self.world.acknowledged += 1
        self._keep(sid)

    def _keep(self, sid: str) -> None:
        if self.chance.random() < self._keeps:
            self._durable[sid] = (self._at.get(sid, 0), self._seq.get(sid, 0))

    def _forked(self, event: Replied) -> None:
        child = self.world.ledger.forked(event.payload)
        child.opened = True
        if event.request is not None:
            self._durable.setdefault(child.sid, (0, 0))

    def _pushed(self, event: Pushed) -> None:
        sid = event.session.sid
        known, before = self.world.ledger.sessions[sid], self._seq.get(sid, 0)
        in_order = event.seq > before if known.has_deleted else event.seq == before + 1
        assert in_order, f"{sid[-6:]}: push {event.seq} after {before}"
        self._seq[sid] = event.seq
        self.note(f"{sid[-6:]} push {event.seq}")
        known.pushed(event.seq, event.payload)
        self._keep(sid)

    def _read(self, event: Answered) -> None:
        wanted = self._wanted.pop(event.read, None)
        if wanted is None:
            return
        if event.error is not None:
            code = event.error.code
            gone = code == "UNKNOWN_EPISODE" and wanted.eid in self.world.ledger.deleting
            session = event.read.session
            not_made = code in NOT_MADE and session is not None and not self.world.ledger.sessions[session.sid].opened
            elsewhere = code in self.refusals_of_reads
            assert gone or not_made or elsewhere or code.startswith("SESSION_"), f"a read failed: {event.error}"
        elif wanted.eid is None:
            assert event.read.session is not None
            self._tools(json.loads(event.payload), self.world.ledger.sessions[event.read.session.sid])
        else:
            assert not wanted.deleted, f"state({event.t}) of {event.eid} is read, which was deleted"
            assert event.payload == wanted.payload, (
                f"state({event.t}) of {event.eid} is {event.payload!r}, was {wanted.payload!r}"
            )
            self.world.states += 1

    def _tools(self, said: dict[str, Any], known: Known) -> None:
        if "result" in said:
            assert said["result"]["tools"] == Tools.LISTED, f"the tools are {said}"
            self.world.tools_listed += 1
        else:
            code = said["error"]["data"]["code"]
            self.note(f"tools/list failed: {code}")
            lost = code == "SESSION_LOST" and self.world.ledger.may_be_lost
            closed = code == "SESSION_ERROR" and known.closing  # the list is no step: it does not wait for a close
            expected = self.world.faults or lost or closed or known.has_deleted
            assert expected, f"the tools could not be listed: {said}"

    def _taken_over(self, session: ClientSession) -> None:
        known = self.world.ledger.sessions[session.sid]
        if known.owner == self.name and known.ended is None:
            self.note(f"{session.sid[-6:]} taken over: claims it back")
            self.protocol.claim(session)  # what took it was sent by a process before this one
        elif self.world.faults and self.chance.random() < 0.5:
            self.note(f"{session.sid[-6:]} taken over: fights")
            known.owner = self.name
            self.protocol.claim(session)
        else:
            self.note(f"{session.sid[-6:]} taken over: gives in")
            self._drop(session)

    def _ended(self, sid: str, error: ErrataError) -> None:
        self.note(f"{sid[-6:]} over: {error.code}")
        self._durable.pop(sid, None)
        if sid in self._intruding:
            hung = error.code in ("TIMEOUT", "EXECUTION_ERROR")  # before anybody looked whose it is
            assert hung or error.code == "SESSION_LOST", f"an intruder was told {error!r}"
            assert not error.details.get("eid"), f"an intruder learns where the session stands: {error!r}"
            self._intruding.discard(sid)
            self._at.pop(sid, None)
            self.world.intruders += 1
            return
        self._over_here.add(sid)
        self.world.ledger.ended(sid, error.code)

    def _misdirected(self) -> None:
        """Called when the server at the address turns out to be another one."""
        raise AssertionError(f"{self.name} was sent elsewhere, and there is one server")

    def _drop(self, session: ClientSession) -> None:
        """Let go of a session that is another's now; what it had asked for may have happened or not."""
        for request in (*session.sent.values(), *session.unsent):
            self._asked.pop(request, None)
        self._wanted = {read: wanted for read, wanted in self._wanted.items() if read.session is not session}
        self.protocol.forget(session)
        for kept in (self._at, self._seq, self._durable):
            kept.pop(session.sid, None)  # type: ignore[attr-defined]

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.world.machine.note(f"{self.name} {text}")

    def _sid(self) -> str:
        """Return the sid of a new session."""
        return self._secret()

    def _secret(self) -> str:
        return f"{self.chance.getrandbits(132):033x}"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
