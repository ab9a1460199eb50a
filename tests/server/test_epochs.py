"""Data directories that several boxes see: who has which epoch's, and what it is made of (decision 210)."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient
from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import InvalidRequest, JournalUnavailable
from errata_protocol.mux import FindSession, ServerConfig, ServerProtocol
from errata_server.cli import data_dirs
from errata_server.journal import IndexedJournal, JournalType
from errata_server.journal import registry as journal_registry
from errata_server.journal.segments_type import SegmentsType
from errata_server.runtime import epochs
from errata_server.runtime.data_lock import EPOCHS, lock
from errata_server.runtime.epochs import current, enter, epochs_in, later_than, remove_earlier
from errata_server.runtime.lease import Lease, LeaseWriter, now_ns
from errata_server.runtime.lease_watch import LeaseWatch
from errata_server.runtime.runtime import Runtime
from errata_server.runtime.shard_dirs import name_of
from errata_server.runtime.shard_name import shard_name
from errata_server.settings import Settings

from .journal_rows import delivery, episode, session
from .local_server import LocalServer

LAYER = SnapshotRef(kind="layer", id="a")


async def commits(directory: Path, first: int, last: int) -> None:
    """Commit deliveries of one episode in a data directory."""
    journal = IndexedJournal(directory / "journal")
    if first == 0:
        await journal.commit(session(), episode("e1"))
    for t in range(first, last):
        await journal.commit(delivery("e1", t))
    journal.close()


def turns(directory: Path) -> list[int]:
    journal = IndexedJournal(directory / "journal")
    try:
        return [turn.t for turn in journal.turns("e1")]
    finally:
        journal.close()


async def test_each_epoch_goes_on_from_the_one_before(tmp_path: Path) -> None:
    first = enter(tmp_path, 3)
    await commits(first, 0, 2)
    second = enter(tmp_path, 7)
    await commits(first, 2, 5)  # the old owner goes on
    await commits(second, 2, 4)
    third = enter(tmp_path, 8)
    assert turns(third) == [0, 1, 2, 3] and epochs_in(tmp_path) == [3, 7, 8]
    assert name_of(tmp_path) == shard_name(tmp_path)
    assert shard_name(first) == shard_name(second) == shard_name(third) == shard_name(tmp_path)
    assert current(tmp_path) == third and later_than(first) == 8 and later_than(third) is None


async def test_an_owner_that_starts_again_has_its_directory(tmp_path: Path) -> None:
    first = enter(tmp_path, 3)
    await commits(first, 0, 2)
    assert enter(tmp_path, 3) == first and turns(first) == [0, 1]


async def test_an_owner_that_was_followed_gets_none(tmp_path: Path) -> None:
    enter(tmp_path, 3)
    enter(tmp_path, 7)
    for epoch in (3, 5):
        with pytest.raises(JournalUnavailable, match="epoch 7 has taken"):
            enter(tmp_path, epoch)
    assert epochs_in(tmp_path) == [3, 7]


async def test_an_epoch_of_another_box_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(tmp_path, 3)
    monkeypatch.setattr(epochs, "boot_id", lambda: "another")
    with pytest.raises(JournalUnavailable, match="another box"):
        enter(tmp_path, 3)


async def test_a_plain_data_directory_is_taken_over_and_then_refuses_servers_without_a_lease(tmp_path: Path) -> None:
    await commits(tmp_path, 0, 3)
    (tmp_path / "hash_seed").write_text("5\n")
    own = enter(tmp_path, 1)
    assert turns(own) == [0, 1, 2] and (own / "hash_seed").read_text() == "5\n"
    remove_earlier(own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epochs", "hash_seed", "lock", "shard"]
    with pytest.raises(JournalUnavailable, match="give --lease"):
        Runtime(Settings(data_dir=tmp_path))


def test_a_directory_that_a_plain_server_uses_is_not_taken_over(tmp_path: Path) -> None:
    lock(tmp_path)
    with pytest.raises(JournalUnavailable, match="in use by process"):
        enter(tmp_path, 1)
    assert not (tmp_path / EPOCHS).exists()


async def test_what_earlier_owners_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    first = enter(tmp_path, 1)
    await commits(first, 0, 3)
    own = enter(tmp_path, 3)
    for name in (f"{2:020d}.new-aa", f"{4:020d}.new-bb", f"{1:020d}.old-cc"):
        (tmp_path / EPOCHS / name).mkdir()
    later = tmp_path / EPOCHS / f"{5:020d}"
    shutil.copytree(own, later)
    remove_earlier(own)
    left = sorted(path.name for path in (tmp_path / EPOCHS).iterdir())
    assert left == [own.name, f"{4:020d}.new-bb", later.name] and turns(own) == [0, 1, 2]


async def test_a_take_over_starts_again_when_its_source_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epoch 2 was slow: it becomes complete, and removes epoch 1, while epoch 3 copies that."""
    await commits(enter(tmp_path, 1), 0, 2)
    fill, filled = epochs._fill, list[str]()

    def filling(source: Path, draft: Path, store: str | None) -> None:
        filled.append(source.name)
        if len(filled) == 1:
            slow = enter(tmp_path, 2)
            filled.clear()
            filled.append(source.name)
            remove_earlier(slow)
        fill(source, draft, store)

    monkeypatch.setattr(epochs, "_fill", filling)
    own = enter(tmp_path, 3)
    assert filled == [f"{1:020d}", f"{2:020d}"] and turns(own) == [0, 1]
    assert not list((tmp_path / EPOCHS).glob("*.new-*")), "drafts are removed"


