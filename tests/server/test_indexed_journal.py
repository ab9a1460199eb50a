"""The durable journal: what was acknowledged is there, whatever becomes of its index, wherever a crash comes."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import astuple
from typer.testing import CliRunner

from errata_protocol.environment import SnapshotRef
from errata_protocol.episode_lists import EpisodeFilter, EpisodeOrder
from errata_protocol.errors import Conflict, EnvironmentOutputInvalid, JournalUnavailable, UnknownEpisode
from errata_server.cli import commands
from errata_server.journal import (
    DirectoryDisk,
    IndexedJournal,
    Journal,
    MemoryJournal,
    ReadOnlyJournal,
    SessionChange,
    index,
    journal_in,
    journal_problems,
    journal_size,
    salvage,
)
from errata_server.journal.base import Record
from errata_server.journal.index import INDEX, SCHEMA, VERSION
from errata_server.journal.live import Live
from errata_server.journal.writer import StoreFailed
from errata_server.simulation import DiskFaults, LoopWriter, SimulatedDisk, SimulatedMachine, simulated
from tests.hangs import HANGS_S

from .journal_rows import delivery, episode, reward, session


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[IndexedJournal]:
    made = IndexedJournal(tmp_path)
    yield made
    made.close()


def written(journal: IndexedJournal, *groups: list[Record]) -> list[type]:
    """Write ``groups`` in one transaction, as the writer does with what waits; return the kind of each outcome."""
    return [type(error) for error in journal._write(list(groups))]


def abandon(journal: IndexedJournal) -> None:
    """Let go of what a process that dies lets go of."""
    assert journal._index is not None
    journal._index.close()
    journal._readers.close()


def on(disk: SimulatedDisk, directory: Path, **over: object) -> IndexedJournal:
    values: dict[str, object] = {"writer": LoopWriter, "background": False, "batch_rows": 5, "segment_bytes": 2000}
    return IndexedJournal(directory, disk=disk, **{**values, **over})  # type: ignore[arg-type]


# -- crashes ----------------------------------------------------------------------------------------------------------


class Load:
    """Sessions that commit deliveries, replies, rewards and deletions, and what was acknowledged of them."""

    def __init__(self, directory: Path, fsync: bool) -> None:
        self.directory = directory
        self.fsync = fsync
        self.journal: IndexedJournal | None = None
        self.acknowledged = {f"e{n}": -1 for n in range(4)}
        self.found: dict[str, int] = {}
        self.deleted: set[str] = set()
        self.deleting: str | None = None
        self.opened = 0

    async def run(self, machine: SimulatedMachine) -> None:
        self.journal = None
        writer = functools.partial(LoopWriter, write_time_s=machine.disk.sync_time_s)
        self.journal = journal = on(machine.disk, self.directory, writer=writer, fsync=self.fsync)
        if self.deleting is not None and journal.episode(self.deleting) is None:
            self.deleted.add(self.deleting)
        self.deleting = None
        for eid, last in self.acknowledged.items():
            self._compare(journal, eid, last)
        await asyncio.gather(*(self._steps(journal, eid) for eid in self.acknowledged))
        await self._delete_one(journal)
        journal.compact(garbage=0.1)
        for eid, last in self.acknowledged.items():
            self._compare(journal, eid, last)
        journal.close()

    def _compare(self, journal: Journal, eid: str, last: int) -> None:
        turns = [turn.t for turn in journal.turns(eid)]
        sid = f"s-{eid}"
        assert turns == list(range(len(turns))), f"a hole or a double in {eid}"
        if self.fsync:
            assert len(turns) >= last + 1, f"{eid} was acknowledged up to t={last} and has {len(turns)} deliveries"
        assert len(turns) <= last + 2, f"{eid} has deliveries that nobody sent"
        self.acknowledged[eid] = self.found[eid] = len(turns) - 1  # what is read is promised from here on
        assert [row.id for row in journal.replies(sid, 1, 2**60)] == [t + 1 for t in turns]
        assert journal.last_id(sid) == len(turns)
        assert journal.last_seq(sid) == len([t for t in turns if t % 3 == 0])
        assert [(r.t, r.seq) for r in journal.rewards(eid)] == [(t, t // 3 + 1) for t in turns if t % 3 == 0]
        listed = {s.row.eid: s for s in journal.episodes(limit=100, principal=None)[0]}
        assert self.deleted.isdisjoint(listed)
        if turns:
            assert listed[eid].deliveries == len(turns) and listed[eid].reward == len(turns) / 2
            for t in (0, len(turns) // 2, len(turns) - 1):
                assert journal.delivery(eid, t) == self._row(eid, t)
            assert journal.last_delivery(sid) == self._row(eid, turns[-1])

    def _row(self, eid: str, t: int) -> object:
        return delivery(eid, t, sid=f"s-{eid}", id=t + 1, payload=b"p" * 300)

    async def _steps(self, journal: IndexedJournal, eid: str) -> None:
        first, sid = self.found[eid] + 1, f"s-{eid}"
        for t in range(first, first + 6):
            records: list[Record] = [] if t else [session(sid), episode(eid, sid)]
            records.append(delivery(eid, t, sid=sid, id=t + 1, payload=b"p" * 300))
            if t % 3 == 0:
                records.append(reward(eid, t, reward_id=f"r{t}", sid=sid, seq=t // 3 + 1))
            await journal.commit(*records)
            self.acknowledged[eid] = t

    async def _delete_one(self, journal: IndexedJournal) -> None:
        self.opened += 1
        eid = f"short{self.opened}"
        if journal.session(eid) is None:
            await journal.commit(session(eid), episode(eid, eid))
            await journal.commit(*(delivery(eid, t, sid=eid, id=t + 1, payload=b"x" * 300) for t in range(5)))
        self.deleting = eid
        journal.delete_episode(eid)
        self.deleted.add(eid)
        self.deleting = None


def spoil(directory: Path, chance: random.Random, kept: Path) -> str:
    """Do to the index what a crash, a lying disk, a copy of half a directory or a curious operator would."""
    path = directory / INDEX
    what = chance.choice(["as it was", "as it was", "missing", "garbage", "empty", "older", "cut"])
    for end in ("", "-wal", "-shm"):
        if what in ("missing", "older") or (what in ("garbage", "empty") and end):
            path.with_name(INDEX + end).unlink(missing_ok=True)
    match what:
        case "garbage":
            path.write_bytes(chance.randbytes(10_000))
        case "empty":
            path.write_bytes(b"")
        case "older":
            for file in kept.glob(INDEX + "*"):
                shutil.copy(file, directory)
        case "cut" if path.exists():
            path.with_name(INDEX + "-wal").unlink(missing_ok=True)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for file in directory.glob(INDEX + "*"):
        if not file.name.endswith("-shm"):
            shutil.copy(file, kept)
    return what


def crash_often(seed: int, tmp_path: Path, *, fsync: bool = True, power_loss: bool = True, **faults: object) -> int:
    machine = SimulatedMachine(seed, power_loss=power_loss, faults=DiskFaults(sync_s=(0.0, 0.02), **faults))  # type: ignore[arg-type]
    chance, directory = machine.chance("crashes"), tmp_path / f"{seed}"
    directory.mkdir()
    load = Load(directory, fsync)

    def boot(**how: int) -> None:
        try:
            machine.boot(load.run, **how)
        finally:
            if load.journal is not None:
                abandon(load.journal)
        machine.note(spoil(directory, chance, tmp_path / "kept"))

    for _ in range(5):
        machine.disk.faults.crash_at = chance.randint(1, 60)
        boot()
    boot(crash_at_step=chance.randint(1, 120))
    machine.disk.faults.crash_at = None
    boot()
    boot()
    shutil.rmtree(directory)
    return sum("crash" in line for line in machine.trace)


@pytest.mark.parametrize("power_loss", [True, False], ids=["power loss", "kill -9"])
def test_what_was_acknowledged_is_there_once_whatever_becomes_of_the_index(tmp_path: Path, power_loss: bool) -> None:
    assert sum(crash_often(seed, tmp_path, power_loss=power_loss) for seed in range(15)) > 45


def test_without_fsync_a_power_loss_takes_the_last_commits_and_nothing_else(tmp_path: Path) -> None:
    assert sum(crash_often(seed, tmp_path, fsync=False) for seed in range(15)) > 45


def test_without_fsync_a_kill_takes_nothing(tmp_path: Path) -> None:
    class Strict(Load):
        def _compare(self, journal: Journal, eid: str, last: int) -> None:
            assert len(journal.turns(eid)) >= last + 1
            super()._compare(journal, eid, last)

    for seed in range(10):
        machine = SimulatedMachine(seed, power_loss=False)
        load = Strict(tmp_path, False)
        for crash in (9, 20, 33, None):
            machine.disk.faults.crash_at = crash
            machine.boot(load.run)
            if load.journal is not None:
                abandon(load.journal)
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def test_a_disk_that_lies_about_syncs_is_found_out(tmp_path: Path) -> None:
    """The control of the tests above: without the sync they fail."""
    caught = 0
    for seed in range(10):
        try:
            crash_often(seed, tmp_path, honours_sync=False)
        except (AssertionError, JournalUnavailable):
            caught += 1
    assert caught > 6


@simulated
async def test_a_crash_anywhere_in_a_compaction_changes_nothing_that_is_read() -> None:
    for crash in range(1, 20):
        with tempfile.TemporaryDirectory() as name:
            disk = SimulatedDisk(random.Random(crash))
            journal = on(disk, Path(name))
            await _fill(journal)
            disk.faults.crash_at = disk.calls + crash
            try:
                journal.compact(garbage=0.1)
            except JournalUnavailable:
                pass
            journal._writer.close()  # nothing waits; it ends the task
            abandon(journal)
            found = on(disk.power_loss(), Path(name))
            _assert_filled(found)
            found.compact(garbage=0.1)
            _assert_filled(found)
            found.close()


async def _fill(journal: IndexedJournal) -> None:
    await journal.commit(session("kept"), session("gone"), episode("k", "kept"), episode("g", "gone"))
    for t in range(12):
        await journal.commit(delivery("k", t, sid="kept", id=2 * t + 1, payload=b"k" * 300))
        await journal.commit(delivery("k", None, sid="kept", id=2 * t + 2, status="EXECUTION_ERROR"))
        await journal.commit(*(delivery("g", 3 * t + n, sid="gone", id=3 * t + n + 1) for n in range(3)))
        await journal.commit(reward("g", t, reward_id=f"{t}", sid="gone", seq=t + 1))
        await journal.commit(reward("k", t, reward_id=f"{t}", sid="kept", seq=t + 1))
    await journal.commit(SessionChange("gone", status="closed"))
    journal.delete_episode("g")
    await journal.commit(session("last"), episode("l", "last"))


def _assert_filled(journal: Journal) -> None:
    assert [turn.t for turn in journal.turns("k")] == list(range(12))
    for t in range(12):
        found = journal.recorded("k", t)
        assert [(row.t, row.id) for row in found] == [(t, 2 * t + 1), (None, 2 * t + 2)]
        assert found[0] == delivery("k", t, sid="kept", id=2 * t + 1, payload=b"k" * 300)
    assert [row.id for row in journal.replies("kept", 1, 99)] == list(range(1, 25))
    assert [r.seq for r in journal.pushes("kept", 1, 99)] == list(range(1, 13))
    assert journal.episode("g") is None and journal.turns("g") == [] and journal.rewards("g") == []
    assert journal.replies("gone", 1, 99) == [] and journal.pushes("gone", 1, 99) == []
    assert (journal.last_id("gone"), journal.last_seq("gone")) == (36, 12)
    assert journal.session("gone") == session("gone", status="closed")
    assert [s.row.eid for s in journal.episodes(limit=9, principal=None)[0]] == ["l", "k"]


# -- compaction -------------------------------------------------------------------------------------------------------


@simulated
async def test_compaction_gives_the_space_of_deleted_episodes_back_and_the_index_can_still_be_made_again() -> None:
    with tempfile.TemporaryDirectory() as name:
        disk = SimulatedDisk(random.Random(1))
        journal = on(disk, Path(name))
        await _fill(journal)
        before = sum(disk.size(n) for n in disk.names())
        back = journal.compact(garbage=0.1)
        assert back > 0 and sum(disk.size(n) for n in disk.names()) == before - back
        _assert_filled(journal)
        assert journal.compact(garbage=0.1) == 0, "there is nothing left to give back"
        journal.close()
        (Path(name) / INDEX).unlink()
        again = on(disk, Path(name))
        _assert_filled(again)
        with pytest.raises(Conflict):
            await again.commit(delivery("k", None, sid="kept", id=7))
        await again.commit(delivery("k", 12, sid="kept", id=25))
        again.delete_episode("k")
        assert again.compact(garbage=0.1) > 0 and again.last_id("kept") == 25
        again.close()


@simulated
async def test_a_compaction_that_is_stopped_ends_after_its_segment_and_the_next_one_does_the_rest() -> None:
    with tempfile.TemporaryDirectory() as name:
        disk = SimulatedDisk(random.Random(1))
        journal = on(disk, Path(name))
        await _fill(journal)
        before = sum(disk.size(n) for n in disk.names())
        assert journal.compact(garbage=0.1, stop=lambda: True) == 0
        asked = iter([False, False, True])  # at its beginning, before the first segment, before the second
        first = journal.compact(garbage=0.1, stop=lambda: next(asked))
        assert first > 0
        _assert_filled(journal)
        rest = journal.compact(garbage=0.1)
        assert rest > 0 and sum(disk.size(n) for n in disk.names()) == before - first - rest
        _assert_filled(journal)
        journal.close()


def test_a_compaction_that_runs_while_the_journal_is_closed_leaves_the_index_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = IndexedJournal(tmp_path, segment_bytes=2000, background=False)
    written(journal, [session(), episode("e1"), episode("e2")], *([delivery("e1", t)] for t in range(30)))
    journal.delete_episode("e1")
    real = journal._log.whole

    def whole(number: int) -> object:
        journal.close()
        return real(number)

    monkeypatch.setattr(journal._log, "whole", whole)
    with pytest.raises(JournalUnavailable, match="closed"):
        journal.compact(garbage=0.1)
    assert (tmp_path / INDEX).exists()


def test_a_segment_is_read_while_it_is_rewritten(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, segment_bytes=20_000, background=False)
    written(journal, [session(), episode("keep")])
    for n in range(6):
        eid = f"e{n}"
        written(journal, [episode(eid)], *([delivery(eid, t, payload=b"x" * 2000)] for t in range(20)))
        written(journal, [delivery("keep", n, payload=f"{n}".encode() * 500)])
    others: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                for n in range(6):
                    row = journal.delivery("keep", n)
                    assert row is not None and row.payload == f"{n}".encode() * 500
        except BaseException as error:
            others.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(6):
        journal.delete_episode(f"e{n}")
        assert journal.compact(garbage=0.01) > 0 or n == 5
    stop.set()
    for thread in threads:
        thread.join(60)
    journal.close()
    assert others == []


# -- the index --------------------------------------------------------------------------------------------------------


async def test_an_index_that_knows_more_than_the_segments_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = IndexedJournal(tmp_path)
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    journal.close()
    old = {path: path.read_bytes() for path in tmp_path.glob("*.log")}
    journal = IndexedJournal(tmp_path)
    await journal.commit(delivery("e1", 1))
    journal.close()
    for path, data in old.items():
        path.write_bytes(data)  # a copy of the directory whose index was taken last
    with caplog.at_level(logging.WARNING):
        journal = IndexedJournal(tmp_path)
    assert "made again" in caplog.text
    assert [turn.t for turn in journal.turns("e1")] == [0]
    journal.close()


async def test_rows_are_synced_before_the_index_has_them_also_without_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = IndexedJournal(tmp_path, fsync=False, background=False, batch_rows=10**6)
    written(journal, [session(), episode("e1"), delivery("e1", 0)])
    order: list[str] = []

    def noted(name: str, of: Any, before: Callable[[], object] = lambda: None) -> None:
        real = getattr(of, name)

        def call(*given: Any) -> Any:
            before()
            order.append(name)
            return real(*given)

        monkeypatch.setattr(of, name, call)

    noted("leave", journal._live, lambda: written(journal, [delivery("e1", 1)]))  # a commit comes just before
    noted("sync", journal._log)
    noted("apply", journal._index)
    journal._bring_up()
    assert order[-3:] == ["leave", "sync", "apply"]
    monkeypatch.undo()
    journal.close()


async def test_a_journal_whose_segments_are_gone_is_refused_and_goes_on_when_they_are_restored(tmp_path: Path) -> None:
    path = journal_in(tmp_path)
    IndexedJournal(path).close()
    journal = IndexedJournal(path)  # an empty one has no segment, and is none that lost them
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    journal.close()
    (segment,) = path.glob("*.log")
    kept = segment.rename(tmp_path / "kept")
    for opens in (IndexedJournal, IndexedJournal, ReadOnlyJournal):
        with pytest.raises(JournalUnavailable, match=r"00000001\.log is missing.*restore them .* another --data-dir"):
            opens(path)
    told = CliRunner().invoke(commands.cli, ["journal", "verify", "--data-dir", str(tmp_path)])
    assert isinstance(told.exception, JournalUnavailable) and "restore them" in str(told.exception)
    assert list(path.glob("*.log")) == [], "what is refused changes nothing"
    kept.rename(segment)
    journal = IndexedJournal(path)
    assert [turn.t for turn in journal.turns("e1")] == [0]
    journal.close()


async def test_the_index_of_another_journal_is_made_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        journal = IndexedJournal(tmp_path / name)
        await journal.commit(session(name), episode(name, name), delivery(name, 0, sid=name))
        journal.close()
    shutil.copy(tmp_path / "a" / INDEX, tmp_path / "b" / INDEX)
    journal = IndexedJournal(tmp_path / "b")
    assert journal.session("a") is None and journal.delivery("b", 0) is not None
    journal.close()


def test_an_index_with_other_tables_has_another_version() -> None:
    assert (VERSION, hashlib.sha256(SCHEMA.encode()).hexdigest()[:16]) == (5, "8f84c8808cac52d4"), (
        "the tables have changed: raise VERSION, or a server fails on the index of an earlier one; then put both here"
    )


@pytest.mark.parametrize("version", [2, 4, 99])
async def test_an_index_of_another_version_is_made_again(tmp_path: Path, version: int) -> None:
    journal = IndexedJournal(tmp_path)
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    journal.close()
    db = apsw.Connection(str(tmp_path / INDEX))
    db.execute("UPDATE totals SET deliveries = 2, reward = 1.0, last_t = 1")  # as version 2 could have them
    db.pragma("user_version", version)
    db.close()
    for opens in (ReadOnlyJournal, IndexedJournal):
        journal = opens(tmp_path)
        assert journal.last_delivery("s") == delivery("e1", 0)
        (listed,), _ = journal.episodes(limit=1, principal=None)
        assert (listed.deliveries, listed.reward) == (1, 0.5)
        journal.close()


async def test_what_is_committed_while_a_batch_leaves_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, at = MemoryJournal(), tmp_path / "at"
    journal = IndexedJournal(at, background=False, batch_rows=10**6)
    first: list[Record] = [session("s1", recovery="reexecute"), episode("e1", "s1"), delivery("e1", 0, sid="s1", id=1)]
    meanwhile: list[Record] = [
        delivery("e1", 1, sid="s1", id=2, error_kind="timeout"),
        delivery("e1", None, sid="s1", id=3, status="EXECUTION_ERROR"),
        delivery("e1", 2, sid="s1", id=4, done=True),
        reward("e1", 2, sid="s1", seq=1),
        session("s2"),
        episode("e2", "s2"),
        delivery("e2", 0, sid="s2", id=1),
    ]
    written(journal, first)
    real, when_it_left = journal._live.leave, tmp_path / "when it left"

    def leave() -> object:
        batch = real()
        shutil.copytree(at, when_it_left)
        written(journal, meanwhile)
        return batch

    monkeypatch.setattr(journal._live, "leave", leave)
    journal._bring_up()
    monkeypatch.undo()
    (listed,) = journal._rows("SELECT next_session, next_episode, (SELECT max(last_id) FROM counters) FROM applied")
    assert listed == (2, 2, 1)
    await memory.commit(*first)
    for file in at.glob(INDEX + "*"):
        shutil.copy(file, when_it_left)
    cut = IndexedJournal(when_it_left, background=False)  # a power loss took what came after the index's position
    _assert_alike(cut, memory)
    cut.close()
    await memory.commit(*meanwhile)
    shutil.copytree(at, tmp_path / "killed")
    for looked in (ReadOnlyJournal(at), IndexedJournal(tmp_path / "killed", background=False), journal):
        _assert_alike(looked, memory)
        looked.close()
    again = IndexedJournal(at)
    _assert_alike(again, memory)
    again.close()


async def test_an_index_damaged_while_the_server_runs_is_said_and_made_again_at_the_next_start(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, background=False, batch_rows=1)
    await journal.commit(session(), episode("e1"), *(delivery("e1", t) for t in range(2000)))
    db = apsw.Connection(str(tmp_path / INDEX))
    db.execute("DROP TABLE turns")
    db.close()
    with pytest.raises(JournalUnavailable, match="restart the server"):
        journal.turns("e1")
    journal.close()
    journal = IndexedJournal(tmp_path)
    assert len(journal.turns("e1")) == 2000
    journal.close()


@pytest.mark.parametrize("table", ["turns", "replies", "episodes"])
async def test_a_damaged_row_of_the_index_is_reported_and_its_removal_repairs_it(tmp_path: Path, table: str) -> None:
    """SQLite returns a row with a flipped bit without an error."""
    journal = IndexedJournal(tmp_path)
    await journal.commit(session(), episode("e1"), *(delivery("e1", t, id=t + 1) for t in range(5)))
    journal.close()
    db = apsw.Connection(str(tmp_path / INDEX))
    if table == "episodes":
        db.execute("UPDATE episodes SET environment = CAST(x'ff' AS TEXT)")
    else:
        ((run,),) = db.execute(f"SELECT run FROM {table}").fetchall()
        assert isinstance(run, bytes)
        db.execute(f"UPDATE {table} SET run = ?", (run[:2] + b"\xc1" + run[3:],))  # no value of msgpack begins so
    db.close()
    journal = IndexedJournal(tmp_path)
    reads: dict[str, list[Callable[[], object]]] = {
        "turns": [lambda: journal.turns("e1"), lambda: journal.delivery("e1", 0)],
        "replies": [lambda: journal.replies("s", 1, 5)],
        "episodes": [lambda: journal.episode("e1")],
    }
    for read in reads[table]:
        with pytest.raises(JournalUnavailable, match=rf"remove \S*{INDEX}"):
            read()
    journal.close()
    assert salvage(tmp_path, dry_run=True).sessions == ()
    (tmp_path / INDEX).unlink()
    journal = IndexedJournal(tmp_path)
    assert len(journal.turns("e1")) == len(journal.replies("s", 1, 5)) == 5
    journal.close()


async def test_what_is_up_to_date_is_not_read_again_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = IndexedJournal(tmp_path)
    await journal.commit(session(), episode("e1"), *(delivery("e1", t, payload=b"x" * 1000) for t in range(500)))
    journal.close()
    size, read = sum(p.stat().st_size for p in tmp_path.glob("*.log")), 0
    real = DirectoryDisk.read_at

    def counted(self: DirectoryDisk, name: str, offset: int, size_bytes: int) -> bytes:
        nonlocal read
        found = real(self, name, offset, size_bytes)
        read += len(found)
        return found

    monkeypatch.setattr(DirectoryDisk, "read_at", counted)
    journal = IndexedJournal(tmp_path)
    assert size > 500_000 and read < 200
    assert len(journal.turns("e1")) == 500
    journal.close()


async def test_ids_may_come_out_of_order(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, background=False, batch_rows=3)
    await journal.commit(session(), episode("e1"))
    ids = [1, 2, 5, 4, 3, 90, 80, 70, 71, 60, *range(100, 200), 95, 96]
    for t, id in enumerate(ids):
        await journal.commit(delivery("e1", t, id=id))
    assert [row.id for row in journal.replies("s", 1, 999)] == sorted(ids)
    assert [row.id for row in journal.replies("s", 61, 95)] == [70, 71, 80, 90, 95]
    for id in ids:
        with pytest.raises(Conflict):
            await journal.commit(delivery("e1", 999, id=id))
    await journal.commit(delivery("e1", 999, id=6))
    journal.close()


async def test_what_leaves_for_the_index_is_read_throughout(tmp_path: Path) -> None:
    """Reads on other threads, one batch after the other on its way beside them."""
    journal = IndexedJournal(tmp_path, batch_rows=20)
    await journal.commit(session(), episode("e1"))
    done, last, others = threading.Event(), [-1], list[BaseException]()

    def read() -> None:
        chance = random.Random(1)
        try:
            while not done.is_set():
                known = last[0]
                if known < 0:
                    continue
                t = chance.randint(0, known)
                assert journal.delivery("e1", t) == delivery("e1", t, id=t + 1)
                assert len(journal.turns("e1")) > known
                assert journal.episodes(limit=1, principal=None)[0][0].deliveries > known
                assert [row.id for row in journal.replies("s", t + 1, t + 3)][:1] == [t + 1]
                found = journal.last_delivery("s")
                assert found is not None and found.t is not None and found.t >= known
        except BaseException as error:
            others.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for t in range(300):
        await journal.commit(delivery("e1", t, id=t + 1))
        last[0] = t
    done.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, 10)
    journal.close()
    assert others == []


class _Shared(dict[Any, Any]):
    """A dict of a batch, which commits change: it lets nobody go through it without the lock."""

    lock: threading.Lock

    def items(self) -> Any:
        assert self.lock.locked()
        return super().items()

    def values(self) -> Any:
        assert self.lock.locked()
        return super().values()


async def test_no_read_goes_through_what_commits_change_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, journal = MemoryJournal(), IndexedJournal(tmp_path, background=False)
    for store in (memory, journal):
        for n in range(3):
            sid, eid, ref = f"s{n}", f"e{n}", SnapshotRef("layer", f"{n}", "sha256:0")
            await store.commit(session(sid, recovery="reexecute"), episode(eid, sid), episode(f"e{n + 3}", sid))
            await store.commit(delivery(eid, 0, sid=sid, id=3, refs=(ref,)), delivery(eid, None, sid=sid, id=4))
            await store.commit(reward(eid, 0, sid=sid, seq=3), SessionChange(sid, given_out=True))
        await store.commit(SessionChange("s1", status="closed"))
    batch, lock = journal._live.batch, journal._live.lock
    monkeypatch.setattr(_Shared, "lock", lock, raising=False)
    for name in batch.__dataclass_fields__:
        if isinstance(there := getattr(batch, name), dict):
            inner = {key: _Shared(value) if isinstance(value, dict) else value for key, value in there.items()}
            monkeypatch.setattr(batch, name, _Shared(inner))
    _assert_alike(journal, memory)
    monkeypatch.undo()
    journal.close()


async def test_a_full_disk_under_the_index_holds_no_commit_and_loses_no_deletion(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, background=False, batch_rows=4)
    await journal.commit(session(), episode("e1"), episode("e2"), delivery("e1", 0, id=1), delivery("e2", 0, id=2))
    assert journal._index is not None
    real, fails = journal._index._db.execute, True

    class Full:
        """The index's connection on a disk without room."""

        def __getattr__(self, name: str) -> object:
            return getattr(db, name)

        def execute(self, sql: str, *args: object, **kwargs: object) -> object:
            if fails and sql.startswith("BEGIN"):
                raise apsw.FullError("database or disk is full")
            return real(sql, *args, **kwargs)  # type: ignore[arg-type]

    db = journal._index._db
    journal._index._db = Full()  # type: ignore[assignment]
    for t in range(1, 20):
        await journal.commit(delivery("e1", t, id=t + 2))
    assert len(journal.turns("e1")) == 20 and journal.failing is None
    with pytest.raises(JournalUnavailable, match="disk is full"):
        journal.delete_episode("e2")
    assert journal.delivery("e2", 0) is not None, "nothing was deleted"
    fails = False
    assert journal.delete_episode("e2") == 1
    await journal.commit(delivery("e1", 20, id=22))
    journal._index._db = db
    journal.close()
    again = IndexedJournal(tmp_path)
    assert len(again.turns("e1")) == 21 and again.episode("e2") is None
    again.close()


