"""One schedule of a fleet: members that crash, drain, move, are upgraded and lost, and what each session is sure of."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine

from errata_server.simulation import FleetLoop, run

from .environments import KINDS
from .fleet_client import FleetClient
from .fleet_member import Member
from .server import Server

MAX_STEPS = 1_000_000
"""Of all loops of a schedule, which takes some ten thousand."""

RECOVERABLE = ["sandboxed", "pinned-snapshot", "pinned-reexecute", "async-reexecute"]
"""Kinds of environments whose sessions nothing but the loss of a box may end."""

ACTIVE_S = 10.0
"""Virtual time in which clients act and accidents begin."""


class FleetWorld:
    """All that one seed decides of a fleet.

    Args:
        seed: Seed of the schedule; the same one gives the same trace.
        server: Replaces the class of the servers: for controls.
        member: Replaces the class of the members: likewise.
        muted: Numbers of actions that are left out.

    Attributes:
        loop: The loop of the clients, which runs those of the members.
        members: The members of the fleet.
        listening: The server at each address.
        actions: Actions in the schedule, muted ones included.
        faults: Something may still go wrong.
        placed: Shard of each group, by the group and the members that were up.
        said_lost: Sids of sessions whose client was told that they are lost.
    """

    def __init__(
        self,
        seed: int,
        *,
        server: type[Server] = Server,
        member: type[Member] = Member,
        muted: frozenset[int] = frozenset(),
    ) -> None:
        self.seed = seed
        self.loop = FleetLoop(random.Random(f"{seed}/loops"), max_steps=MAX_STEPS)
        self.faults = True
        self.actions = 0
        self.listening: dict[str, Server] = {}
        self.placed: dict[tuple[str, tuple[str, ...]], str] = {}
        self.said_lost: set[str] = set()
        self.arrivals = self.unplaced = self.misdirected = self.moves = self.stops = self.boxes_lost = 0
        self.upgraded = self.drained = 0
        self._chance = chance = random.Random(f"{seed}/fleet")
        self._muted = muted
        self._addresses = 0
        self._moving = asyncio.Lock()  # one at a time: no two members are to have one address
        families = frozenset(name for name in ("tools", "judged", "index") if chance.random() < 0.5)
        kind = chance.choice(RECOVERABLE)
        assert kind in KINDS
        self.is_upgraded = chance.random() < 0.4
        self.members: list[Member] = []
        for number in range(chance.choice([2, 3, 3, 4])):
            made = member(self, number, families=families, kind=kind, server=server, muted=muted)
            self.members.append(made)
        if self.is_upgraded:
            for made in self.members:
                made.write_earlier_journal()
        self.clients = [
            FleetClient(self, f"c{n}", chance.choice(["ann", "ann", "bob"])) for n in range(chance.choice([2, 2, 3]))
        ]

    @property
    def trace(self) -> list[str]:
        """What happened, each line with its member, its boot and the time."""
        return self.loop.trace

    def run(self) -> FleetWorld:
        """Run it.

        Raises:
            AssertionError: A promise was broken.
        """
        try:
            run(self._run(), loop=self.loop)
        finally:
            for member in self.members:
                member.clean_up()
        return self

    def seen(self) -> dict[str, int]:
        """Return how often what the schedule is about came to pass."""
        seen = Counter[str]()
        for member in self.members:
            seen.update(member.seen())
            seen["starts"] += member.starts
            seen["earlier deliveries read"] += member.earlier_read
        told = ("acknowledged", "crashes", "states", "conflicts", "late rewards", "journals with an index", "ended")
        return {what: seen[what] for what in (*told, "starts", "earlier deliveries read")} | {
            "arrivals of groups": self.arrivals,
            "arrivals with no member up": self.unplaced,
            "groups placed": len({group for group, _ in self.placed}),
            "misdirected": self.misdirected,
            "moves": self.moves,
            "stops": self.stops,
            "drains": self.drained,
            "boxes lost": self.boxes_lost,
            "sessions said to be lost": len(self.said_lost),
            "members upgraded": self.upgraded,
        }

    def new_address(self) -> str:
        """Return an address that no member has had."""
        self._addresses += 1
        return f"http://10.0.0.{self._addresses}:8000"

    def cut_off(self, server: Server) -> None:
        """Take that a server is gone: whoever has a socket to it notices at once, or by its keepalive."""
        for client in self.clients:
            for trainer in client.trainers.values():
                trainer.cut_off(server, notices_s=self._chance.choice([0.0, 0.0, 0.0, 3.0]))

    # -- the schedule -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        for member in self.members:
            member.start()
        for client in self.clients:
            client.start()
        self._act()
        accidents = [asyncio.create_task(accident) for accident in self._accidents()]
        await asyncio.sleep(ACTIVE_S)
        await asyncio.gather(*accidents)
        self.faults = False
        await asyncio.gather(*(member.comes_to_rest() for member in self.members))
        await self._lists_are_known()
        for member in self.members:  # some are at another member's address still, and ask nothing there
            for trainer in member.trainers:
                trainer.connect_anew()
        await asyncio.sleep(1.0)
        for member in self.members:
            if not member.is_lost:
                await member.check()
        self._check_losses()
        for client in self.clients:
            await client.stop()

    def _act(self) -> None:
        chance = random.Random(f"{self.seed}/actions")
        for client in self.clients:
            at_s = chance.uniform(0.3, 1.0)
            for _ in range(chance.randint(12, 20)):
                at_s += chance.choice([0.0, 0.01, 0.05, 0.3, 1.0])
                if self.actions not in self._muted:
                    self.loop.call_later(min(at_s, ACTIVE_S), client.act, self.actions)
                self.actions += 1

    def _accidents(self) -> list[Coroutine[None, None, None]]:
        """Return what goes wrong, each beginning at its time."""
        chance = random.Random(f"{self.seed}/accidents")
        begun: list[Coroutine[None, None, None]] = []
        for _ in range(chance.randint(1, 5)):
            at_s, member = chance.uniform(0.5, ACTIVE_S), chance.choice(self.members)
            away_s = chance.choice([0.1, 0.5, 2.0])
            match chance.choice(["kill", "kill", "write", "move", "move", "drain", "swap"]):
                case "swap":
                    begun.append(self._swap(at_s, *chance.sample(self.members, 2), away_s=away_s))
                case "kill":
                    begun.append(self._at(at_s, member.kill))
                case "write":
                    begun.append(self._at(at_s, member.crash_at_write))
                case "move":
                    begun.append(self._restart(at_s, member, announced=False, moved=True, away_s=away_s))
                case _:
                    begun.append(
                        self._restart(at_s, member, announced=True, moved=chance.random() < 0.3, away_s=away_s)
                    )
        if chance.random() < 0.4:
            begun.append(self._lose(chance.uniform(1.0, ACTIVE_S), chance.choice(self.members)))
        if self.is_upgraded:
            begun.append(self._upgrade(chance.uniform(0.5, 4.0), announced=chance.random() < 0.5))
        return begun

    async def _at(self, at_s: float, what: Callable[[], None]) -> None:
        await asyncio.sleep(at_s)
        what()

    async def _restart(self, at_s: float, member: Member, *, announced: bool, moved: bool, away_s: float) -> None:
        await asyncio.sleep(at_s)
        self.drained += announced
        if not moved:
            await member.restart(announced=announced, moved=None, away_s=away_s)
            return
        async with self._moving:
            await member.restart(announced=announced, moved=self.new_address(), away_s=away_s)

    async def _swap(self, at_s: float, one: Member, other: Member, *, away_s: float) -> None:
        """Let two members come back each at the address of the other, which clients take for theirs for a while."""
        await asyncio.sleep(at_s)
        async with self._moving, one.orders, other.orders:
            await asyncio.gather(one.halt(), other.halt())
            await asyncio.sleep(away_s)
            urls = one.url, other.url
            other.come_back(urls[0])
            one.come_back(urls[1])

    async def _lose(self, at_s: float, member: Member) -> None:
        await asyncio.sleep(at_s)
        await member.lose()

    async def _upgrade(self, at_s: float, *, announced: bool) -> None:
        """Stop and start each member in turn, on directories that servers of before wrote in first."""
        await asyncio.sleep(at_s)
        for member in self.members:
            if not member.is_lost:
                await member.restart(announced=announced, moved=None, away_s=0.2)
                self.upgraded += not member.is_lost

    async def _lists_are_known(self) -> None:
        """Wait until every client knows the members as they are."""
        now = {member.shard: (member.url, member.state) for member in self.members}
        for _ in range(120):
            known = [{one.shard: (one.url, one.state) for one in client.endpoints.values()} for client in self.clients]
            if all(one == now for one in known):
                return
            await asyncio.sleep(1.0)
        raise AssertionError(f"clients know {known}, the members are {now}")

    def _check_losses(self) -> None:
        """The sessions of a lost box are said to be lost, to each client that has some, and no others are."""
        for member in self.members:
            for trainer in member.trainers:
                left = [sid for sid in trainer.protocol.sessions if sid not in trainer._intruding]
                assert not member.is_lost or not left, f"{trainer.name} waits for {left}, which are lost"
            for known in member.ledger.sessions.values():
                lost = known.ended == "SESSION_LOST" or known.sid in self.said_lost
                assert member.is_lost or not lost, f"{known.sid} is said to be lost, and its box is there"