async def test_a_source_that_vanishes_behind_its_copy_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commits(enter(tmp_path, 1), 0, 2)
    fill, calls = epochs._fill, 0

    def filling(source: Path, draft: Path, store: str | None) -> None:
        nonlocal calls
        calls += 1
        fill(source, draft, store)
        if calls == 1:  # removed and made again: the copy may be one of a half of it
            shutil.copytree(source, source.with_name("copy"))
            shutil.rmtree(source)
            source.with_name("copy").rename(source)

    monkeypatch.setattr(epochs, "_fill", filling)
    assert turns(enter(tmp_path, 2)) == [0, 1] and calls == 2


class WithoutLeases(SegmentsType):
    takes_leases = False


def test_a_store_that_takes_no_leases_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> JournalType:
        return WithoutLeases()

    monkeypatch.setattr(journal_registry.STORES, "load", load)
    with pytest.raises(InvalidRequest, match="takes no leases"):
        enter(tmp_path, 1)
    assert epochs_in(tmp_path) == []


async def test_commands_read_the_newest_owners_directory(tmp_path: Path) -> None:
    await commits(enter(tmp_path / "one", 1), 0, 2)
    own = enter(tmp_path / "one", 2)
    assert data_dirs.one(tmp_path / "one") == own
    assert data_dirs.for_reading(tmp_path / "one") == data_dirs.for_reading(tmp_path) == [own]


def test_a_runtime_has_the_directory_of_its_lease_and_no_other(tmp_path: Path) -> None:
    LeaseWriter(tmp_path / "lease").grant(4, now_ns() + 3_600_000_000_000)
    with pytest.raises(InvalidRequest, match="errata serve"):
        Runtime(Settings(data_dir=tmp_path / "data", lease=tmp_path / "lease"))