async def test_rows_are_applied_once_though_the_log_of_the_index_could_not_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = IndexedJournal(tmp_path, background=False, batch_rows=1)
    await journal.commit(session(), episode("e1"), delivery("e1", 0, id=1))
    assert journal._index is not None
    db, refused = journal._index._db, []

    class Full:
        """The index's connection, whose file has no room to grow."""

        def __getattr__(self, name: str) -> object:
            return getattr(db, name)

        def wal_checkpoint(self, **_: object) -> None:
            refused.append(1)
            raise apsw.FullError("database or disk is full")

    monkeypatch.setattr(index, "CHECKPOINT_PAGES", 1)
    journal._index._db = Full()  # type: ignore[assignment]
    for t in range(1, 4):
        await journal.commit(delivery("e1", t, id=t + 1))
    journal._index._db = db
    await journal.commit(delivery("e1", 4, id=5))
    assert refused and not journal._is_damaged and journal._index_failing is None
    assert [turn.t for turn in journal.turns("e1")] == [0, 1, 2, 3, 4]
    journal.close()


async def test_idle_sessions_are_forgotten_and_known_again(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, background=False, batch_rows=1)
    journal._live._max_idle = 10
    for n in range(100):
        sid, eid = f"s{n}", f"e{n}"
        await journal.commit(session(sid), episode(eid, sid), delivery(eid, 0, sid=sid, id=1, reward=0.1))
    assert len(journal._live.episodes) < 20 and len(journal._live.sessions) < 20
    highest = EpisodeOrder("reward")
    for n in range(100):
        sid, eid = f"s{n}", f"e{n}"
        with pytest.raises(Conflict):
            await journal.commit(delivery(eid, 0, sid=sid, id=2))
        with pytest.raises(Conflict):
            await journal.commit(delivery(eid, 1, sid=sid, id=1))
        await journal.commit(delivery(eid, 1, sid=sid, id=2, reward=0.2))
        (listed,), _ = journal.episodes(limit=1, wanted=EpisodeFilter(text=eid), order=highest, principal=None)
        assert listed.eid == eid and listed.reward == 0.1 + 0.2
    journal.close()


