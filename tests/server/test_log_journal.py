"""The append-only journal on a disk that tears, loses, fills up and lies: what was acknowledged is there, once."""

from __future__ import annotations

import asyncio
import random

import pytest

from errata_protocol.errors import JournalUnavailable, UnknownEpisode
from errata_server.journal import LogJournal
from errata_server.journal.codec import HEADER_BYTES
from errata_server.simulation import DiskFaults, LoopWriter, SimulatedDisk, SimulatedMachine, simulated

from .journal_rows import delivery, episode, session

SESSIONS = 4


class Load:
    """Sessions that commit one delivery after the other, and what was acknowledged to each."""

    def __init__(self) -> None:
        self.acknowledged = {f"e{n}": -1 for n in range(SESSIONS)}
        self.found: dict[str, list[int]] = {}

    async def run(self, machine: SimulatedMachine) -> None:
        journal = machine.journal()
        for eid, last in self.acknowledged.items():
            turns = journal.turns(eid)
            self.found[eid] = [turn.t for turn in turns]
            assert self.found[eid] == list(range(len(turns))), f"a hole or a double in {eid}"
            assert len(turns) >= last + 1, f"{eid} was acknowledged up to t={last} and has {len(turns)} deliveries"
            assert len(turns) <= last + 2, f"{eid} has deliveries that nobody sent"
            self.acknowledged[eid] = len(turns) - 1  # what is read is promised from here on
            if turns:
                assert journal.delivery(eid, len(turns) - 1) == delivery(eid, len(turns) - 1, payload=b"p" * 700)
        await asyncio.gather(*(self._steps(journal, eid) for eid in self.acknowledged))
        journal.close()

    async def _steps(self, journal: LogJournal, eid: str) -> None:
        first = len(self.found[eid])
        for t in range(first, first + 6):
            new = [] if t else [session(f"s-{eid}"), episode(eid, f"s-{eid}")]
            await journal.commit(*new, delivery(eid, t, payload=b"p" * 700))
            self.acknowledged[eid] = t


def crash_often(seed: int, *, power_loss: bool = True, honours_sync: bool = True) -> SimulatedMachine:
    machine = SimulatedMachine(
        seed,
        power_loss=power_loss,
        faults=DiskFaults(honours_sync=honours_sync, sync_s=(0.0, 0.02)),
        segment_bytes=2000,
    )
    chance, load = machine.chance("crashes"), Load()
    for _ in range(4):
        machine.disk.faults.crash_at = chance.randint(1, 40)
        machine.boot(load.run)
        machine.note(f"acknowledged {load.acknowledged}")
    machine.boot(load.run, crash_at_step=chance.randint(1, 120))
    machine.disk.faults.crash_at = None
    machine.boot(load.run)
    machine.note(f"acknowledged {load.acknowledged}")
    return machine


@pytest.mark.parametrize("power_loss", [True, False], ids=["power loss", "kill -9"])
def test_what_was_acknowledged_is_there_once_wherever_the_machine_goes_down(power_loss: bool) -> None:
    crashes = 0
    for seed in range(100):
        crashes += sum("crash" in line for line in crash_often(seed, power_loss=power_loss).trace)
    assert crashes > 300


def test_a_disk_that_lies_about_syncs_is_found_out() -> None:
    """The control of the test above: without the sync it fails."""
    caught = 0
    for seed in range(30):
        try:
            crash_often(seed, honours_sync=False)
        except (AssertionError, JournalUnavailable):
            caught += 1
    assert caught > 20


def test_the_same_seed_gives_the_same_trace() -> None:
    assert crash_often(5).trace == crash_often(5).trace
    assert crash_often(5).trace != crash_often(6).trace


@simulated
async def test_a_commit_waits_while_the_disk_is_full_or_broken_and_is_there_once() -> None:
    disk = SimulatedDisk(random.Random(1))
    journal = LogJournal(disk, writer=LoopWriter)
    await journal.commit(session(), episode("e1"))
    for t, fault in enumerate((DiskFaults(capacity_bytes=200), DiskFaults(eio_writes=1.0), DiskFaults(eio_syncs=1.0))):
        disk.faults = fault
        waiting = asyncio.create_task(journal.commit(delivery("e1", t)))
        await asyncio.sleep(60)
        assert not waiting.done() and journal.failing is not None and journal.delivery("e1", t) is None
        disk.faults = DiskFaults()
        await waiting
        assert journal.failing is None
    found = LogJournal(disk.power_loss(), writer=LoopWriter)
    assert [turn.t for turn in found.turns("e1")] == [0, 1, 2]


