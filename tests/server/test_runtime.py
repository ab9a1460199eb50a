"""What the applications of one data directory share, and when it is opened and closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from errata_protocol.errors import InvalidRequest, JournalUnavailable
from errata_server.app import create_fastapi_app
from errata_server.journal import IndexedJournal, MemoryJournal, ReadOnlyJournal
from errata_server.runtime.registry import RUNTIMES
from errata_server.runtime.runtime import Runtime
from errata_server.runtime.store import READER_THREADS
from errata_server.settings import Settings
from errata_server.simulation import DiskFaults, SimulatedMachine

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation
from .journal_rows import delivery, episode, session


async def test_a_directory_in_use_with_other_settings_is_refused_and_they_are_named(tmp_path: Path) -> None:
    first = RUNTIMES.shared(Settings(data_dir=tmp_path))
    assert RUNTIMES.shared(Settings(data_dir=tmp_path)) is first
    assert RUNTIMES.shared(Settings(data_dir=tmp_path, token=SecretStr("t"))) is first, "a door's own setting"
    with pytest.raises(InvalidRequest, match=r"detach_ttl_s=600.0 and 5.0, fsync=True and False"):
        RUNTIMES.shared(Settings(data_dir=tmp_path, fsync=False, detach_ttl_s=5.0))
    await first.close()
    again = RUNTIMES.shared(Settings(data_dir=tmp_path, fsync=False))
    assert again is not first
    await again.close()


def test_a_durable_app_can_be_started_again_and_finds_what_it_kept(tmp_path: Path) -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, data_dir=tmp_path)
    eids = []
    for _ in range(3):
        with TestClient(app) as client, connect(client) as socket:
            eids.append(socket.ask("reset", {})["eid"])
            assert socket.ask("step", {"n": 2})["t"] == 1
            for eid in eids:
                assert client.get(f"/episodes/{eid}/states/0").status_code == 200
    asyncio.run(Runtime(Settings(data_dir=tmp_path)).close())  # nothing holds the directory after the last stop


def test_an_app_whose_directory_another_one_took_over_is_refused_at_its_next_start(tmp_path: Path) -> None:
    first = create_fastapi_app(CountEnvironment, CountAction, CountObservation, data_dir=tmp_path)
    with TestClient(first):
        pass
    second = create_fastapi_app(CountEnvironment, CountAction, CountObservation, data_dir=tmp_path)
    with TestClient(second), pytest.raises(JournalUnavailable, match="took over"), TestClient(first):
        pass
    with TestClient(first), connect(TestClient(first)) as socket:
        assert socket.ask("reset", {})["t"] == 0


async def test_a_request_that_comes_after_the_end_opens_nothing(tmp_path: Path) -> None:
    runtime = Runtime(Settings(data_dir=tmp_path))
    await runtime.start()
    await runtime.close()
    with pytest.raises(JournalUnavailable, match="shutting down"):
        await runtime.start()
    await Runtime(Settings(data_dir=tmp_path)).close()


class _Compacting(MemoryJournal):
    """Its compactions take as long as the test wants."""

    blocking = True

    def __init__(self) -> None:
        super().__init__()
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.stopped: list[bool] = []

    def compact(self, *, stop: Callable[[], bool] = lambda: False) -> int:
        self.began.set()
        assert self.goes_on.wait(60)
        self.stopped.append(stop())
        return 0


async def test_compactions_hold_up_no_read_however_many_are_asked_for() -> None:
    journal = _Compacting()
    runtime = Runtime(Settings(), journal=journal)
    compactions = [asyncio.ensure_future(runtime.store.compact()) for _ in range(READER_THREADS)]
    assert await asyncio.to_thread(journal.began.wait, 10)  # the others were asked for before this returns
    await runtime.store.commit(session())
    async with asyncio.timeout(60):
        assert await runtime.store.session("s") == session()
    journal.goes_on.set()
    await asyncio.gather(*compactions)
    assert journal.stopped == [False] * READER_THREADS
    await runtime.close()


async def test_compactions_are_told_first_that_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = _Compacting()
    runtime = Runtime(Settings(), journal=journal)
    compactions = [asyncio.ensure_future(runtime.store.compact()) for _ in range(2)]
    assert await asyncio.to_thread(journal.began.wait, 10)

    async def close() -> None:
        journal.goes_on.set()

    monkeypatch.setattr(runtime.sandbox, "close", close)
    await runtime.close()
    await asyncio.gather(*compactions)
    assert journal.stopped == [True, True]
    with pytest.raises(JournalUnavailable, match="cannot be read now"):
        await runtime.store.session("s")


async def test_a_journal_opened_to_be_read_changes_nothing_and_sees_a_running_server(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    writing = IndexedJournal(path)
    await writing.commit(session(), episode("e1"), delivery("e1", 0))
    reading = ReadOnlyJournal(path)
    assert reading.delivery("e1", 0) == delivery("e1", 0)
    await writing.commit(delivery("e1", 1))
    assert [turn.t for turn in reading.turns("e1")] == [0, 1]
    with pytest.raises(JournalUnavailable, match="read only"):
        await reading.commit(delivery("e1", 2))
    with pytest.raises(JournalUnavailable, match="read only"):
        reading.delete_episode("e1")
    writing.delete_episode("e1")
    assert reading.delivery("e1", 1) is None and reading.episodes(limit=9, principal=None) == ([], None)
    await writing.commit(episode("e2"), delivery("e2", 0))
    writing.close()
    reading.close()
    before = {file: file.read_bytes() for file in path.iterdir()}
    with_no_server = ReadOnlyJournal(path)
    assert [turn.t for turn in with_no_server.turns("e2")] == [0]
    with_no_server.close()
    assert {file: file.read_bytes() for file in path.iterdir() if file in before} == before


def test_there_must_be_a_journal_to_read(tmp_path: Path) -> None:
    with pytest.raises(JournalUnavailable, match="cannot read the journal"):
        ReadOnlyJournal(tmp_path / "journal")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "journal").mkdir()
    with pytest.raises(JournalUnavailable, match="holds no journal"):
        ReadOnlyJournal(tmp_path / "journal")


def test_the_journal_of_an_earlier_version_is_refused_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "journal.db").touch()
    with pytest.raises(JournalUnavailable, match=r"earlier Errata.*--data-dir"):
        Runtime(Settings(data_dir=tmp_path))
    assert not (tmp_path / "journal").exists()


def test_a_request_waits_for_space_in_virtual_time_and_is_refused_when_it_stays_away() -> None:
    machine = SimulatedMachine(1, faults=DiskFaults(capacity_bytes=10_000))

    async def program(machine: SimulatedMachine) -> float:
        runtime = machine.runtime(Settings(journal_wait_s=30.0, disk_floor_bytes=2**40))
        await runtime.start()
        await runtime.store.wait_until_writable()
        machine.disk.append("filler", bytes(9_800))
        began = runtime.clock.monotonic()
        with pytest.raises(JournalUnavailable, match=r"0 KiB free.*free space"):
            await runtime.store.wait_until_writable()
        waited = runtime.clock.monotonic() - began
        machine.disk.remove("filler")
        await runtime.store.wait_until_writable()
        await runtime.close()
        return waited

    assert machine.boot(program) == pytest.approx(30.0, abs=0.2)
