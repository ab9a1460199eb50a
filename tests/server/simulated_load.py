"""Clients of a simulated server that crashes under them, and what each of them is sure of.

python -m tests.server.simulated_load SEED        # the trace of one seed
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import ConcurrencyConfig, State

from errata_protocol.environment import Snapshot
from errata_protocol.errors import CapacityReached, EnvironmentFailed, JournalUnavailable, SandboxFailed, StepTimeout
from errata_protocol.replay import ForkRequest
from errata_server.environments.context import current_session
from errata_server.episodes.episodes import Episodes
from errata_server.runtime.runtime import Runtime
from errata_server.sandbox.base import Sandbox, SandboxSnapshot
from errata_server.sandbox.fake.backend import FakeBackend
from errata_server.sessions.session import Reply, Request, Session
from errata_server.sessions.sessions import Sessions
from errata_server.settings import Settings
from errata_server.simulation import DiskFaults, SimulatedMachine

from .environments import CountAction, CountObservation

CLIENTS = 5
PLACES = 3
"""Fewer environments than clients: sessions are hibernated for each other."""

INDEXED = 0.9
"""How many schedules run the journal that users run; the others run `LogJournal`, the fake that ships."""


class LogEnvironment(Environment[CountAction, CountObservation, State]):
    """Each step adds its number to a file of the sandbox: a step that is lost or acts twice is there to be read."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._sandbox: Sandbox | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        raise NotImplementedError

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        raise NotImplementedError

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        await self.aclose()
        backend = current_session().sandboxes
        await backend.start()
        self._sandbox = await backend.open()
        await self._sandbox.write_file("log", b"")
        return CountObservation(text="")

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        assert self._sandbox is not None
        if action.do == "raise":
            raise ValueError("boom")
        before = (await self._sandbox.read_file("log")).decode()
        await asyncio.sleep(0.01)
        await self._sandbox.write_file("log", f"{before}{action.n} ".encode())
        if action.do == "hang":
            await asyncio.Event().wait()
        return CountObservation(n=action.n, text=(await self._sandbox.read_file("log")).decode(), reward=1.0)

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=0)

    async def snapshot(self) -> Snapshot:
        assert self._sandbox is not None
        taken = await self._sandbox.snapshot()
        return Snapshot(taken.shell, (taken.ref,))

    async def restore(self, snapshot: Snapshot) -> None:
        backend = current_session().sandboxes
        await backend.start()
        self._sandbox = await backend.restore(SandboxSnapshot(snapshot.refs[0], snapshot.state))

    async def aclose(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.destroy()
            self._sandbox = None


class Client:
    """One client of one given-out session: steps, resets, forks and goes away, at random.

    Attributes:
        acknowledged: Payloads by (eid, t), of every delivery that was answered or read.
    """

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.acknowledged: dict[tuple[str, int], bytes] = {}
        self._chance = chance
        self._sid: str | None = None
        self._eid: str | None = None
        self._t = -1
        self._parents: dict[str, str] = {}
        """What the log of a forked episode begins with, by eid."""

    async def run(self, machine: SimulatedMachine, sessions: Sessions, episodes: Episodes, actions: int) -> None:
        """Come back to the session, check what it says, then act ``actions`` times."""
        socket = object()
        session = await self._come_back(machine, sessions, socket)
        for _ in range(actions):
            await asyncio.sleep(self._chance.uniform(0.0, 0.05))
            try:
                session = await self._act(machine, sessions, episodes, session, socket)
            except (CapacityReached, StepTimeout, SandboxFailed, EnvironmentFailed) as error:
                machine.note(f"{self.name} {error.code}")
        await sessions.lifetime.detach(session, socket)
        await asyncio.sleep(self._chance.choice([0.0, 1.0, 700.0]))
        await self.check(machine, episodes)

    async def check(self, machine: SimulatedMachine, episodes: Episodes) -> None:
        """Assert that every episode is what was acknowledged, whole and once."""
        for eid in sorted({eid for eid, _ in self.acknowledged}):
            turns = [turn.t for turn in (await episodes.reads.detail(eid, None)).turns]
            known = [t for e, t in self.acknowledged if e == eid]
            assert turns == list(range(len(turns))), f"{eid} has a hole or a double: {turns}"
            # One more may be there: it was committed and its answer died with the server.
            assert max(known) + 1 <= len(turns) <= max(known) + 2, f"{eid} has {len(turns)}, known are {known}"
        for (eid, t), payload in self.acknowledged.items():
            row = await episodes.reads.delivered(eid, t, None)
            assert row.payload == payload, f"{eid} t={t} is not what was sent"
            expected = self._parents.get(eid, "") + "".join(f"{n} " for n in range(1, t + 1))
            text = json.loads(payload)["observation"]["text"]
            assert text == expected, f"{eid} t={t}: the environment did {text!r}, not {expected!r}"

    async def _come_back(self, machine: SimulatedMachine, sessions: Sessions, socket: object) -> Session:
        while True:
            try:
                if self._sid is None:
                    session = await sessions.open(resumable=True)
                    self._sid, self._eid, self._t = session.sid, None, -1
                else:
                    session = await sessions.find(self._sid)
                break
            except CapacityReached:
                await asyncio.sleep(1.0)
        sessions.lifetime.attach(session, socket)
        if session.eid is not None and session.t is not None:
            if session.eid == self._eid:
                assert self._t <= session.t <= self._t + 1, f"{self.name} was at t={self._t}, found {session.t}"
            else:
                assert session.t == 0, "a reset that was not answered is all that can be new"
            self._eid, self._t = session.eid, session.t
            row = sessions.runtime.store.journal.delivery(session.eid, session.t)
            assert row is not None
            self.acknowledged[session.eid, session.t] = row.payload
        else:
            assert self._eid is None, f"{self.name} was at {self._eid} t={self._t}, found nothing"
        machine.note(f"{self.name} is at t={self._t}")
        return session

    async def _act(
        self, machine: SimulatedMachine, sessions: Sessions, episodes: Episodes, session: Session, socket: object
    ) -> Session:
        what = self._chance.random()
        if self._eid is None or what < 0.05:
            self._took(machine, await sessions.admit(session, Request("reset", b"{}"), socket))
        elif what < 0.1:
            return await self._fork(machine, sessions, episodes, session, socket)
        elif what < 0.15:
            await sessions.lifetime.detach(session, socket)
            await asyncio.sleep(self._chance.choice([0.1, 700.0]))
            return await self._come_back(machine, sessions, socket)
        elif what < 0.2:
            backend = sessions.runtime.sandboxes
            assert isinstance(backend, FakeBackend)
            backend.faults.snapshots += 1
        else:
            do = "hang" if what < 0.22 else "raise" if what < 0.25 else ""
            action = CountAction(n=self._t + 1, do=do)
            request = Request("step", action.model_dump_json().encode(), action=action)
            self._took(machine, await sessions.admit(session, request, socket))
        return session

    async def _fork(
        self, machine: SimulatedMachine, sessions: Sessions, episodes: Episodes, session: Session, socket: object
    ) -> Session:
        assert self._eid is not None
        eid, t = self._eid, self._chance.randint(0, self._t)
        payload = (await episodes.reads.delivered(eid, t, None)).payload
        request = ForkRequest(t=t, request_id=f"{self._chance.getrandbits(64)}")
        child = await episodes.forks.fork(eid, request, None)
        assert (await episodes.forks.fork(eid, request, None)).eid == child.eid, "a repeated fork is the same child"
        self._sid, self._eid, self._t = child.session_id, child.eid, 0
        self._parents[child.eid] = json.loads(payload)["observation"]["text"]
        self.acknowledged[child.eid, 0] = payload
        await sessions.lifetime.close(session)
        return await self._come_back(machine, sessions, socket)

    def _took(self, machine: SimulatedMachine, reply: Reply) -> None:
        assert reply.t in (0, self._t + 1), f"asked for t={self._t + 1}, was answered {reply.t}"
        if reply.t == 0:
            assert reply.eid not in {eid for eid, _ in self.acknowledged}
        self._eid, self._t = reply.eid, reply.t
        self.acknowledged[reply.eid, reply.t] = reply.payload
        machine.note(f"{self.name} t={reply.t} {reply.digest[7:19]}")


async def _opened(machine: SimulatedMachine) -> Runtime:
    while True:
        try:
            return machine.runtime(Settings(step_timeout_s=60.0, disk_floor_bytes=0))
        except JournalUnavailable as error:
            if not isinstance(error.__cause__, OSError):
                raise
            machine.note(f"not started: {error.__cause__}")  # the disk failed meanwhile: the operator tries again
            await asyncio.sleep(1.0)


def simulate(seed: int, *, honours_sync: bool = True) -> SimulatedMachine:
    """Run one seed: some boots that crash at a step or a write, then one that does not, each checked against the last.

    Raises:
        AssertionError: An acknowledged delivery was lost, changed or acted twice.
    """
    with tempfile.TemporaryDirectory(prefix="errata-simulated-") as directory:
        indexed = random.Random(f"{seed}/index").random() < INDEXED
        return _simulate(seed, honours_sync, Path(directory) if indexed else None)


def _simulate(seed: int, honours_sync: bool, index: Path | None) -> SimulatedMachine:
    chance = random.Random(f"{seed}/plan")
    faults = DiskFaults(honours_sync=honours_sync, sync_s=(0.0, chance.choice([0.0, 0.02, 1.0])))
    machine = SimulatedMachine(seed, faults=faults, power_loss=chance.random() < 0.7, index=index)
    clients = [Client(f"c{n}", machine.chance(f"client {n}")) for n in range(CLIENTS)]

    async def serve(machine: SimulatedMachine) -> None:
        faults = machine.disk.faults
        faults.eio_syncs, faults.eio_writes = chance.choice([(0.0, 0.0), (0.05, 0.05)])
        runtime = await _opened(machine)
        sessions = Sessions(runtime, LogEnvironment, "log", ConcurrencyConfig(max_concurrent_envs=PLACES))
        runtime.live_sessions.add(sessions)
        await runtime.start()
        episodes = Episodes.of(runtime)
        await asyncio.gather(*(client.check(machine, episodes) for client in clients))
        await asyncio.gather(*(client.run(machine, sessions, episodes, 8) for client in clients))
        await sessions.close_all()
        await runtime.close()

    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.5:
            machine.disk.faults.crash_at = machine.disk.calls + chance.randint(1, 60)
            machine.boot(serve)
        else:
            machine.boot(serve, crash_at_step=chance.randint(1, 2000))
        machine.disk.faults.crash_at = None
    machine.boot(serve)
    return machine


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        print("\n".join(simulate(seed).trace))
