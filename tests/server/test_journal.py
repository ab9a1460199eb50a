"""The journal's promises, on both stores where both make them."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import Conflict, JournalUnavailable
from errata_server.journal import (
    DeliveryRow,
    EpisodeRow,
    Journal,
    MemoryJournal,
    SessionChange,
    SessionRow,
    SqliteJournal,
)
from errata_server.journal.disk import ForgetfulDisk
from errata_server.journal.writer import GroupWriter, StoreFailed


def delivery(
    eid: str, t: int | None, *, sid: str = "s", refs: tuple[SnapshotRef, ...] = (), **over: object
) -> DeliveryRow:
    payload = f'{{"t":{t}}}'.encode()
    values: dict[str, object] = {
        "eid": eid, "t": t, "sid": sid, "id": None, "kind": "step" if t else "reset", "request": b"{}",
        "request_sha": hashlib.sha256(b"{}").digest(), "status": "ok", "payload": payload,
        "digest": hashlib.sha256(payload).digest(), "semantic_digest": None, "state": b"s", "refs": refs,
        "created": 1.0, "reward": 0.5,
    }  # fmt: skip
    return DeliveryRow(**{**values, **over})  # type: ignore[arg-type]


def session(sid: str = "s", **over: object) -> SessionRow:
    return SessionRow(**{"sid": sid, "environment": "e", "recovery": "none", "seed": 7, "created": 1.0, **over})  # type: ignore[arg-type]


def episode(eid: str, sid: str = "s", **over: object) -> EpisodeRow:
    return EpisodeRow(**{"eid": eid, "sid": sid, "environment": "e", "created": 1.0, **over})  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    made: Journal = MemoryJournal() if request.param == "memory" else SqliteJournal(tmp_path / "j.db")
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


async def test_listing_pages_newest_first_and_filters(journal: Journal) -> None:
    await journal.commit(session())
    for n in range(5):
        kind = "timeout" if n == 3 else None
        await journal.commit(episode(f"e{n}"), delivery(f"e{n}", 0), delivery(f"e{n}", 1, error_kind=kind, done=n == 4))
    page, cursor = journal.episodes(limit=2)
    assert [s.row.eid for s in page] == ["e4", "e3"] and cursor is not None
    assert page[0].done and page[0].deliveries == 2 and page[0].reward == 1.0
    assert page[1].error_kinds == {"timeout": 1}
    rest, cursor = journal.episodes(limit=10, before=cursor)
    assert [s.row.eid for s in rest] == ["e2", "e1", "e0"] and cursor is None
    assert [s.row.eid for s in journal.episodes(limit=9, error_kind="timeout")[0]] == ["e3"]
    assert journal.episodes(limit=9, environment="other")[0] == []


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


async def test_deleting_an_episode_releases_its_refs(journal: Journal) -> None:
    for eid in ("e1", "e2"):
        await journal.commit(episode(eid), delivery(eid, 0, refs=(SnapshotRef("layer", eid),)))
    assert journal.delete_episode("e1") == 1
    assert journal.refs() == {SnapshotRef("layer", "e2")}
    assert journal.episode("e1") is None and journal.delivery("e1", 0) is None


async def test_a_closed_journal_refuses_commits(journal: Journal) -> None:
    journal.close()
    with pytest.raises(JournalUnavailable):
        await journal.commit(session())


async def test_rows_are_there_after_reopening(tmp_path: Path) -> None:
    first = SqliteJournal(tmp_path / "j.db")
    await first.commit(session(), episode("e1"), *(delivery("e1", t) for t in range(50)))
    first.close()
    second = SqliteJournal(tmp_path / "j.db")
    assert [t.t for t in second.turns("e1")] == list(range(50))
    second.close()


def _committed_after_power_loss(tmp_path: Path, *, honours_sync: bool) -> list[int]:
    disk = ForgetfulDisk(f"forgetful-{honours_sync}-{tmp_path.name}", honours_sync=honours_sync)
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    journal = SqliteJournal(tmp_path / "before" / "j.db", vfs=disk.name)

    async def load() -> None:
        await journal.commit(session(), episode("e1"))
        for t in range(20):
            await journal.commit(delivery("e1", t))

    asyncio.run(load())
    disk.power_loss(tmp_path / "after")  # at this moment all 20 were acknowledged
    journal.close()
    if not (tmp_path / "after" / "j.db").exists():
        return []
    found = SqliteJournal(tmp_path / "after" / "j.db")
    turns = [t.t for t in found.turns("e1")]
    found.close()
    return turns


def test_a_sync_stands_between_a_commit_and_its_acknowledgement(tmp_path: Path) -> None:
    assert _committed_after_power_loss(tmp_path, honours_sync=True) == list(range(20))


def test_the_disk_fake_does_lose_what_was_never_synced(tmp_path: Path) -> None:
    assert _committed_after_power_loss(tmp_path, honours_sync=False) == []


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

    writer = GroupWriter(write, "test")
    waiting = asyncio.ensure_future(writer.commit([session()]))
    await asyncio.to_thread(attempted.wait, 5)
    assert not waiting.done()
    failing.clear()
    await asyncio.wait_for(waiting, 5)
    assert written == [[session()]]
    assert writer.failing is None
    writer.close()


async def test_a_store_that_fails_until_shutdown_refuses_what_waits() -> None:
    attempted = threading.Event()

    def write(groups: list) -> list:  # type: ignore[type-arg]
        attempted.set()
        raise StoreFailed("disk full")

    writer = GroupWriter(write, "test")
    waiting = asyncio.ensure_future(writer.commit([session()]))
    await asyncio.to_thread(attempted.wait, 5)
    await asyncio.to_thread(writer.close)
    with pytest.raises(JournalUnavailable, match="disk full"):
        await waiting


def test_a_journal_of_another_version_is_refused_with_the_next_step(tmp_path: Path) -> None:
    db = apsw.Connection(str(tmp_path / "j.db"))
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(JournalUnavailable, match=r"schema version 99.*data-dir"):
        SqliteJournal(tmp_path / "j.db")