# -- groups, reads and the close --------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [{"error_kind": "\ud800"}, {"reward": 10**400}, {"id": 2**63}, {"payload": object()}])
def test_a_record_that_has_no_form_fails_its_own_group_only(journal: IndexedJournal, over: dict[str, object]) -> None:
    outcomes = written(
        journal,
        [session(), episode("e1"), delivery("e1", 0)],
        [session("bad"), delivery("e1", 1, **over)],  # type: ignore[arg-type]
        [session("s")],
        [delivery("e9", 0)],
        [session("good"), delivery("e1", 1)],
    )
    assert outcomes == [type(None), EnvironmentOutputInvalid, Conflict, UnknownEpisode, type(None)]
    assert journal.session("bad") is None and journal.session("good") is not None
    assert journal.delivery("e1", 1) == delivery("e1", 1)


@simulated
async def test_a_disk_that_fills_up_beside_a_conflict_writes_nothing_twice() -> None:
    with tempfile.TemporaryDirectory() as name:
        disk = SimulatedDisk(random.Random(1))
        journal = on(disk, Path(name))
        assert written(journal, [session("taken"), episode("e1")]) == [type(None)]
        groups: list[list[Record]] = [[session("s1")], [session("taken")], [delivery("e1", 0, payload=b"x" * 4000)]]
        disk.faults.capacity_bytes = 2000
        for _ in range(2):
            with pytest.raises(StoreFailed):
                journal._write(list(groups))
            assert journal.session("s1") is None
        disk.faults.capacity_bytes = 2**30
        assert written(journal, *groups) == [type(None), Conflict, type(None)]
        assert journal.session("s1") is not None and [t.t for t in journal.turns("e1")] == [0]
        journal.close()


