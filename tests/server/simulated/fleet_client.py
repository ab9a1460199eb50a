"""The clients of the simulated fleet: each knows the members by the client's own code, and has a socket to each."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from errata_client.fleet import Endpoint, Fleet
from errata_protocol.errors import SessionLost
from errata_protocol.fleet import FleetMembers
from errata_protocol.mux.state import State
from errata_protocol.shards import Placement, named

from .server import Server
from .trainer import Trainer

if TYPE_CHECKING:
    from .fleet_member import Member
    from .fleet_world import FleetWorld

AGAIN_S = 0.3
"""How long a client waits before it tries an address again where nobody listens."""

POLL_S = 0.5
"""How often a source looks whether the list of members has changed."""


class SimulatedSource:
    """The list of members, read late and now and then not at all; a `errata_client.fleet.Source`.

    Args:
        fleet: The fleet whose members are listed.
        chance: Random numbers for delays and failures.
    """

    def __init__(self, fleet: FleetWorld, chance: random.Random) -> None:
        self._fleet = fleet
        self._chance = chance

    async def read(self, after: str | None, wait_s: float) -> tuple[str, list[Endpoint]]:
        """Return the list's version and the members."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            await asyncio.sleep(self._chance.uniform(0.0, 0.05))
            if self._fleet.faults and after is not None and self._chance.random() < 0.05:
                raise ConnectionError("nobody answers")
            members = FleetMembers.of([member.listed() for member in self._fleet.members])
            if members.version != after or loop.time() >= until:
                return members.version, [Endpoint(one.shard, one.url or "", one.state) for one in members.members]
            await asyncio.sleep(POLL_S)

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


