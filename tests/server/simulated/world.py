"""One schedule: boots of a server that end badly or well, one in which all comes to rest, and the audit."""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from pathlib import Path
from typing import Any

from errata_server.doors.mux.driver import journal_sid
from errata_server.environments.recovery_class import recovery_of
from errata_server.journal import LogJournal
from errata_server.simulation import DiskFaults, FleetLoop, SimulatedLoop, SimulatedMachine, SimulatedSocket

from .environments import JUDGED, KINDS, factory
from .ledger import Ledger
from .server import Server
from .trainer import Trainer
from .visitors import Visitors

SETTLED_S = 600.0
"""Virtual time in which everything comes to its end once nothing goes wrong any more."""

MAX_STEPS = 100_000
"""Of one boot; a schedule takes a few thousand."""

FAMILIES = {"tools": 0.5, "judged": 0.5, "deletion": 0.4, "retention": 0.3, "index": 0.9}
"""What happens under some seeds only, and how often: what is always there hides what goes wrong without it.

Users run the journal with an index; without one the schedule runs on `LogJournal`, the fake that ships."""


class World:
    """All that one seed decides.

    Args:
        seed: Seed of the schedule, a text for a member of a fleet; the same one gives the same trace.
        honours_sync: False makes syncs do nothing: the control.
        server: Replaces the server's class: likewise.
        muted: Numbers of actions that are left out.
        families: What of `FAMILIES` happens, if not what is drawn.
        kind: Name in `KINDS` of the environment, if not what is drawn.
        shard: Name of the server's data directory; None where it has none.
        beside: The loop of the fleet that the server is a member of; None for a server that is alone.

    Attributes:
        actions: Actions in the schedule, muted ones included.
        faults: The network and the disk may fail.
    """

    def __init__(
        self,
        seed: int | str,
        *,
        honours_sync: bool = True,
        server: type[Server] = Server,
        muted: frozenset[int] = frozenset(),
        families: frozenset[str] | None = None,
        kind: str | None = None,
        shard: str | None = None,
        beside: FleetLoop | None = None,
    ) -> None:
        self.seed = seed
        self.chance = chance = random.Random(f"{seed}/plan")
        self.families = drawn(seed) if families is None else families
        sync_s = (0.0, chance.choice([0.0, 0.0, 0.005, 0.2]))
        power_loss = chance.random() < 0.5
        self.machine = SimulatedMachine(
            seed,
            faults=DiskFaults(honours_sync=honours_sync, sync_s=sync_s),
            power_loss=power_loss,
            max_steps=MAX_STEPS,
            shard=shard,
            beside=beside,
            **self._index(),
        )
        drawn_kind = chance.choices(list(KINDS), weights=[6, 3, 2, 3, 1, 1, 2])[0]
        self.kind = kind if kind is not None else drawn_kind
        env, deterministic = KINDS[self.kind]
        if judged := "judged" in self.families and env in JUDGED:
            env = JUDGED[env]
        self.ledger = Ledger(recovery_of(env, deterministic=deterministic).name, judged=judged)
        self._env = env
        self.places = chance.choice([2, 4, 100])
        self.timeout_s = chance.choice([None, None, None, 4.0])
        self.ledger.expires = self.timeout_s is not None
        self.trainers = [
            Trainer(self, f"c{n}", chance.choice(["ann", "ann", "bob"]), self.machine.chance(f"trainer {n}"))
            for n in range(chance.randint(2, 5))
        ]
        self.faults = True
        self.acknowledged = self.states = self.conflicts = self.intruders = self.crashes = 0
        self.tool_calls = self.tools_listed = self.expired = self.histories = 0
        self.deleted_together = self.retained = self.indexed = self.step_rewards = 0
        self.actions = 0
        self._muted = muted
        self._server_class = server
        self._sockets: list[SimulatedSocket] = []
        self.visitors = Visitors(self)

    def run(self) -> World:
        """Run it.

        Raises:
            AssertionError: A promise was broken.
        """
        try:
            return self._run()
        finally:
            self.clean_up()

    def clean_up(self) -> None:
        """Remove what it has in files."""
        if self._directory is not None:
            self._directory.cleanup()

    def _run(self) -> World:
        machine, chance = self.machine, self.chance
        machine.note(f"{self.kind}, {self.places} places")
        machine.on_crash.append(self._crashed)
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            fate = chance.random()
            if fate < 0.45:
                machine.disk.faults.crash_at = machine.disk.calls + chance.randint(1, 40)
                machine.boot(self._bad_boot)
            elif fate < 0.85:
                machine.boot(self._bad_boot, crash_at_step=chance.randint(1, 900))
            else:
                machine.boot(self._bad_boot)
            machine.disk.faults.crash_at = None
        machine.boot(self._good_boot)
        machine.boot(self._audit)
        return self

    def _index(self) -> dict[str, Any]:
        """Return what a machine is given for a journal with an index, and nothing for one without."""
        self._directory = tempfile.TemporaryDirectory(prefix="errata-simulated-") if "index" in self.families else None
        self._read_s = 0.0
        if self._directory is None:
            return {}
        chance = random.Random(f"{self.seed}/index")
        self._read_s = chance.choice([0.0, 0.002, 0.1])
        return {
            "index": Path(self._directory.name),
            "batch_rows": chance.choice([1, 5, 50]),
            "segment_bytes": chance.choice([2000, 20_000]),
        }

    @property
    def trace(self) -> list[str]:
        """What happened, each line with its boot and time."""
        return self.machine.trace

    def seen(self) -> dict[str, int]:
        """Return how often what the schedule is about came to pass."""
        return {
            "acknowledged": self.acknowledged,
            "crashes": self.crashes,
            "states": self.states,
            "conflicts": self.conflicts,
            "intruders turned away": self.intruders,
            "late rewards": len(self.ledger.rewards),
            "tool calls": self.tool_calls,
            "tools listed": self.tools_listed,
            "step rewards": self.step_rewards,
            "deleted": len(self.ledger.by_hand & self.ledger.deleted),
            "deleted together": self.deleted_together,
            "deleted by retention": self.retained,
            "expired replies": self.expired,
            "histories": self.histories,
            "journals with an index": self.indexed,
            "ended": sum(known.ended is not None for known in self.ledger.sessions.values()),
        }

    def serve(self, socket: SimulatedSocket) -> None:
        """Remember a connection until its end."""
        self._sockets.append(socket)

    def _crashed(self) -> None:
        self.crashes += 1
        self._gone()

    def _gone(self) -> None:
        for trainer in self.trainers:
            trainer.server_died()

    # -- boots ------------------------------------------------------------------------------------------------------

    async def _start(self) -> Server:
        self._sockets.clear()
        self.visitors.forget()
        _, deterministic = KINDS[self.kind]
        if self._read_s:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimulatedLoop)
            loop.work_time_s = functools.partial(
                self.machine.chance(f"reads {self.machine.boots}").uniform, 0.0, self._read_s
            )
        server = await self._server_class.start(
            self.machine,
            factory(self._env, self.ledger.executed, tools="tools" in self.families),
            deterministic=deterministic,
            places=self.places,
            session_timeout_s=self.timeout_s,
        )
        for trainer in self.trainers:
            trainer.server_is_up(server)
        return server

    async def _bad_boot(self, machine: SimulatedMachine) -> None:
        self._spoil_disk()
        server = await self._start()
        await self._act(server, self.chance.randint(4, 10))
        self.machine.note("is stopped")
        await server.stop(drain_s=self.chance.choice([0.0, 1.0, 10.0]))
        self._gone()

    def _spoil_disk(self) -> None:
        faults, chance = self.machine.disk.faults, self.chance
        self._empty_disk()  # what filled it was cleared away before the server was started again
        faults.eio_syncs, faults.eio_writes = chance.choice([(0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.05, 0.05)])

    async def _act(self, server: Server, actions: int) -> None:
        loop, chance = asyncio.get_running_loop(), self.chance
        for trainer in self.trainers:
            at_s = 0.0
            for _ in range(actions):
                at_s += chance.choice([0.0, 0.01, 0.05, 0.3])
                if self.actions not in self._muted:
                    loop.call_later(at_s, trainer.act, self.actions)
                self.actions += 1
        self._disturb(server)
        await asyncio.sleep(chance.uniform(0.5, 4.0))

    def _disturb(self, server: Server) -> None:
        """Let some things of a server go wrong."""
        loop, chance = asyncio.get_running_loop(), self.chance
        if chance.random() < 0.2:
            loop.call_later(chance.uniform(0.0, 1.0), self._fill_disk)
        if self.machine.index is not None:
            loop.call_later(
                self.machine.chance(f"kept {self.machine.boots}").uniform(0.0, 1.0), self.machine.index.keep
            )
        if chance.random() < 0.2:
            server.backend.faults.snapshots += 1
        if chance.random() < 0.1:
            server.backend.faults.restores += 1
        if chance.random() < 0.1:
            server.threads.hang_next(1, after=chance.randint(0, 10))

    def _fill_disk(self) -> None:
        disk = self.machine.disk
        free, total = disk.free()
        disk.faults.capacity_bytes = total - free + self.chance.randint(0, 500)
        self.machine.note("the disk is full")
        asyncio.get_running_loop().call_later(self.chance.uniform(0.1, 2.0), self._empty_disk)

    def _empty_disk(self) -> None:
        self.machine.disk.faults.capacity_bytes = 2**40

    async def _good_boot(self, machine: SimulatedMachine) -> None:
        faults = machine.disk.faults
        faults.eio_syncs = faults.eio_writes = 0.0
        self._empty_disk()
        server = await self._start()
        await self._act(server, self.chance.randint(2, 6))
        await self._settle(server)
        await self._each_answers_its_next_step()
        await self._close_all(server)
        await server.stop()

    async def _settle(self, server: Server) -> None:
        """Let nothing go wrong any more, and every session have one owner."""
        self.machine.note("nothing goes wrong from here on")
        self.faults = False
        self._empty_disk()
        server.sessions.capacity.limit = 1000
        server.backend.faults.snapshots = server.backend.faults.restores = 0
        server.threads.hang_next(0)
        for trainer in self.trainers:
            trainer._leave(again_s=0.0)
            for session in list(trainer.protocol.sessions.values()):
                if session.sid in trainer._intruding:
                    continue
                if self.ledger.sessions[session.sid].owner != trainer.name:
                    trainer._drop(session)
        await self._idle()

    async def _idle(self) -> None:
        """Wait until all that was asked has its outcome."""
        for _ in range(int(SETTLED_S)):
            if all(trainer.idle for trainer in self.trainers) and not self.visitors.busy:
                return
            await asyncio.sleep(1.0)
        raise AssertionError("; ".join(trainer.stuck() for trainer in self.trainers if not trainer.idle))

    async def _rest(self, server: Server) -> None:
        """Wait for what nobody waits for any more, such as the opens of dead processes."""
        tasks, sought = server.multiplexer.driver._tasks, server.multiplexer.driver.protocol._attachments._being_found
        closing = server.sessions.tasks._tasks
        # An environment that hangs in its close is given a minute, in its snapshot two.
        for _ in range(200):
            if not tasks and not sought and not closing:
                return
            await asyncio.sleep(1.0)
        raise AssertionError(f"the server never comes to rest: {tasks} {list(sought)} {closing}")

    async def _each_answers_its_next_step(self) -> None:
        asked = []
        for trainer in self.trainers:
            for session in trainer.sessions():
                known = self.ledger.sessions[session.sid]
                asked.append((known, len(known.replies)))
                trainer.step(session)
                if "tools" in self.families:
                    trainer.list_tools(session)
                for delivery in self.chance.sample(known.deliveries(), min(2, len(known.deliveries()))):
                    trainer.read_state(session, *delivery)
        await self._idle()
        for known, before in asked:
            if known.ended is None:
                # Its owner may have had a fork in mind as well.
                answers = [known.replies[id] for id in sorted(known.replies)[before:]]
                assert any(a.type == "observation" for a in answers), f"{known.sid[-6:]} answered {answers}"

    async def _close_all(self, server: Server) -> None:
        journal = server.runtime.store.journal
        for trainer in self.trainers:
            for session in trainer.sessions():
                known = self.ledger.sessions[session.sid]
                seqs = [row.seq for row in journal.pushes(journal_sid(known.sid), 1, 2**53)]
                unheard = set(seqs) - known.pushes.keys()
                assert not unheard, f"{known.sid[-6:]} heard pushes {sorted(known.pushes)} of {seqs}"
                count = journal.last_id(journal_sid(known.sid))
                assert len(known.replies) == count, f"{known.sid[-6:]} heard {sorted(known.replies)} of {count}"
                trainer.close(session)
        await self._idle()
        await self._rest(server)
        await self._close_orphans(server)
        await self._rest(server)
        assert all(connection.in_flight == 0 for connection in server.multiplexer.connections), "in flight at rest"
        for trainer in self.trainers:
            assert not trainer.protocol.sessions and trainer.protocol._in_flight == 0
            trainer.hang_up()
        await asyncio.wait([socket.task for socket in self._sockets], timeout=120)
        for socket in self._sockets:
            assert socket.task.done(), "a connection was left"
            socket.task.result()
        server.loop.call_soon(server.threads.release)
        await asyncio.sleep(0)
        await self._rest(server)
        server.check_nothing_leaked()

    async def _close_orphans(self, server: Server) -> None:
        """Close what no client speaks for: its own gave up, or crashed before it knew."""
        for known in self.ledger.sessions.values():
            row = server.runtime.store.journal.session(journal_sid(known.sid))
            if row is None or row.status != "open":
                continue
            self.machine.note(f"{known.sid[-6:]} is an orphan")
            trainer = next(t for t in self.trainers if t.principal == known.principal)
            trainer._adopt(known, len(known.replies), known.last_seq)
            trainer.close(trainer.protocol.sessions[known.sid])
        await self._idle()

    async def _audit(self, machine: SimulatedMachine) -> None:
        """What a server after all of them finds is what was acknowledged."""
        journal = machine.journal()
        self.ledger.audit(journal)
        self.step_rewards = self.ledger.step_rewards
        journal.close()
        if machine.index is not None:
            self.indexed += 1
            alone = LogJournal(machine.disk)  # the same from the segments alone
            self.ledger.audit(alone)
            alone.close()


def drawn(seed: int | str) -> frozenset[str]:
    """Return what of `FAMILIES` happens under a seed."""
    chance = random.Random(f"{seed}/families")
    return frozenset([name for name, often in FAMILIES.items() if chance.random() < often])