def test_reads_that_go_on_while_the_journal_closes_are_answered_or_refused(journal: IndexedJournal) -> None:
    assert written(journal, [session(), episode("e1"), delivery("e1", 0)]) == [type(None)]
    others: list[BaseException] = []
    running = threading.Barrier(5)

    def read() -> None:
        running.wait(HANGS_S)
        try:
            while True:
                assert journal.turns("e1") and journal.delivery("e1", 0) == delivery("e1", 0)
        except JournalUnavailable:
            pass
        except BaseException as error:
            others.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    running.wait(HANGS_S)
    journal.close()
    for thread in threads:
        thread.join(60)
    assert others == [] and not any(thread.is_alive() for thread in threads)
    with pytest.raises(JournalUnavailable, match="closed"):
        journal.session("another")
    with pytest.raises(JournalUnavailable, match="closed"):
        journal.delete_episode("e1")


def test_a_read_that_runs_ends_before_the_journal_is_closed(journal: IndexedJournal) -> None:
    begun, go = threading.Event(), threading.Event()
    found: list[object] = []

    def hold() -> int:
        begun.set()
        return int(go.wait(60))

    def read() -> None:
        journal._readers._reader().db.create_scalar_function("hold", hold)
        found.extend(journal._rows("SELECT hold()"))

    reader, closer = threading.Thread(target=read), threading.Thread(target=journal.close)
    reader.start()
    assert begun.wait(60)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    go.set()
    reader.join(60)
    closer.join(60)
    assert found == [(1,)]