async def test_a_session_on_layers_of_another_box_is_lost_at_the_take_over(tmp_path: Path) -> None:
    lease = tmp_path / "lease"
    writer = LeaseWriter(lease)
    writer.grant(1, now_ns() + 3_600_000_000_000)
    first = enter(tmp_path / "data", 1)
    journal = IndexedJournal(first / "journal")
    for sid, recovery, refs in (
        ("on-layers", "snapshot", (LAYER,)),
        ("in-journal", "snapshot", ()),
        ("again", "reexecute", ()),
    ):
        row = session(sid, recovery=recovery, given_out=True)
        await journal.commit(row, episode(f"e-{sid}", sid), delivery(f"e-{sid}", 0, sid=sid, refs=refs))
    journal.close()
    writer.grant(2, now_ns() + 3_600_000_000_000)
    runtime = Runtime(Settings(data_dir=enter(tmp_path / "data", 2), lease=lease, disk_floor_bytes=0))
    try:
        await runtime.start()
        found = {sid: runtime.store.journal.session(sid) for sid in ("on-layers", "in-journal", "again")}
        assert {sid: row.status for sid, row in found.items() if row is not None} == {
            "on-layers": "lost",
            "in-journal": "open",
            "again": "open",
        }
        lost = found["on-layers"]
        assert lost is not None and lost.lost == "its sandbox was on the box that served it before"
    finally:
        await runtime.close()


def finds(effects: Sequence[object]) -> bool:
    return any(isinstance(effect, FindSession) for effect in effects)


@pytest.mark.parametrize("message", ["open", "resume"])
def test_no_session_is_attached_while_another_server_may_have_it(message: str) -> None:
    def check_ours() -> None:
        raise JournalUnavailable("the lease has run out", retry_after=1.0)

    sid, key = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "k" * 22
    data: Any = {"key": key} if message == "open" else [{"sid": sid, "key": key}]
    frame = {"type": message, "data": data} | ({"sid": sid} if message == "open" else {})
    server = ServerProtocol(ServerConfig(check_ours=check_ours))
    connection = server.connect()
    assert not finds(server.receive(connection, json.dumps(frame), 0.0))
    answer = json.loads(connection.data_to_send()[0])
    assert (answer["type"], answer["sid"], answer["data"]["code"]) == ("error", sid, "JOURNAL_UNAVAILABLE")
    plain = ServerProtocol()
    assert finds(plain.receive(plain.connect(), json.dumps(frame), 0.0)), "without a lease it is looked up"


async def test_episodes_are_read_under_a_valid_lease_only(tmp_path: Path) -> None:
    """What an old owner says of a session may be less than its client knows from the new one."""
    lease = tmp_path / "lease"
    writer = LeaseWriter(lease)
    writer.grant(1, now_ns() + 3_600_000_000_000)
    settings = Settings(lease=lease, disk_floor_bytes=0)
    with LocalServer("tests.server.environments:CountEnvironment", enter(tmp_path / "data", 1), settings) as server:
        async with ErrataClient[Any, Any, Any](server.url, mux=True, durable=True) as client:
            await client.reset()
            url = f"{server.url}/episodes/{client.eid}"
            assert (await asyncio.to_thread(httpx.get, url)).status_code == 200
            writer.grant(1, now_ns())
            refused = await asyncio.to_thread(httpx.get, url)
            assert refused.status_code == 503 and "JOURNAL_UNAVAILABLE" in refused.text
            writer.grant(1, now_ns() + 3_600_000_000_000)
            assert (await asyncio.to_thread(httpx.get, url)).status_code == 200


def test_the_watch_tells_of_a_later_owner_by_the_lease_and_by_the_directory(tmp_path: Path) -> None:
    writer = LeaseWriter(tmp_path / "lease")
    writer.grant(1, now_ns() + 3_600_000_000_000)
    own = enter(tmp_path / "data", 1)
    watch = LeaseWatch(Lease(tmp_path / "lease"), own, lambda why: None)
    try:
        assert watch.why_lost() is None
        enter(tmp_path / "data", 2)
        assert watch.why_lost() == "epoch 2 has taken its data directory over"
        writer.grant(2, now_ns() + 3_600_000_000_000)
        assert watch.why_lost() == "its keeper has a later lease than that of epoch 1"
    finally:
        watch.close()