@simulated
async def test_a_failed_sync_is_not_trusted_the_second_time() -> None:
    """Linux drops dirty pages of a failed fsync and calls the next one a success: the frame is written again."""
    for seed in range(50):
        disk = SimulatedDisk(random.Random(seed), DiskFaults())
        journal = LogJournal(disk, writer=LoopWriter)
        disk.faults.eio_syncs = 1.0
        waiting = asyncio.create_task(journal.commit(session(), episode("e1"), delivery("e1", 0, payload=b"x" * 4096)))
        await asyncio.sleep(1)
        disk.faults.eio_syncs = 0.0
        await waiting
        journal.close()
        left = LogJournal(disk.power_loss(), writer=LoopWriter)
        assert left.delivery("e1", 0) is not None
        left.close()


@simulated
async def test_what_a_dead_process_could_not_sync_is_written_again_by_the_next() -> None:
    """The kernel holds the frame of a failed sync for written: it is read, and no further sync writes it."""
    for seed in range(40):
        chance = random.Random(seed)
        disk = SimulatedDisk(chance)
        for boot in range(3):
            journal = LogJournal(disk, writer=LoopWriter)
            if boot == 0:
                await journal.commit(session(), episode("e"))
            first = len(journal.turns("e"))
            await journal.commit(delivery("e", first))
            disk.faults.eio_syncs = 1.0
            dying = asyncio.ensure_future(journal.commit(delivery("e", first + 1)))
            await asyncio.sleep(0.05)
            assert not dying.done()
            dying.cancel()
            dead, disk = disk, disk.process_death()
            dead.faults.eio_syncs = disk.faults.eio_syncs = 0.0
            journal.close()
        journal = LogJournal(disk, writer=LoopWriter)
        seen = len(journal.turns("e"))
        await journal.commit(delivery("e", seen))
        journal.close()
        left = LogJournal(disk.power_loss(), writer=LoopWriter)
        assert [turn.t for turn in left.turns("e")] == list(range(seen + 1)), f"seed {seed}"
        left.close()


@simulated
async def test_damage_of_what_was_durable_is_said_and_nothing_is_guessed() -> None:
    disk = SimulatedDisk(random.Random(1))
    journal = LogJournal(disk, writer=LoopWriter)
    await journal.commit(session(), episode("e1"))
    await journal.commit(delivery("e1", 0))
    (name,) = disk.names()
    disk._file(name).cached[HEADER_BYTES + 20] ^= 1
    with pytest.raises(JournalUnavailable, match="damaged"):
        LogJournal(disk, writer=LoopWriter)


@simulated
async def test_a_missing_segment_is_damage() -> None:
    disk = SimulatedDisk(random.Random(1))
    journal = LogJournal(disk, writer=LoopWriter, segment_bytes=HEADER_BYTES + 1)
    for n in range(3):
        await journal.commit(episode(f"e{n}"))
    assert len(disk.names()) == 3
    assert [s.row.eid for s in LogJournal(disk, writer=LoopWriter).episodes(limit=9, principal=None)[0]] == [
        "e2", "e1", "e0",
    ]  # fmt: skip
    disk.remove("00000002.log")
    with pytest.raises(JournalUnavailable, match="segment 2 is missing"):
        LogJournal(disk, writer=LoopWriter)


@simulated
async def test_a_deleted_episode_stays_deleted_after_a_power_loss() -> None:
    disk = SimulatedDisk(random.Random(1))
    journal = LogJournal(disk, writer=LoopWriter)
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    assert journal.delete_episode("e1") == 1
    found = LogJournal(disk.power_loss(), writer=LoopWriter)
    assert found.episode("e1") is None and found.session("s") == session()
    with pytest.raises(UnknownEpisode):
        await found.commit(delivery("e1", 1))


@simulated
async def test_what_waits_at_the_close_is_written_or_refused() -> None:
    disk = SimulatedDisk(random.Random(1), DiskFaults(sync_s=(1.0, 1.0)))
    journal = LogJournal(disk, writer=lambda write: LoopWriter(write, disk.sync_time_s))
    waiting = asyncio.create_task(journal.commit(session()))
    await asyncio.sleep(0.5)
    journal.close()
    await waiting
    assert LogJournal(disk.power_loss(), writer=LoopWriter).session("s") == session()
