"""The journal's promises, on every store that makes them."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from errata_protocol.environment import SnapshotRef
from errata_protocol.episode_lists import EpisodeFilter, ListPlace
from errata_protocol.errors import Conflict, ErrataError, JournalUnavailable, UnknownEpisode
from errata_server.journal import (
    DirectoryDisk,
    IndexedJournal,
    Journal,
    LogJournal,
    MemoryJournal,
    SessionChange,
)
from errata_server.journal.base import Record
from errata_server.journal.writer import StoreFailed, ThreadWriter
from errata_server.recovery import repeats_requests
from errata_server.simulation import LoopWriter, SimulatedDisk

from .journal_rows import delivery, episode, reward, session
from .json_lines_journal import JsonLinesJournal

STORES: dict[str, Callable[[Path], Journal]] = {
    "memory": lambda _: MemoryJournal(),
    "indexed": IndexedJournal,
    "indexed, nothing waits for its index": lambda d: IndexedJournal(d, batch_rows=1, background=False),
    "indexed, all waits for its index": lambda d: IndexedJournal(d, background=False),
    "indexed, without fsync, many segments": lambda d: IndexedJournal(d, fsync=False, segment_bytes=100, batch_rows=2),
    "json lines, of another distribution": JsonLinesJournal,
    "log": lambda directory: LogJournal(DirectoryDisk(directory)),
    "simulated log": lambda _: LogJournal(SimulatedDisk(random.Random(0)), writer=LoopWriter),
}


@pytest.fixture(params=STORES)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    made = STORES[request.param](tmp_path)
    yield made
    made.close()


async def test_a_committed_delivery_is_read_back_whole(journal: Journal) -> None:
    row = delivery("e1", 0, refs=(SnapshotRef("layer", "l1", "sha256:x"),), error_kind="timeout", done=True)
    await journal.commit(session(), episode("e1"), row)
    assert journal.delivery("e1", 0) == row
    assert journal.last_delivery("s") == row
    assert journal.delivery("e1", 1) is None
    assert journal.session("s") == session()
    assert journal.refs() == {SnapshotRef("layer", "l1", "sha256:x")}


async def test_errors_are_read_after_the_delivery_that_they_followed(journal: Journal) -> None:
    await journal.commit(session(recovery="reexecute"), episode("e1"), delivery("e1", 0))
    first, second, third = (delivery("e1", None, status="EXECUTION_ERROR", payload=f"{n}".encode()) for n in range(3))
    await journal.commit(first)
    await journal.commit(second)
    await journal.commit(delivery("e1", 1))
    await journal.commit(third)
    assert journal.recorded("e1", 0) == [delivery("e1", 0), first, second]
    assert journal.recorded("e1", 1) == [delivery("e1", 1), third]
    assert journal.recorded("e1", 2) == journal.recorded("e2", 0) == []
    journal.delete_episode("e1")
    assert journal.recorded("e1", 0) == []


async def test_why_a_session_is_lost_is_kept(journal: Journal) -> None:
    await journal.commit(session())
    await journal.commit(SessionChange("s", status="lost", lost="its disk broke"))
    await journal.commit(SessionChange("s", given_out=True))
    assert journal.session("s") == session(status="lost", given_out=True, lost="its disk broke")


async def test_a_second_delivery_under_the_same_t_is_a_conflict_and_writes_nothing(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    with pytest.raises(Conflict):
        await journal.commit(episode("e2"), delivery("e1", 0, payload=b"other"))
    assert journal.episode("e2") is None
    assert journal.delivery("e1", 0) == delivery("e1", 0)


async def test_a_conflicting_commit_does_not_harm_its_neighbours_in_the_group(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    commits = [journal.commit(delivery("e1", t)) for t in (1, 0, 2)]
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    assert [type(o) for o in outcomes] == [type(None), Conflict, type(None)]
    assert [t.t for t in journal.turns("e1")] == [0, 1, 2]


async def test_a_semantic_digest_is_made_when_it_is_asked_for(journal: Journal) -> None:
    payload = b'{"observation":{"took_s":0.25},"reward":1.0}'
    lazy, stored = (
        delivery("e1", 0, payload=payload, volatile=("took_s",)),
        delivery("e1", 1, semantic_digest=b"d" * 32),
    )
    await journal.commit(session(), episode("e1"), lazy, stored, delivery("e1", 2))
    expected = [hashlib.sha256(b'{"observation":{},"reward":1}').digest(), b"d" * 32, None]
    assert [t.semantic_digest for t in journal.turns("e1", semantic=True)] == expected
    assert [t.semantic_digest for t in journal.turns("e1")] == [None] * 3
    again = [journal.delivery("e1", t) for t in range(3)]
    assert [row.semantic() for row in again if row is not None] == expected and again[0] == lazy


async def test_listing_pages_newest_first_and_filters(journal: Journal) -> None:
    await journal.commit(session())
    for n in range(5):
        kind = "timeout" if n == 3 else None
        await journal.commit(episode(f"e{n}"), delivery(f"e{n}", 0), delivery(f"e{n}", 1, error_kind=kind, done=n == 4))
    page, cursor = journal.episodes(limit=2, principal=None)
    assert [s.row.eid for s in page] == ["e4", "e3"] and cursor is not None
    assert page[0].done and page[0].deliveries == 2 and page[0].reward == 1.0
    assert page[1].error_kinds == {"timeout": 1}
    rest, cursor = journal.episodes(limit=10, after=cursor, principal=None)
    assert [s.row.eid for s in rest] == ["e2", "e1", "e0"] and cursor is None
    assert [
        s.row.eid for s in journal.episodes(limit=9, wanted=EpisodeFilter(error_kind="timeout"), principal=None)[0]
    ] == ["e3"]
    assert journal.episodes(limit=9, wanted=EpisodeFilter(environment="other"), principal=None)[0] == []


async def test_listing_shows_an_owners_episodes_to_nobody_else(journal: Journal) -> None:
    for eid, principal in (("e1", None), ("e2", "alice"), ("e3", "bob")):
        await journal.commit(episode(eid, principal=principal))
    listed = {p: [s.row.eid for s in journal.episodes(limit=9, principal=p)[0]] for p in (None, "alice", "carol")}
    assert listed == {None: ["e1"], "alice": ["e2"], "carol": []}


async def test_a_delivery_of_a_deleted_episode_is_refused_and_writes_nothing(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    journal.delete_episode("e1")
    with pytest.raises(UnknownEpisode):
        await journal.commit(session("s2"), delivery("e1", 1))
    assert journal.delivery("e1", 1) is None and journal.session("s2") is None


async def test_a_recorded_error_of_a_deleted_episode_goes_with_it(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"), delivery("e1", 0), delivery("e1", None, id=5))
    journal.delete_episode("e1")
    await journal.commit(delivery("e1", None, id=5))
    await journal.commit(episode("e2"), delivery("e2", 0, id=5))  # id 5 is free: neither record is there
    with pytest.raises(Conflict):
        await journal.commit(delivery("e2", None, id=5))


async def test_records_of_one_commit_contradict_each_other_as_those_of_two_do(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"))
    for twice in (delivery("e1", 0), delivery("e1", None, id=1), session("s2"), episode("e2")):
        with pytest.raises(Conflict):
            await journal.commit(twice, twice)
    assert journal.turns("e1") == [] and journal.session("s2") is None and journal.episode("e2") is None


async def test_a_fork_needs_the_delivery_it_starts_from(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    await journal.commit(episode("child", "c", origin_eid="e1", origin_t=0), delivery("child", 0, sid="c"))
    with pytest.raises(UnknownEpisode):
        await journal.commit(episode("beyond", "b", origin_eid="e1", origin_t=1), delivery("beyond", 0, sid="b"))
    journal.delete_episode("e1")
    with pytest.raises(UnknownEpisode):
        await journal.commit(session("l"), episode("late", "l", origin_eid="e1", origin_t=0), delivery("late", 0))
    assert journal.session("l") is None
    assert [s.row.eid for s in journal.episodes(limit=9, principal=None)[0]] == ["child"]


async def test_after_its_last_episode_was_deleted_a_session_stands_on_the_one_before(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"), delivery("e1", 0), delivery("e1", 1))
    await journal.commit(episode("e2"), delivery("e2", 0))
    assert journal.session_episodes("s") == ["e1", "e2"]
    assert journal.session_episodes("nobody") == []
    journal.delete_episode("e2")
    assert journal.session_episodes("s") == ["e1"]
    assert journal.last_delivery("s") == delivery("e1", 1)
    first = journal.first_episode("s")
    assert first is not None and first.eid == "e1"


async def test_a_key_that_no_row_can_have_is_not_found(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    assert journal.session("\ud800") is None
    assert journal.delivery("e1", 2**70) is None
    assert len(journal.episodes(limit=9, after=ListPlace(2.0**70, ""), principal=None)[0]) == 1
    assert journal.episodes(limit=9, wanted=EpisodeFilter(task="\ud800"), principal=None) == ([], None)


async def test_a_session_change_keeps_the_other_columns(journal: Journal) -> None:
    await journal.commit(session(), session("s2"))
    await journal.commit(SessionChange("s", given_out=True))
    await journal.commit(SessionChange("s2", status="closed"))
    assert [s.sid for s in journal.open_sessions()] == ["s"]
    found = journal.session("s")
    assert found is not None and found.given_out and found.status == "open" and found.seed == 7


async def test_a_fork_request_is_found_again(journal: Journal) -> None:
    await journal.commit(session("child", fork_of="e1", fork_request="r1"))
    found = journal.fork_session("e1", "r1")
    assert found is not None and found.sid == "child"
    assert journal.fork_session("e1", "r2") is None
    with pytest.raises(Conflict):
        await journal.commit(session("child2", fork_of="e1", fork_request="r1"))


async def test_replies_are_read_by_id_whatever_they_were(journal: Journal) -> None:
    refused = delivery("", None, id=1, kind="step", status="VALIDATION_ERROR")
    await journal.commit(session(), refused)
    await journal.commit(episode("e"), delivery("e", 0, id=2))
    forked = delivery("e", None, id=3, kind="fork")
    await journal.commit(forked)
    await journal.commit(delivery("e", 1, id=4))
    assert [(r.id, r.kind, r.status, r.t) for r in journal.replies("s", 1, 3)] == [
        (1, "step", "VALIDATION_ERROR", None),
        (2, "reset", "ok", 0),
        (3, "fork", "ok", None),
    ]
    assert journal.replies("s", 4, 2**62) == [journal.delivery("e", 1)]
    assert journal.replies("other", 1, 9) == []
    assert journal.last_id("s") == 4 and journal.last_id("other") == 0
    last = journal.last_delivery("s")
    assert last is not None and last.t == 1


async def test_an_id_is_used_once_in_its_session(journal: Journal) -> None:
    await journal.commit(session(), session("other"), delivery("", None, id=1, status="CANCELLED"))
    with pytest.raises(Conflict):
        await journal.commit(episode("e"), delivery("e", 0, id=1))
    assert journal.episode("e") is None
    await journal.commit(episode("f", sid="other"), delivery("f", 0, sid="other", id=1))


async def test_ids_and_seqs_of_deleted_episodes_stay_counted(journal: Journal) -> None:
    await journal.commit(session(), episode("e"), delivery("e", 0, id=1), delivery("e", 1, id=2))
    await journal.commit(reward("e", 1, seq=1))
    await journal.commit(episode("f"), delivery("f", 0, id=3), reward("f", 0, seq=2))
    journal.delete_episode("e")
    assert [r.id for r in journal.replies("s", 1, 9)] == [3]
    assert [r.seq for r in journal.pushes("s", 1, 9)] == [2]
    journal.delete_episode("f")
    assert (journal.last_id("s"), journal.last_seq("s")) == (3, 2)
    assert journal.rewards("e") == [] and journal.pushes("s", 1, 9) == []


async def test_late_rewards_are_appended_and_never_twice(journal: Journal) -> None:
    await journal.commit(session(), episode("e"), delivery("e", 0), delivery("e", 1))
    first, second = reward("e", 1, seq=1), reward("e", 0, reward_id="b", seq=2, source="judge", value=-1.5)
    unpushed = reward("e", 1, reward_id="c", seq=None)
    for record in (first, second, unpushed):
        await journal.commit(record)
    assert journal.rewards("e") == [first, second, unpushed]
    assert journal.pushes("s", 2, 2) == [second] and journal.last_seq("s") == 2
    for clash in (reward("e", 0, seq=3), reward("e", 0, reward_id="d", seq=2)):
        with pytest.raises(Conflict):
            await journal.commit(clash)
    with pytest.raises(UnknownEpisode):
        await journal.commit(reward("e", 7, reward_id="d", seq=3))
    with pytest.raises(UnknownEpisode):
        await journal.commit(reward("gone", 0, seq=3))
    assert len(journal.rewards("e")) == 3 and journal.rewards("gone") == []


async def test_a_multiplexed_session_keeps_the_hash_of_its_key_and_its_group(journal: Journal) -> None:
    row = session(key_hash=b"k" * 32, group="g", given_out=True)
    await journal.commit(row)
    assert journal.session("s") == row
    await journal.commit(SessionChange("s", status="expired"))
    found = journal.session("s")
    assert found is not None and found.status == "expired" and found.key_hash == b"k" * 32


async def test_deleting_an_episode_releases_its_refs(journal: Journal) -> None:
    for eid in ("e1", "e2"):
        await journal.commit(episode(eid), delivery(eid, 0, refs=(SnapshotRef("layer", eid),)))
    assert journal.delete_episode("e1") == 1
    assert journal.refs() == {SnapshotRef("layer", "e2")}
    assert journal.episode("e1") is None and journal.delivery("e1", 0) is None


async def test_what_a_fork_comes_from_is_spared_where_that_is_asked_for(journal: Journal) -> None:
    await journal.commit(session(), episode("root"), delivery("root", 0))
    await journal.commit(episode("child", origin_eid="root", origin_t=0), delivery("child", 0))
    assert journal.delete_episode("root", unless_forked=True) == 0 and journal.delivery("root", 0) is not None
    assert journal.delete_episode("child", unless_forked=True) == 1
    assert journal.delete_episode("root", unless_forked=True) == 1 and journal.episode("root") is None
    await journal.commit(episode("again"), delivery("again", 0))
    await journal.commit(episode("fork", origin_eid="again", origin_t=0), delivery("fork", 0))
    assert journal.delete_episode("again") == 1, "nobody asked"
    assert journal.delete_episode("fork", unless_forked=True) == 1


async def test_a_fork_and_a_deletion_that_spares_forks_never_both_come_to_pass(tmp_path: Path) -> None:
    journal = IndexedJournal(tmp_path)
    for n in range(40):
        root, fork = episode(f"root{n}"), episode(f"fork{n}", origin_eid=f"root{n}", origin_t=0)
        await journal.commit(*([session()] if n == 0 else []), root, delivery(root.eid, 0))
        asked = asyncio.create_task(asyncio.to_thread(journal.delete_episode, root.eid, unless_forked=True))
        await (asked if n % 4 == 0 else asyncio.sleep(0.0005 * (n % 4)))
        try:
            await journal.commit(fork, delivery(fork.eid, 0))
        except UnknownEpisode:
            assert await asked == 1 and journal.episode(root.eid) is None
        else:
            assert await asked == 0 and journal.delivery(root.eid, 0) is not None and n % 4
    journal.close()


async def test_a_closed_journal_refuses_commits(journal: Journal) -> None:
    journal.close()
    with pytest.raises(JournalUnavailable):
        await journal.commit(session())


async def test_memory_forgets_closed_sessions_whole_and_keeps_open_ones() -> None:
    journal = MemoryJournal(max_bytes=100_000)
    await journal.commit(session("open"), episode("kept", "open"), delivery("kept", 0, sid="open", id=0))
    for n in range(200):
        sid, eid = f"s{n}", f"e{n}"
        await journal.commit(session(sid, fork_of="kept", fork_request=sid), episode(eid, sid))
        await journal.commit(delivery(eid, 0, sid=sid, id=0, payload=b"x" * 5000))
        await journal.commit(delivery(eid, None, sid=sid, id=1, payload=b"x" * 5000))
        await journal.commit(SessionChange(sid, status="closed"))
    assert journal.session("open") is not None and journal.delivery("kept", 0) is not None
    assert journal.session("s199") is not None and journal.fork_session("kept", "s199") == journal.session("s199")
    assert journal.session("s0") is None and journal.fork_session("kept", "s0") is None
    for index in (journal._sessions, journal._episodes, journal._deliveries, journal._episodes_of, journal._replies):
        assert len(index) < 20
    assert len(journal._forks) < 20


async def test_memory_that_is_full_of_open_sessions_is_not_looked_through_at_each_commit() -> None:
    looked = 0

    class Counting(MemoryJournal):
        def _forget(self) -> None:
            nonlocal looked
            looked += 1
            super()._forget()

    journal = Counting(max_bytes=100_000)
    for n in range(200):
        await journal.commit(session(f"s{n}"), episode(f"e{n}", f"s{n}"), delivery(f"e{n}", 0, sid=f"s{n}", id=0))
    for t in range(1, 11):
        for n in range(200):
            await journal.commit(delivery(f"e{n}", t, sid=f"s{n}", id=t, payload=b"x" * 500))
    assert journal._bytes > 1_000_000 and 2 <= looked < 100
    for n in range(200):
        await journal.commit(SessionChange(f"s{n}", status="closed"))
    await journal.commit(
        session("more"), episode("more", "more"), delivery("more", 0, sid="more", payload=bytes(1 << 20))
    )
    assert journal._bytes < 2_000_000


async def test_memory_is_not_filled_by_recorded_errors() -> None:
    journal = MemoryJournal(max_bytes=1 << 20, repeats_requests=repeats_requests)
    await journal.commit(session(), episode("e1"), delivery("e1", 0))
    tracemalloc.start()
    for n in range(20):
        await journal.commit(delivery("e1", None, id=n, request=bytes(1 << 20)))
    held = [trace for trace in tracemalloc.take_snapshot().traces if trace.size >= 1 << 20]
    tracemalloc.stop()
    assert len(held) < 2  # of 20; the watch of the loop may look at a call that has ended, and so keep its argument


async def committed(writer: ThreadWriter, records: list[Record]) -> None:
    settled: asyncio.Future[ErrataError | None] = asyncio.get_running_loop().create_future()
    writer.submit(records, lambda _, error: settled.set_result(error))
    error = await settled
    if error is not None:
        raise error


async def test_commits_wait_while_the_store_fails_and_go_on_when_it_recovers() -> None:
    failing = threading.Event()
    failing.set()
    attempted = threading.Event()
    written: list[object] = []

    def write(groups: list) -> list:  # type: ignore[type-arg]
        if failing.is_set():
            attempted.set()
            raise StoreFailed("disk full")
        written.extend(groups)
        return [None] * len(groups)

    writer = ThreadWriter(write, "test")
    waiting = asyncio.ensure_future(committed(writer, [session()]))
    await asyncio.to_thread(attempted.wait, 5)
    assert not waiting.done()
    failing.clear()
    await asyncio.wait_for(waiting, 60)
    assert written == [[session()]]
    assert writer.failing is None
    writer.close()


async def test_a_store_that_fails_until_shutdown_refuses_what_waits() -> None:
    attempted = threading.Event()

    def write(groups: list) -> list:  # type: ignore[type-arg]
        attempted.set()
        raise StoreFailed("disk full")

    writer = ThreadWriter(write, "test")
    waiting = asyncio.ensure_future(committed(writer, [session()]))
    await asyncio.to_thread(attempted.wait, 5)
    await asyncio.to_thread(writer.close)
    with pytest.raises(JournalUnavailable, match="disk full"):
        await waiting
