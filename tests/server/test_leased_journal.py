"""A journal with a lease: what is answered, what a new owner has, what the old one's later writes do (decision 210).

The old owner is stopped at a point of its commit by a disk or a lease that calls back there. A new owner takes over
inside the call; then the old one goes on.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from errata_protocol.errors import JournalUnavailable
from errata_server.journal import DirectoryDisk, IndexedJournal, LogJournal, journal_problems
from errata_server.journal.codec import Header, encode_frame, encode_record
from errata_server.journal.leased import NOT_OURS, LeasedLog, take_over
from errata_server.journal.segments import SegmentLog, Segments, name_of
from errata_server.simulation import LoopWriter, SimulatedDisk, simulated

from .journal_rows import delivery, episode, session

POINTS = ["before the write", "between write and sync", "between sync and answer"]


class Owner:
    """The old owner's lease and disk; ``stop`` is called once, at ``point`` of the next commit."""

    def __init__(self, point: str | None = None, stop: Callable[[], None] = lambda: None) -> None:
        self.point, self.stop = point, stop
        self.valid = True
        self.asked = 0
        self.disk = StoppingDisk(self)

    def is_ours(self) -> bool:
        self.asked += 1
        if self.asked % 2 == 0:  # the second look of a commit
            self.reached("between sync and answer")
        return self.valid

    def reached(self, point: str) -> None:
        if point == self.point:
            self.point = None
            self.stop()


class StoppingDisk(SimulatedDisk):
    def __init__(self, owner: Owner) -> None:
        super().__init__(random.Random(1))
        self._owner = owner

    def append(self, name: str, data: bytes) -> None:
        self._owner.reached("before the write")
        super().append(name, data)

    def sync(self, name: str) -> None:
        self._owner.reached("between write and sync")
        super().sync(name)


def log_with(owner: Owner, segment_bytes: int = 200) -> LeasedLog:
    log = LeasedLog(owner.disk, owner.is_ours, segment_bytes=segment_bytes)
    list(log.replay(None))
    return log


@simulated
@pytest.mark.parametrize("point", POINTS)
async def test_an_owner_that_is_stopped_while_it_commits_answers_nothing_after_the_take_over(point: str) -> None:
    new_disk = SimulatedDisk(random.Random(2))
    old = Owner()
    journal = LogJournal(old.disk, writer=LoopWriter, is_ours=old.is_ours)
    await journal.commit(session(), episode("e1"), delivery("e1", 0))

    def taken() -> None:
        old.valid = False
        take_over(old.disk, new_disk)

    old.asked, old.point, old.stop = 0, point, taken
    waiting = asyncio.create_task(journal.commit(delivery("e1", 1)))
    await asyncio.sleep(60)
    assert old.point is None, "the point was reached"
    assert not waiting.done() and journal.failing == NOT_OURS and journal.delivery("e1", 1) is None
    written = point != POINTS[0]
    new = LogJournal(new_disk, writer=LoopWriter, is_ours=lambda: True)
    assert [turn.t for turn in new.turns("e1")] == ([0, 1] if written else [0])
    if not written:
        await new.commit(delivery("e1", 1))
    await new.commit(delivery("e1", 2))
    journal.close()
    with pytest.raises(JournalUnavailable, match="lease"):
        await waiting
    again = LogJournal(new_disk.process_death(), writer=LoopWriter)
    assert [turn.t for turn in again.turns("e1")] == [0, 1, 2]


@simulated
async def test_a_lease_that_is_renewed_answers_what_waited_once() -> None:
    old = Owner()
    journal = LogJournal(old.disk, writer=LoopWriter, is_ours=old.is_ours)
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    old.asked, old.point = 0, "between sync and answer"

    def runs_out() -> None:
        old.valid = False

    old.stop = runs_out
    waiting = asyncio.create_task(journal.commit(delivery("e1", 1)))
    await asyncio.sleep(60)
    assert not waiting.done() and journal.failing == NOT_OURS
    with pytest.raises(JournalUnavailable, match="lease"):
        journal.delete_episode("e1")
    calls = old.disk.calls
    await asyncio.sleep(60)
    assert old.disk.calls == calls, "nothing is written while the lease is known to be out"
    old.valid = True
    await waiting
    assert journal.failing is None
    journal.close()
    again = LogJournal(old.disk, writer=LoopWriter)
    assert [turn.t for turn in again.turns("e1")] == [0, 1]


