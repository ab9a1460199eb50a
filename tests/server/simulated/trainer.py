"""What a client of the simulated server does, at random: ask, leave, crash, steal, intrude."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from errata_protocol.mux import ClientProtocol, ClientSession
from errata_protocol.mux.state import State

from .hearing import CONFIG, Hearing, Wanted
from .ledger import Asked, Known

if TYPE_CHECKING:
    from .world import World


class Trainer(Hearing):
    """One client process, and the one after it when it crashes.

    Args:
        world: What it lives in.
        name: For traces.
        principal: Who it is to the server.
        chance: Draws what it does.
    """

    def __init__(self, world: World, name: str, principal: str, chance: random.Random) -> None:
        super().__init__(world, name, principal, chance)
        acts: dict[Callable[[], None], int] = {
            self._open: 14,
            self._steps: 40,
            self._reset: 8,
            self._bad_step: 8,
            self._conditioned: 5,
            self._late: 4,
            self._cancel: 4,
            self._fork: 6,
            self._reset_to: 4,
            self._close: 3,
            self._close_group: 1,
            self._read_state: 8,
            self._read_other: 4,
            self._repeat: 4,
            self._contradict: 4,
            self._steal: 4,
            self._intrude: 3,
            self._post_reward: 8,
            self._leave: 8,
            self._break: 6,
            self._fall_silent: 4,
            self._mangle_up: 2,
            self._mangle_down: 2,
            self._pause: 4,
            self._nap: 3,
            self._crash: 4,
        }
        if "tools" in world.families:
            acts |= {self._call_tools: 24, self._list_tools: 6}
        if "judged" in world.families:
            acts |= {self._finish: 10}
        if "deletion" in world.families:
            acts |= {self._delete: 6, self._read_history: 6}
        if "retention" in world.families:
            acts |= {self._retain: 3}
        self._acts = _weighted(acts)

    def act(self, n: int) -> None:
        """Do something.

        Args:
            n: Number of the action in the schedule. Each has draws of its own: leaving one out changes no other.
        """
        self._draw = random.Random(f"{self.world.seed}/act {n}")
        acts, weights = self._acts
        (what,) = self._draw.choices(acts, cum_weights=weights)
        what()
        self._flush()

    # -- what it does -----------------------------------------------------------------------------------------------

    def sessions(self) -> list[ClientSession]:
        """Return its own sessions that may be asked something."""
        return [
            s
            for s in self.protocol.sessions.values()
            if s.sid not in self._intruding and s.state is not State.TAKEN_OVER
        ]

    def _pick(self) -> ClientSession | None:
        mine = self.sessions()
        return self._draw.choice(mine) if mine else None

    def _open(self) -> None:
        if len(self.sessions()) >= 3:
            self._steps()
            return
        self.begin(self.group if self._draw.random() < 0.3 else None)

    def begin(self, group: str | None) -> None:
        """Open a session.

        Args:
            group: Its group, None for none.
        """
        known = Known(self._sid(), self._secret(), self.principal, self.name, group)
        self.world.ledger.sessions[known.sid] = known
        self.note(f"{known.sid[-6:]} open")
        session = self.protocol.open(known.sid, known.key, group)
        self._request(session, "reset")
        if self._draw.random() < 0.5:
            self._request(session, "step")

    def _steps(self) -> None:
        session = self._pick()
        if session is None:
            self._open()
            return
        for _ in range(self._draw.choice([1, 1, 2, 3, 6])):
            self._request(session, "step")

    def step(self, session: ClientSession) -> None:
        """Ask for one step, after a reset where the environment may not have begun: a fork may be of a failed tool."""
        if session.eid not in self.world.ledger.begun:
            self._request(session, "reset")
        self._request(session, "step")
        self._flush()

    def _call_tools(self) -> None:
        session = self._pick()
        if session is None:
            self._open()
            return
        for _ in range(self._draw.choice([1, 1, 2, 3])):
            do = self._draw.choice(["", "", "", "", "raise", "break", "hang", "unknown", "unnamed"])
            condition = None
            if session.t is not None and self._draw.random() < 0.2:
                condition = (session.t + len(session.sent), None)
            self._request(session, "mcp", do=do, condition=condition)

    def _list_tools(self) -> None:
        if (session := self._pick()) is not None:
            self.list_tools(session)

    def list_tools(self, session: ClientSession) -> None:
        """Ask for the tools."""
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        self._wanted[self.protocol.read("mcp", session, json.dumps(asked).encode())] = Wanted()
        self._flush()

    def _finish(self) -> None:
        if (session := self._pick()) is not None:
            self._request(session, "step", do="finish")

    def _reset(self) -> None:
        if (session := self._pick()) is not None:
            self._request(session, "reset")

    def _bad_step(self) -> None:
        if (session := self._pick()) is not None:
            self._request(session, "step", do=self._draw.choice(["raise", "break", "hang", "invalid"]))

    def _conditioned(self) -> None:
        if (session := self._pick()) is not None and session.t is not None:
            eid = session.eid if self._draw.random() < 0.5 else None
            t = session.t + self._draw.choice([0, 0, len(session.sent), 1])
            self._request(session, self._draw.choice(["step", "step", "reset"]), condition=(t, eid))

    def _late(self) -> None:
        if (session := self._pick()) is not None:
            do = self._draw.choice(["", "hang"])
            self._request(session, "step", do=do, deadline_ms=self._draw.choice([1, 15, 300]))

    def _cancel(self) -> None:
        session = self._pick()
        if session is None:
            return
        self._steps()
        asked = [*session.sent.values(), *session.unsent]
        if asked:
            request = self._draw.choice(asked)
            self.note(
                f"{session.sid[-6:]} cancel {self._asked[request].token if request in self._asked else request.id}"
            )
            if self.protocol.cancel(session, request):
                self._asked.pop(request, None)

    def _fork(self) -> None:
        session = self._pick()
        if session is None or session.t is None or len(self.sessions()) >= 4:
            return
        known = self.world.ledger.sessions[session.sid]
        deliveries = known.deliveries()
        eid, t = None, self._draw.randint(0, session.t)
        if deliveries and self._draw.random() < 0.3:
            eid, t, _ = self._draw.choice(deliveries)
        child = Known(self._sid(), self._secret(), self.principal, self.name, known.group, closing=known.closing)
        self.world.ledger.sessions[child.sid] = child
        self.note(f"{session.sid[-6:]} fork at t={t} {eid} -> {child.sid[-6:]}")
        asked = self.world.ledger.ask(session.sid, "fork")
        self._asked[self.protocol.fork(session, t, child.sid, child.key, eid)] = asked

    def _reset_to(self) -> None:
        session = self._pick()
        if session is None:
            return
        deliveries = self.world.ledger.sessions[session.sid].deliveries()
        if deliveries:
            eid, t, _ = self._draw.choice(deliveries)
            self._ask(session, "reset_to", "reset", {"injected_state": {"episode_id": eid, "t": t}})

    def _close(self) -> None:
        if (session := self._pick()) is not None:
            self.close(session)

    def close(self, session: ClientSession) -> None:
        """Ask for a session's end."""
        self.world.ledger.sessions[session.sid].closing = True
        self._ask(session, "close", "close", {})
        self._flush()

    def _close_group(self) -> None:
        for known in self.world.ledger.sessions.values():
            known.closing = known.closing or (known.group == self.group and known.principal == self.principal)
        self.note("closes its group")
        self.protocol.read("close_group", None, json.dumps({"group": self.group}).encode())
        self.group = self._secret()

    def _read_state(self) -> None:
        session = self._pick()
        if session is not None and (deliveries := self.world.ledger.sessions[session.sid].deliveries()):
            self.read_state(session, *self._draw.choice(deliveries))

    def read_state(self, session: ClientSession, eid: str, t: int, payload: bytes) -> None:
        """Read what was delivered at t."""
        read = self.protocol.read("state", session, json.dumps({"t": t, "eid": eid}).encode())
        self._wanted[read] = Wanted(eid, payload, eid in self.world.ledger.deleted)
        self._flush()

    def _read_other(self) -> None:
        session = self._pick()
        match self._draw.randrange(4):
            case 0:
                self.protocol.read("capabilities")
            case 1 if session is not None:
                self.protocol.read("state", session)
            case 2 if session is not None:
                self.protocol.read("rewards", session)
            case 3 if session is not None:
                asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
                self.protocol.read("mcp", session, json.dumps(asked).encode())

    def _raw(self, session: ClientSession, id: int, kind: str, data: Any) -> None:
        if self.socket is not None and self.protocol.online:
            self.note(f"{session.sid[-6:]} {id} again: {kind} {data}")
            self.socket.send(json.dumps([{"sid": session.sid, "id": id, "type": kind, "data": data}]))

    def _repeat(self) -> None:
        """Send everything that has no reply a second time, as a proxy might."""
        session = self._pick()
        if session is not None and self.socket is not None and self.protocol.online:
            for id, request in session.sent.items():
                self.socket.send(b"[" + request.envelope(session.sid, id) + b"]")

    def _contradict(self) -> None:
        """Send another request under an id that has a reply."""
        session = self._pick()
        if session is None or session.state is not State.ATTACHED or not self._at.get(session.sid):
            return
        asked = self.world.ledger.ask(session.sid, "step")
        self.world.ledger.refused.add(asked.token)
        self._raw(session, self._draw.randint(1, self._at[session.sid]), "step", {"n": asked.token})

    def _steal(self) -> None:
        """Take over a session of another process of the same principal."""
        others = [
            k
            for k in self.world.ledger.sessions.values()
            if k.principal == self.principal
            and k.opened
            and k.ended is None
            and k.sid not in self.protocol.sessions
            and k.owner != self.name
        ]
        if not others:
            return
        known = self._draw.choice(others)
        known.owner = self.name
        last, seq = len(known.replies), known.last_seq
        self.note(f"{known.sid[-6:]} steal from {last}")
        self._adopt(known, last, seq)

    def _adopt(self, known: Known, last: int, seq: int) -> None:
        self._at[known.sid], self._seq[known.sid] = last, seq
        self._durable[known.sid] = (last, seq)
        self.protocol.adopt(known.sid, known.key, last=last, last_seq=seq)

    def _intrude(self) -> None:
        """Try to get at a session that is not its own."""
        others = [k for k in self.world.ledger.sessions.values() if k.opened and k.sid not in self.protocol.sessions]
        if not others:
            return
        known = self._draw.choice(others)
        key = known.key if known.principal != self.principal else self._secret()
        if known.sid in self._over_here:
            return
        self._intruding.add(known.sid)
        self.note(f"{known.sid[-6:]} intrude")
        if self._draw.random() < 0.5:
            self.protocol.adopt(known.sid, key, last=0, last_seq=0)
        else:
            session = self.protocol.open(known.sid, key)
            self._request(session, "step")  # goes ahead of the refusal

    def _post_reward(self) -> None:
        session = self._pick()
        if session is None or self._server is None:
            return
        deliveries = self.world.ledger.sessions[session.sid].deliveries()
        if deliveries:
            eid, t, _ = self._draw.choice(deliveries)
            self.world.visitors.post_reward(self._server, eid, t, self.principal)

    def _delete(self) -> None:
        """Delete episodes, now and then of somebody else."""
        ledger = self.world.ledger
        mine = [eid for eid, sid in ledger.session_of.items() if self._owns(sid)]
        others = [eid for eid, sid in ledger.session_of.items() if not self._owns(sid)]
        if self._server is None or not mine:
            return
        eids = self._draw.sample(mine, min(len(mine), self._draw.choice([1, 1, 2, 4])))
        if others and self._draw.random() < 0.2:
            eids.append(self._draw.choice(others))
        self.world.visitors.delete(self._server, eids, self.principal)

    def _owns(self, sid: str) -> bool:
        known = self.world.ledger.sessions.get(sid)
        return known is not None and known.principal == self.principal

    def _read_history(self) -> None:
        mine = [eid for eid, sid in self.world.ledger.session_of.items() if self._owns(sid)]
        if self._server is not None and mine:
            self.world.visitors.read(self._server, self._draw.choice(mine), self.principal)

    def _retain(self) -> None:
        if self._server is not None:
            self.world.visitors.retain(self._server)

    def _break(self) -> None:
        if self.socket is not None:
            self.note("connection reset")
            self.socket.reset()

    def _fall_silent(self) -> None:
        if self.socket is not None:
            self.note("connection silent")
            self.socket.silence(
                client_notices_s=self._draw.uniform(0.1, 1.0), server_notices_s=self._draw.choice([0.05, 1.5, 40.0])
            )

    def _mangle_up(self) -> None:
        self._steps()
        if self.socket is not None and self.protocol.online and self.protocol.has_data:
            self.note("mangles what it sends")
            self._mangled = True
            for frame in self.protocol.data_to_send():
                self.socket.send(frame, cut_at=self._draw.randrange(len(frame)))

    def _mangle_down(self) -> None:
        if self.socket is not None and self.protocol.online:
            self._mangled = True
            self._hear("[{")

    def _pause(self) -> None:
        if self.socket is not None:
            self.socket.pause()
            asyncio.get_running_loop().call_later(self._draw.uniform(0.0, 1.0), self.socket.unpause)

    def _nap(self) -> None:
        """Stay away until its sessions are hibernated."""
        self._leave(again_s=self._draw.uniform(3.0, 5.0))

    def _crash(self) -> None:
        """Begin anew with what is durable: keys, and how far it got."""
        self.note("crashes")
        sessions = self.protocol.sessions
        self.protocol = ClientProtocol(CONFIG)
        self._leave()
        self._asked.clear()
        self._wanted.clear()
        self._at.clear()
        self._seq.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for sid in sessions:
            known = self.world.ledger.sessions[sid]
            if sid in self._intruding or known.owner != self.name:
                self._durable.pop(sid, None)
            elif sid in self._durable:
                self._adopt(known, *self._durable[sid])
            # else nobody knows whether it is there; `open` is for sessions that no process has used
        self._intruding.clear()

    # -- the pieces -------------------------------------------------------------------------------------------------

    def _request(
        self,
        session: ClientSession,
        kind: str,
        *,
        do: str = "",
        condition: tuple[int, str | None] | None = None,
        deadline_ms: int | None = None,
    ) -> None:
        asked = self.world.ledger.ask(session.sid, kind, condition)
        data: dict[str, Any] = {"seed": asked.token}
        if kind == "step":
            data = {"n": asked.token, "do": do} if do else {"n": asked.token}
        if do == "invalid":
            data["n"] = "many"
        if kind == "mcp":
            data = _tool_call(asked.token, do)
        self._ask(session, asked, kind, data, condition=condition, deadline_ms=deadline_ms)

    def _ask(self, session: ClientSession, asked: Asked | str, kind: Any, data: Any, **more: Any) -> None:
        if isinstance(asked, str):
            asked = self.world.ledger.ask(session.sid, asked)
        self.note(f"{session.sid[-6:]} ask {asked.token} {kind} {data}")
        self._asked[self.protocol.request(session, kind, json.dumps(data).encode(), **more)] = asked


def _tool_call(token: int, do: str) -> dict[str, Any]:
    name = {"unknown": "lag", "unnamed": ""}.get(do, "log")
    call = {"name": name, "arguments": {"n": token, "do": do}}
    return {"jsonrpc": "2.0", "id": token, "method": "tools/call", "params": call}


def _weighted(acts: dict[Callable[[], None], int]) -> tuple[list[Callable[[], None]], list[int]]:
    total, cumulated = 0, []
    for weight in acts.values():
        total += weight
        cumulated.append(total)
    return list(acts), cumulated