class FleetClient:
    """One client process: it places new groups, and acts at the members where its sessions are.

    Args:
        fleet: The fleet that it is a client of.
        name: Name of the client in traces.
        principal: Who it is to the servers.

    Attributes:
        trainers: The half of it that talks to a member, by shard.
        endpoints: The members as it knows them, by shard.
    """

    def __init__(self, fleet: FleetWorld, name: str, principal: str) -> None:
        self.fleet = fleet
        self.name = name
        self.endpoints: dict[str, Endpoint] = {}
        self.trainers: dict[str, MemberTrainer] = {}
        self._chance = random.Random(f"{fleet.seed}/{name}")
        self._draw = self._chance
        self._groups: list[str] = []
        self._watching: asyncio.Task[None] | None = None
        for member in fleet.members:
            chance = random.Random(f"{fleet.seed}/{name}/{member.shard}")
            self.trainers[member.shard] = trainer = MemberTrainer(self, member, principal, chance)
            member.trainers.append(trainer)

    def start(self) -> None:
        """Begin to watch the members and to connect to them."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self._watching.add_done_callback(self._has_watched)
        for trainer in self.trainers.values():
            trainer.connect_soon()

    async def stop(self) -> None:
        """Watch the members no more."""
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.wait([self._watching])

    @staticmethod
    def _has_watched(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _watch(self) -> None:
        async for endpoints in Fleet(SimulatedSource(self.fleet, self._chance)).watch():
            self.endpoints = {one.shard: one for one in endpoints if one.shard is not None}
            for one in self.endpoints.values():
                if one.state == "lost" and one.shard is not None:
                    self.trainers[one.shard].lose()

    def act(self, n: int) -> None:
        """Open a group of sessions, or do something at a member where it has some.

        Args:
            n: Number of the action in the schedule. Each has draws of its own: leaving one out changes no other.
        """
        self._draw = random.Random(f"{self.fleet.seed}/fleet act {n}")
        busy = [trainer for trainer in self.trainers.values() if trainer.sessions()]
        if not busy or self._draw.random() < 0.15:
            self.arrive()
        else:
            self._draw.choice(busy).act(n)

    def arrive(self) -> None:
        """Open some sessions of a group, where the placement says."""
        up = [one.shard for one in self.endpoints.values() if one.state == "up" and one.shard is not None]
        if not up:
            self.fleet.unplaced += 1
            return
        if self._groups and self._draw.random() < 0.3:
            group = self._draw.choice(self._groups)
        else:
            group = f"{self._draw.getrandbits(132):033x}"
            self._groups.append(group)
        shard = Placement(dict.fromkeys(up, 1.0)).place(group)
        before = self.fleet.placed.setdefault((group, tuple(up)), shard)
        assert before == shard, f"group {group} was placed at {before}, and is at {shard}, among the same members"
        self.fleet.arrivals += 1
        self.trainers[shard].take_group(group, self._draw.choice([1, 2, 2, 3]))


class MemberTrainer(Trainer):
    """The half of a client that talks to one member, wherever that is.

    Args:
        client: The client.
        member: The member.
        principal: Who it is to the server.
        chance: Draws what it does.
    """

    refusals_of_reads = ("MISDIRECTED",)

    def __init__(self, client: FleetClient, member: Member, principal: str, chance: random.Random) -> None:
        super().__init__(member, f"{client.name}@{member.shard[-1]}", principal, chance)
        self._client = client
        self._member = member
        self._dialing: asyncio.TimerHandle | None = None
        self._has_hung_up = False
        self._at_server: Server | None = None

    def take_group(self, group: str, sessions: int) -> None:
        """Open sessions of a group."""
        self.group = group
        for _ in range(sessions):
            if len(self.sessions()) < 5:
                self.begin(group)
        self._flush()

    def connect_soon(self) -> None:
        """Connect in a moment, unless it is about to."""
        self._dial_in(self.chance.uniform(0.0, 0.2))

    def connect_anew(self) -> None:
        """Leave the socket, and connect to where the member is now."""
        self._leave(again_s=0.0)

    def lose(self) -> None:
        """Give the sessions up, because their member is lost."""
        self._has_hung_up = True
        for session in list(self.protocol.sessions.values()):
            if session.sid in self._intruding:
                continue
            if session.state is not State.TAKEN_OVER:
                self._client.fleet.said_lost.add(session.sid)
            self._take(self.protocol.lose(session, SessionLost("its member is lost")))
        self._server = None
        self._leave()

    def cut_off(self, server: Server, *, notices_s: float) -> None:
        """Lose the socket to a server that is gone, some time later."""
        if self._at_server is server:
            self._server = self._at_server = None
            if self.socket is not None:
                self.socket.cut_off(client_notices_s=notices_s)

    def server_is_up(self, server: Server) -> None:
        """Do nothing: it finds its server by the list of members."""

    def server_died(self) -> None:
        """Do nothing: its sockets are cut off by the fleet, whichever member it had reached."""

    def hang_up(self) -> None:
        self._has_hung_up = True
        super().hang_up()

    def _leave(self, again_s: float | None = None) -> None:
        super()._leave(again_s)
        if self._server is None:  # it had not noticed yet that its server is gone
            self.connect_soon()

    def _connect_later(self) -> None:
        self.connect_soon()

    def _dial_in(self, after_s: float) -> None:
        if self._dialing is None and not self._has_hung_up:
            self._dialing = asyncio.get_running_loop().call_later(after_s, self._dial)

    def _dial(self) -> None:
        self._dialing = None
        self._connect()

    def _connect(self) -> None:
        if self.socket is not None or self._has_hung_up:
            return
        known = self._client.endpoints.get(self._member.shard)
        server = self._client.fleet.listening.get(known.url) if known is not None else None
        if server is None:
            self._dial_in(AGAIN_S)
            return
        self._server = self._at_server = server
        super()._connect()

    def _lost(self) -> None:
        super()._lost()
        self.connect_soon()

    def _misdirected(self) -> None:
        """The address that it knew is another member's by now."""
        self._client.fleet.misdirected += 1
        self._leave(again_s=AGAIN_S)

    def _open(self) -> None:
        self._client.arrive()

    def _sid(self) -> str:
        return named(self._member.shard, self._secret())