def bodies(disk: SimulatedDisk | DirectoryDisk) -> list[bytes]:
    """Return the frames of all segments."""
    log, found = Segments(disk), []
    for number in log.numbers():
        name = name_of(number)
        for placed, _ in log.whole(number):
            found += [disk.read_at(name, place.offset, place.size) for place, _ in placed]
    return found


Change = Callable[[LeasedLog, SimulatedDisk], None]


def appends(log: LeasedLog, disk: SimulatedDisk) -> None:
    SegmentLog.append(log, bytes_of(90))  # it passed its check before it was stopped


def begins_segments(log: LeasedLog, disk: SimulatedDisk) -> None:
    for n in range(91, 99):
        SegmentLog.append(log, bytes_of(n))


def compacts(log: LeasedLog, disk: SimulatedDisk) -> None:
    assert log.rewrite(1, set()) > 0


def cuts_off(log: LeasedLog, disk: SimulatedDisk) -> None:
    disk.truncate(name_of(log.numbers()[-1]), 60)


def removes(log: LeasedLog, disk: SimulatedDisk) -> None:
    for name in disk.names():
        disk.remove(name)


def restarts(log: LeasedLog, disk: SimulatedDisk) -> None:
    disk.append(name_of(log.numbers()[-1]), b"torn")
    again = SegmentLog(disk, segment_bytes=200)
    list(again.replay(None))
    again.append(bytes_of(90))


def bytes_of(t: int) -> bytes:
    return encode_record(delivery("e1", t))


@pytest.mark.parametrize("change", [appends, begins_segments, compacts, cuts_off, removes, restarts])
def test_nothing_that_the_old_owner_does_later_reaches_the_new_one(change: Change) -> None:
    old, new_disk, third = Owner(), SimulatedDisk(random.Random(2)), SimulatedDisk(random.Random(3))
    log = log_with(old)
    for t in range(7):
        log.append(bytes_of(t))
    assert len(log.numbers()) > 2
    take_over(old.disk, new_disk)
    new = SegmentLog(new_disk, segment_bytes=200)
    list(new.replay(None))
    new.append(bytes_of(7))
    change(log, old.disk)
    for t in range(8, 12):
        new.append(bytes_of(t))
    expected = [bytes_of(t) for t in range(12)]
    assert bodies(new_disk) == expected
    again = SegmentLog(new_disk.process_death(), segment_bytes=200)
    list(again.replay(None))
    take_over(new_disk.process_death(), third)
    assert bodies(third) == expected


def test_the_new_owner_changes_no_file_of_the_old_one() -> None:
    old, new_disk = Owner(), SimulatedDisk(random.Random(2))
    log = log_with(old)
    for t in range(7):
        log.append(bytes_of(t))
    before = {name: old.disk.read(name) for name in old.disk.names()}
    take_over(old.disk, new_disk)
    new = SegmentLog(new_disk, segment_bytes=200)
    list(new.replay(None))
    for t in range(7, 12):
        new.append(bytes_of(t))
    new.rewrite(1, set())
    assert {name: old.disk.read(name) for name in old.disk.names()} == before


class Rolling(SimulatedDisk):
    """Of an owner that begins a segment, deletes and compacts while the full ones are being linked."""

    def __init__(self, chance: random.Random, meanwhile: Callable[[], None]) -> None:
        super().__init__(chance)
        self._meanwhile: Callable[[], None] | None = meanwhile

    def link_from(self, other: SimulatedDisk, name: str) -> None:
        if self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        super().link_from(other, name)


def test_a_segment_that_is_begun_while_the_others_are_taken_is_taken_too() -> None:
    old = Owner()
    log = log_with(old)
    for t in range(7):
        log.append(bytes_of(t))

    def meanwhile() -> None:
        begins_segments(log, old.disk)
        log.rewrite(1, set())  # what it held is deleted by a row of the segment that was begun

    new_disk = Rolling(random.Random(2), meanwhile)
    take_over(old.disk, new_disk)
    assert bodies(new_disk) == bodies(old.disk) and new_disk.names() == old.disk.names()