async def test_every_read_is_the_same_before_and_after_a_restart_and_in_a_look_from_outside(tmp_path: Path) -> None:
    memory, journal = MemoryJournal(), IndexedJournal(tmp_path, batch_rows=7, background=False, segment_bytes=3000)
    chance = random.Random(7)
    for n in range(12):
        sid, eid = f"s{n % 5}", f"e{n}"
        records: list[Record] = [session(sid, recovery="reexecute", created=n * 0.1)] if n < 5 else []
        records += [episode(eid, sid, principal=chance.choice([None, "p"]))]
        for t in range(chance.randint(0, 12)):
            kind, refs = chance.choice([None, None, "timeout"]), (SnapshotRef("layer", f"{eid}.{t}", "sha256:0"),)
            records.append(delivery(eid, t, sid=sid, id=n * 100 + 2 * t, error_kind=kind, refs=refs if t % 2 else ()))
            if chance.random() < 0.3:
                records.append(delivery(eid, None, sid=sid, id=n * 100 + 2 * t + 1, status="EXECUTION_ERROR"))
            if chance.random() < 0.3:
                records.append(reward(eid, t, reward_id=f"{t}", sid=sid, seq=n * 100 + t + 1))
        for store in (memory, journal):
            await store.commit(*records)
    for store in (memory, journal):
        store.delete_episode("e3")
        await store.commit(SessionChange("s1", status="closed"), SessionChange("s2", given_out=True))
        await store.commit(SessionChange("s2", lost="why"), delivery("e11", 50, sid="s1", id=5000, done=True))
        store.delete_episode("e7")
    looked = ReadOnlyJournal(tmp_path)
    await asyncio.to_thread(_assert_alike, looked, memory)
    await asyncio.to_thread(_assert_alike, journal, memory)
    looked.close()
    journal.close()
    for spoilt in (lambda: None, (tmp_path / INDEX).unlink):
        spoilt()
        looked = ReadOnlyJournal(tmp_path)
        await asyncio.to_thread(_assert_alike, looked, memory)
        looked.close()
        again = IndexedJournal(tmp_path)
        await asyncio.to_thread(_assert_alike, again, memory)
        again.close()


