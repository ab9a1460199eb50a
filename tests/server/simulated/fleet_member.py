"""One member of the simulated fleet: a `World` whose server is started, crashed, drained and moved beside others."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from errata_protocol.fleet import FleetMember
from errata_server.concurrency.queues import wake
from errata_server.journal.base import Journal
from errata_server.simulation import SimulatedMachine, SimulatedSocket

from .fleet_client import MemberTrainer
from .server import Server
from .world import World

if TYPE_CHECKING:
    from .fleet_world import FleetWorld

GOLDEN = Path(__file__).parents[2] / "golden" / "journal"
EARLIER = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and not (path / "shard").exists())
"""Commits of before named directories, each with a journal that its server wrote."""

DETECTED_S = 1.0
"""How long a server may be gone before the list of members says so."""


class Member(World):
    """One data directory and the server that has it; its machine's programs run beside those of the other members.

    Args:
        fleet: The fleet it belongs to.
        number: Number of the member in the fleet.
        families: What of `FAMILIES` happens.
        kind: Name in `KINDS` of the environment.
        server: Class of its servers.
        muted: Numbers of actions that are left out.

    Attributes:
        shard: Name of its directory.
        server: The server that listens; None while none does.
        url: Address of the last server.
        state: What the list of members says of it.
        orders: Held by whoever stops its server and starts another.
        trainers: The half of each client that talks to this member.
    """

    trainers: list[MemberTrainer]  # type: ignore[assignment] # as `World.trainers`, of the fleet's clients

    def __init__(
        self,
        fleet: FleetWorld,
        number: int,
        *,
        families: frozenset[str],
        kind: str,
        server: type[Server],
        muted: frozenset[int],
    ) -> None:
        seed = f"{fleet.seed}/{number}"
        self.shard = f"member{number:06d}"
        super().__init__(
            seed, families=families, kind=kind, server=server, muted=muted, shard=self.shard, beside=fleet.loop
        )
        self.ledger.expires = False
        self.timeout_s = None
        self.trainers = []
        self.server: Server | None = None
        self.state: Literal["up", "draining", "down", "lost"] = "up"
        self.url = fleet.new_address()
        self.starts = self.earlier_read = 0
        self._fleet = fleet
        self._wanted = True
        self._booted: asyncio.Future[bool | None] | None = None
        self._stop: asyncio.Future[None] | None = None
        self._drain_s = 0.0
        self._told: dict[str, Any] = {}
        self.orders = asyncio.Lock()
        self._plan = random.Random(f"{seed}/member")
        self.machine.on_crash.append(self._after_crash)

    def write_earlier_journal(self) -> None:
        """Give it the directory that an earlier commit's server left behind."""
        commit = self._plan.choice(EARLIER)
        disk = self.machine.disk
        for path in sorted((GOLDEN / commit / "journal").glob("*.log")):
            disk.append(path.name, path.read_bytes())
            disk.sync(path.name)
        disk.sync_names()
        self._told = json.loads((GOLDEN / commit / "expected.json").read_text())["episodes"]

    def listed(self) -> FleetMember:
        """Return what the list of members says of it."""
        return FleetMember(shard=self.shard, url=self.url, state=self.state)

    # -- its server -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start its server, if it is to have one and none runs."""
        if self._wanted and not self.is_lost and (self._booted is None or self._booted.done()):
            crash = self._plan.randint(200, 3000) if self._fleet.faults and self._plan.random() < 0.2 else None
            self.starts += 1
            self._booted = self.machine.start(self._serve, crash_at_step=crash)
            self._booted.add_done_callback(self._has_ended)

    async def _serve(self, machine: SimulatedMachine) -> bool:
        if self.faults:
            self._spoil_disk()
        server = await self._start()
        self._read_earlier(server.runtime.store.journal)
        self._stop = asyncio.get_running_loop().create_future()
        self._fleet.listening[self.url] = self.server = server
        self.state = "draining" if self.state == "draining" else "up"
        machine.note(f"serves at {self.url}")
        if self.faults:
            self._disturb(server)
        await self._stop
        machine.note("is stopped")
        await server.stop(drain_s=self._drain_s)
        self._leave_network()
        self._gone()
        return True

    def _after_crash(self) -> None:
        """Called in the moment of a crash."""
        self.crashes += 1
        self.machine.disk.faults.crash_at = None
        self._leave_network()

    def _leave_network(self) -> None:
        if self.server is not None:
            for url, server in list(self._fleet.listening.items()):
                if server is self.server:
                    del self._fleet.listening[url]
            self._fleet.cut_off(self.server)
        self.server = self._stop = None

    def _has_ended(self, booted: asyncio.Future[bool | None]) -> None:
        """Called when its program has ended: a server that crashed is started again."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._plan.uniform(0.0, DETECTED_S), self._detect)
        if booted.result() is None:
            loop.call_later(self._plan.uniform(0.1, 2.0), self.start)

    def _detect(self) -> None:
        if self.server is None and self.state in ("up", "draining"):
            self.state = "down"

    def kill(self) -> None:
        """Crash its machine, which is started again."""
        self.machine.crash()

    def crash_at_write(self) -> None:
        """Crash its machine at one of the next calls of its disk."""
        disk = self.machine.disk
        disk.faults.crash_at = disk.calls + self._plan.randint(1, 40)

    async def restart(self, *, announced: bool, moved: str | None, away_s: float) -> None:
        """Stop its server and start another on its directory.

        Args:
            announced: The list says before that it drains; it is stopped when none of its sessions has a client, or
                after a time.
            moved: Address of the next server; None for the same.
            away_s: Time between the two.
        """
        async with self.orders:
            await self.halt(announced=announced)
            await asyncio.sleep(away_s)
            self.come_back(moved)

    async def halt(self, *, announced: bool = False) -> None:
        """Stop its server, for whoever has `orders`.

        Args:
            announced: See `restart`.
        """
        if announced and not self.is_lost:
            self.state = "draining"
            await self._wait_until_idle(self._plan.uniform(1.0, 5.0))
        if self.is_lost:
            return
        self._wanted = False
        self._drain_s = self._plan.choice([0.0, 1.0, 5.0])
        if self.server is not None:
            self._fleet.stops += 1
            wake(self._stop)
        if self._booted is not None and not self._booted.done():
            if self.server is None:
                self.machine.crash()  # it was starting
            await asyncio.wait([self._booted])
        if not self.is_lost:
            self.state = "down"

    def come_back(self, moved: str | None) -> None:
        """Start another server after `halt`, for whoever has `orders`.

        Args:
            moved: See `restart`.
        """
        if self.is_lost:
            return
        if moved is not None:
            self.url = moved
            self._fleet.moves += 1
        self._wanted = True
        self.start()

    async def _wait_until_idle(self, limit_s: float) -> None:
        """Wait until no session of it has a client, or a time is over: its clients go on meanwhile."""
        for _ in range(int(limit_s / 0.5)):
            if self.server is None or not self.server.sessions.table.live:
                return
            await asyncio.sleep(0.5)

    async def lose(self) -> None:
        """Lose its machine with its disk; the list says so after a time, and nothing starts it again."""
        self.machine.note("its box is lost")
        self._wanted = False
        self.ledger.disk_is_lost = True
        self._fleet.boxes_lost += 1
        self.machine.crash()
        if self._booted is not None and not self._booted.done():
            await asyncio.wait([self._booted])
        await asyncio.sleep(self._plan.uniform(0.5, 3.0))
        self.state = "down"
        await asyncio.sleep(self._plan.uniform(0.0, 3.0))
        self.machine.note("its sessions are said to be lost")
        self.state = "lost"

    @property
    def sockets(self) -> list[SimulatedSocket]:
        """Sockets that clients of this member have had since its server began, some of them to other members."""
        return self._sockets

    @property
    def is_lost(self) -> bool:
        """Its box is lost, whether anybody knows or not."""
        return self.ledger.disk_is_lost

    # -- the end ----------------------------------------------------------------------------------------------------

    async def comes_to_rest(self) -> None:
        """Let nothing go wrong any more, and its server run."""
        async with self.orders:  # what it was ordered is done first
            pass
        self.faults = False
        self.machine.crash(None)
        self.machine.disk.faults.crash_at = None
        self._empty_disk()
        faults = self.machine.disk.faults
        faults.eio_syncs = faults.eio_writes = 0.0
        if self.is_lost:
            return
        for _ in range(600):
            if self.server is not None:
                break
            self._wanted = True
            self.start()
            await asyncio.sleep(1.0)
        assert self.server is not None, f"{self.shard} does not come back"
        self.state = "up"

    async def check(self) -> None:
        """Check all promises about its sessions; nothing goes wrong any more, and its server runs."""
        server = self.server
        assert server is not None
        sockets = [socket for member in self._fleet.members for socket in member.sockets]
        self._sockets = [socket for socket in sockets if socket.task.get_loop() is server.loop]
        await self._settle(server)
        await self._each_answers_its_next_step()
        await self._close_all(server)
        self._wanted = False
        self._drain_s = 0.0
        wake(self._stop)
        assert self._booted is not None
        await asyncio.wait([self._booted])
        await self.machine.start(self._audit)

    async def _audit(self, machine: SimulatedMachine) -> None:
        journal = machine.journal()
        self._read_earlier(journal)
        journal.close()
        await super()._audit(machine)

    def _read_earlier(self, journal: Journal) -> None:
        """Assert that what an earlier version delivered is there, byte for byte."""
        for eid, told in self._told.items():
            for t, payload in told["states"].items():
                row = journal.delivery(eid, int(t))
                assert row is not None and row.payload.decode() == payload, f"t={t} of {eid} is {row}, was {payload}"
                self.earlier_read += 1
