"""Two simulated boxes that take turns on one directory under leases, and clients that know what was acknowledged.

    python -m tests.server.simulated_boxes SEED        # what happened in one seed

Clocks differ in rate and value, messages of the registry are late or lost, a box is cut off from the registry while
its clients still reach it, and an owner is stopped at a point of a commit for so long that the other takes over.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from errata_protocol.errors import ErrataError
from errata_server.journal import LogJournal
from errata_server.journal.leased import take_over
from errata_server.runtime.leases import Grant, Leases, Wait
from errata_server.simulation import LoopWriter, SimulatedDisk, SimulatedLoop, run

from .journal_rows import delivery, episode, session

LEASE_S, DRIFT = 4.0, 0.05
CLIENTS, SECONDS = 4, 120.0
POINTS = ("before the write", "between write and sync", "between sync and answer")
STOPS = 0.03
"""How many calls at one of these points last longer than a lease."""


class BoxDisk(SimulatedDisk):
    """The directory of one epoch, as its owner writes it."""

    def __init__(self, box: Box) -> None:
        super().__init__(box.world.chance)
        self._box = box

    def append(self, name: str, data: bytes) -> None:
        self._box.may_stop(POINTS[0])
        super().append(name, data)

    def sync(self, name: str) -> None:
        self._box.may_stop(POINTS[1])
        super().sync(name)
        self._box.has_synced = True


class World:
    """The shared directory, the registry, and what was acknowledged."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"{seed}/boxes")
        self.loop = SimulatedLoop(random.Random(f"{seed}/order"))
        self.loop.fail_fast = True
        self.skipped_s = 0.0
        self.rate = self.chance.uniform(1 - DRIFT / 2.1, 1 + DRIFT / 2.1)
        self.registry = Leases(lease_s=LEASE_S, drift=DRIFT, clock=lambda: self.now() * self.rate)
        self.directory: dict[int, SimulatedDisk] = {}
        self.boxes = [Box(self, name) for name in "ab"]
        self.acknowledged: dict[tuple[str, int], bytes] = {}
        self.counts = Counter[str]()
        self.journals: list[LogJournal] = []

    def now(self) -> float:
        return self.loop.time() + self.skipped_s

    async def play(self) -> None:
        tasks: list[asyncio.Task[None]] = [asyncio.create_task(box.keep()) for box in self.boxes]
        clients = [Client(self, f"e{n}") for n in range(CLIENTS)]
        tasks += [asyncio.create_task(client.run()) for client in clients]
        tasks.append(asyncio.create_task(self.cut()))
        await asyncio.sleep(SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self.check()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def check(self) -> None:
        """Assert that the newest owner's directory has all that was acknowledged, once."""
        found = SimulatedDisk(self.chance)
        take_over(self.directory[max(self.directory)], found)
        journal = LogJournal(found, writer=LoopWriter)
        for (eid, t), payload in self.acknowledged.items():
            row = journal.delivery(eid, t)
            assert row is not None and row.payload == payload, f"{eid} t={t} is not what was acknowledged"
        for n in range(CLIENTS):
            turns = [turn.t for turn in journal.turns(f"e{n}")]
            assert turns == list(range(len(turns))), f"e{n} has a hole or a double"
        for epoch in sorted(self.directory)[:-1]:
            self.counts["written and ignored"] += self.ignored(self.directory[epoch], journal)
        journal.close()

    def ignored(self, disk: SimulatedDisk, journal: LogJournal) -> int:
        """Return how many deliveries of an earlier owner's directory are not in the newest, or are others there."""
        earlier = LogJournal(disk, writer=LoopWriter)
        found = [
            earlier.delivery(f"e{n}", turn.t) != journal.delivery(f"e{n}", turn.t)
            for n in range(CLIENTS)
            for turn in earlier.turns(f"e{n}")
        ]
        earlier.close()
        return sum(found)

    async def cut(self) -> None:
        """Cut boxes off from the registry for a while."""
        while True:
            box = self.chance.choice(self.boxes)
            box.is_cut_off = self.chance.random() < 0.6
            await asyncio.sleep(self.chance.uniform(0.5, 3 * LEASE_S))


@dataclass
class Box:
    world: World
    name: str
    rate: float = field(init=False)
    shift: float = field(init=False)
    is_cut_off: bool = False
    epoch: int = 0
    until: float = float("-inf")
    journal: LogJournal | None = None
    has_synced: bool = False

    def __post_init__(self) -> None:
        chance = self.world.chance
        self.rate, self.shift = chance.uniform(1 - DRIFT / 2.1, 1 + DRIFT / 2.1), chance.uniform(-500, 500)

    def clock(self) -> float:
        return self.world.now() * self.rate + self.shift

    def lease_of(self, epoch: int) -> Callable[[], bool]:
        """Return what the server of an epoch asks before and after each write."""

        def is_ours() -> bool:
            if self.has_synced:
                self.has_synced = False
                self.may_stop(POINTS[2])
            return self.epoch == epoch and self.clock() < self.until

        return is_ours

    def may_stop(self, point: str) -> None:
        """Maybe be stopped here until the other box has taken over; nothing of this box runs meanwhile."""
        world, other = self.world, next(box for box in self.world.boxes if box is not self)
        if self.journal is None or other.is_cut_off or world.chance.random() >= STOPS:
            return
        world.skipped_s += 2 * LEASE_S
        world.counts[point] += 1
        other.asked(other.clock(), world.registry.take("s", other.name, max(world.directory, default=0)))

    def asked(self, at: float, answer: Grant | Wait) -> None:
        """Have the registry's answer to what was asked at ``at`` by this box's clock; begin to serve a new epoch."""
        if isinstance(answer, Wait):
            return
        new = answer.epoch != self.epoch
        self.epoch, self.until = answer.epoch, at + answer.lease_s
        directory = self.world.directory
        if not new or max(directory, default=0) > answer.epoch:
            return
        own = SimulatedDisk(self.world.chance)
        if directory:
            take_over(directory[max(directory)], own)
            self.world.counts["taken over"] += 1
        disk = BoxDisk(self)
        disk._files, disk._durable_names = own._files, own._durable_names
        directory[answer.epoch] = disk
        self.journal = None
        self.journal = LogJournal(disk, writer=self.writer, is_ours=self.lease_of(answer.epoch), segment_bytes=4000)
        self.world.journals.append(self.journal)  # the ones before go on, as processes that nobody could end

    def writer(self, write: Callable[..., list[ErrataError | None]]) -> LoopWriter:
        chance = self.world.chance
        return LoopWriter(write, lambda: chance.choice([0.0, 0.01, 0.5]))

    async def keep(self) -> None:
        """Ask the registry for the shard, and to renew it."""
        world, chance = self.world, self.world.chance
        while True:
            await asyncio.sleep(chance.uniform(0.1, LEASE_S / 2))
            if self.is_cut_off:
                continue
            at, epoch = self.clock(), self.epoch
            await asyncio.sleep(chance.choice([0.0, 0.05, LEASE_S / 2]))
            if epoch and world.registry.renew("s", self.name, epoch):
                answer: Grant | Wait = Grant(epoch, LEASE_S)
            else:
                world.counts["refused"] += bool(epoch)
                answer = world.registry.take("s", self.name, max(world.directory, default=0))
            await asyncio.sleep(chance.choice([0.0, 0.05, LEASE_S / 2]))
            if chance.random() < 0.9 and self.epoch == epoch:  # else the answer is lost
                self.asked(at, answer)


class Client:
    """One session: finds where it stands at some box, commits the next delivery there, goes elsewhere when it waits."""

    def __init__(self, world: World, eid: str) -> None:
        self.world, self.eid, self.sid = world, eid, f"s-{eid}"
        self.known: list[bytes] = []
        self.attempts = 0
        self.left: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        world = self.world
        while True:
            await asyncio.sleep(world.chance.uniform(0.05, 1.0))
            box = world.chance.choice(world.boxes)  # it reaches one that is cut off from the registry, too
            if (journal := box.journal) is None or journal.failing is not None:
                continue
            found = [turn.t for turn in journal.turns(self.eid)]
            count = len(self.known)
            assert found == list(range(len(found))), f"{self.eid} has a hole or a double: {found}"
            assert count <= len(found) <= count + 1, f"{self.eid} has {len(found)}, {count} are known"
            if len(found) > count:
                self.took(count, self.payload(journal, count))
                world.counts["found after its answer was lost"] += 1
            task = asyncio.create_task(self.commit(journal, len(self.known)))
            done, _ = await asyncio.wait({task}, timeout=world.chance.choice([1.0, 3 * LEASE_S]))
            if not done:
                world.counts["went elsewhere"] += 1
                self.left.add(task)

    def payload(self, journal: LogJournal, t: int) -> bytes:
        row = journal.delivery(self.eid, t)
        assert row is not None
        return row.payload

    async def commit(self, journal: LogJournal, t: int) -> None:
        self.attempts += 1
        payload = f"{self.attempts}".encode()  # each attempt acts, and comes to something else
        new = [] if t else [session(self.sid), episode(self.eid, self.sid)]
        try:
            await journal.commit(*new, delivery(self.eid, t, payload=payload))
        except ErrataError as error:
            self.world.counts[error.code] += 1
            return
        self.took(t, payload)

    def took(self, t: int, payload: bytes) -> None:
        before = self.world.acknowledged.setdefault((self.eid, t), payload)
        assert before == payload, f"{self.eid} t={t} was acknowledged twice, as {before!r} and {payload!r}"
        if t == len(self.known):
            self.known.append(payload)
        self.world.counts["acknowledged"] += 1


def simulate(seed: int) -> Counter[str]:
    """Run one seed and return what happened how often.

    Raises:
        AssertionError: Something that was acknowledged is missing, changed, or there twice.
    """
    world = World(seed)
    run(world.play(), loop=world.loop)
    return world.counts


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        print(dict(simulate(number)))