def _assert_alike(one: Journal, other: Journal) -> None:
    reads: list[Callable[[Journal], object]] = [
        lambda j: j.refs(),
        lambda j: [astuple(held)[1:] for held in j.held(after=0, limit=9)],  # n a rebuilt index counts anew
        lambda j: sorted(j.open_sessions(), key=lambda s: s.sid),
        *(
            functools.partial(
                lambda j, e, p: j.episodes(limit=9, wanted=EpisodeFilter(error_kind=e), principal=p)[0], e=e, p=p
            )
            for e in (None, "timeout")
            for p in (None, "p")
        ),
    ]
    for n in range(12):
        eid = f"e{n}"
        for read in ("episode", "turns", "rewards"):
            reads.append(functools.partial(lambda j, r, e: getattr(j, r)(e), r=read, e=eid))
        reads += [functools.partial(lambda j, e, t: j.recorded(e, t), e=eid, t=t) for t in range(13)]
    for n in range(5):
        sid = f"s{n}"
        for read in ("session", "first_episode", "session_episodes", "last_delivery", "last_id", "last_seq"):
            reads.append(functools.partial(lambda j, r, s: getattr(j, r)(s), r=read, s=sid))
        reads.append(functools.partial(lambda j, s: [(r.id, r.t) for r in j.replies(s, 3, 900)], s=sid))
        reads.append(functools.partial(lambda j, s: j.pushes(s, 3, 900), s=sid))
    for read_it in reads:
        assert read_it(one) == read_it(other)