def test_a_segment_that_was_begun_and_not_finished_is_left_out() -> None:
    old, new_disk = Owner(), SimulatedDisk(random.Random(2))
    log = log_with(old)
    for t in range(3):
        log.append(bytes_of(t))
    expected, last = bodies(old.disk), log.numbers()[-1]
    old.disk.append(name_of(last + 1), b"half")
    take_over(old.disk, new_disk)
    assert bodies(new_disk) == expected and Segments(new_disk).numbers()[-1] == last


def test_a_copy_ends_with_the_last_whole_frame_and_is_durable() -> None:
    old, new_disk = Owner(), SimulatedDisk(random.Random(2))
    log = log_with(old, 10_000)
    log.append(bytes_of(0))
    whole = old.disk.read(name_of(1))
    old.disk.append(name_of(1), encode_frame(bytes_of(1), Header(1, log.position.salt), len(whole))[:-3])
    take_over(old.disk, new_disk)
    assert new_disk.power_loss().read(name_of(1)) == whole


def test_damage_is_not_taken_over() -> None:
    old = Owner()
    log = log_with(old, 10_000)
    for t in range(3):
        log.append(bytes_of(t))
    data = bytearray(old.disk.read(name_of(1)))
    data[60] ^= 1
    old.disk.remove(name_of(1))
    old.disk.append(name_of(1), bytes(data))
    with pytest.raises(JournalUnavailable, match="damaged"):
        take_over(old.disk, SimulatedDisk(random.Random(2)))


def test_an_empty_journal_is_taken_over_as_one() -> None:
    new_disk = SimulatedDisk(random.Random(2))
    take_over(SimulatedDisk(random.Random(1)), new_disk)
    assert new_disk.names() == []


# -- in real files ---------------------------------------------------------------------------------------------------


async def test_the_journal_that_users_run_is_taken_over_in_real_files(tmp_path: Path) -> None:
    valid = True
    first = IndexedJournal(tmp_path / "1", segment_bytes=4000, is_ours=lambda: valid)
    await first.commit(session(), episode("e1"))
    for t in range(20):
        await first.commit(delivery("e1", t, payload=b"p" * 700))
    valid = False
    waiting = asyncio.create_task(first.commit(delivery("e1", 20)))
    take_over(DirectoryDisk(tmp_path / "1"), DirectoryDisk(tmp_path / "2"))
    names = DirectoryDisk(tmp_path / "2").names()
    assert len(names) > 3 and all(
        ((tmp_path / "1" / name).stat().st_ino == (tmp_path / "2" / name).stat().st_ino) == (name != names[-1])
        for name in names
    ), "the full ones are links, the last is a copy"
    second = IndexedJournal(tmp_path / "2", segment_bytes=4000, is_ours=lambda: True)
    assert [turn.t for turn in second.turns("e1")] == list(range(20))
    for t in range(20, 30):
        await second.commit(delivery("e1", t, payload=b"p" * 700))
    assert not waiting.done() and first.failing == NOT_OURS and first.delivery("e1", 20) is None
    first.close()
    with pytest.raises(JournalUnavailable):
        await waiting
    shutil.rmtree(tmp_path / "1")
    second.close()
    assert journal_problems(tmp_path / "2") == []
    third = IndexedJournal(tmp_path / "2")
    assert [turn.t for turn in third.turns("e1")] == list(range(30))
    third.close()


def test_a_lease_without_syncs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalUnavailable, match="--fsync"):
        IndexedJournal(tmp_path, fsync=False, is_ours=lambda: True)


async def test_a_directory_without_a_lease_is_byte_for_byte_as_one_with(tmp_path: Path) -> None:
    """What a lease changes is when a commit is answered and who writes where, not what is written."""
    found = []
    for leased in (False, True):
        directory = tmp_path / str(leased)
        journal = IndexedJournal(directory, salt=lambda: b"saltsalt", is_ours=(lambda: True) if leased else None)
        await journal.commit(session(), episode("e1"), delivery("e1", 0))
        await journal.commit(delivery("e1", 1))
        journal.close()
        found.append({path.name: path.read_bytes() for path in directory.glob("*.log")})
    assert found[0] == found[1] and found[0]