async def test_the_report_says_what_is_where_and_what_is_wrong(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path, background=False, segment_bytes=2000)
    await _fill(journal)
    size = journal_size(tmp_path)
    assert size.rows["step"] + size.rows["reset"] == 60 and size.rows["SessionRow"] == 3 and size.rows["Deletion"] == 1
    assert size.columns["payload"] > 12 * 300 and sum(s.dead_rows for s in size.segments) == 36 + 12 + 1
    assert sum(s.size_bytes for s in size.segments) == sum(p.stat().st_size for p in tmp_path.glob("*.log"))
    assert journal_problems(tmp_path) == []
    journal.compact(garbage=0.1)
    less = journal_size(tmp_path)
    assert less.rows["RewardRow"] < size.rows["RewardRow"] and journal_problems(tmp_path) == []
    journal.close()
    assert journal_problems(tmp_path) == []
    db = apsw.Connection(str(tmp_path / INDEX))
    db.execute("DELETE FROM turns WHERE last = 11")
    db.close()
    found = journal_problems(tmp_path)
    assert any("the index has another, or none" in problem for problem in found)
    assert any("12 deliveries in the segments" in problem for problem in found)
    segment = tmp_path / "00000002.log"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    assert any("damaged" in problem for problem in journal_problems(tmp_path))


def test_a_batch_that_is_empty_does_not_leave() -> None:
    assert Live().leave() is None
