"""A journal that cannot be read or written now is never called damaged, and what became of it is logged."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
from pathlib import Path

import apsw
import pytest

from errata_client import ErrataClient
from errata_os import descriptors
from errata_protocol.errors import JournalUnavailable
from errata_server.journal import DirectoryDisk, IndexedJournal
from errata_server.journal.readers import Readers
from errata_server.process import ServerProcess
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

from ..descriptors import free_descriptors
from .conftest import until
from .journal_rows import delivery, episode, session

COUNT = "tests.server.environments:CountEnvironment"


async def filled(tmp_path: Path, deliveries: int) -> IndexedJournal:
    """Return a journal whose rows lie in many segments."""
    journal = IndexedJournal(tmp_path, segment_bytes=64, batch_rows=4)
    await journal.commit(session(), episode("e"))
    for t in range(deliveries):
        await journal.commit(delivery("e", t))
    journal._bring_up()
    return journal


async def test_a_read_without_a_free_descriptor_is_no_damage_and_works_afterwards(tmp_path: Path) -> None:
    journal = await filled(tmp_path, 100)  # far more segments than stay open
    met = []
    with free_descriptors(0):
        for t in range(100):
            try:
                row = await asyncio.to_thread(journal.delivery, "e", t)  # a thread that has no connection to the index
                assert row is not None and row.t == t
            except JournalUnavailable as error:
                met.append(error)
    assert met
    for error in met:
        assert "damaged" not in error.message and "restore" not in error.message
        assert "ulimit -n" in error.message
        assert error.retryable and error.details["retry_after"] > 0
    assert [row.t for t in range(100) if (row := journal.delivery("e", t)) is not None] == list(range(100))
    journal.close()


@pytest.mark.parametrize("short", [1, 2])
def test_a_read_is_tried_again_where_descriptors_are_free_by_then(short: int) -> None:
    opened = []

    def connect() -> apsw.Connection:
        opened.append(None)
        if len(opened) <= short:
            raise apsw.CantOpenError("unable to open database file")  # which SQLite says for want of descriptors, too
        return apsw.Connection(":memory:")

    readers = Readers(connect, "index.db")
    if short == 1:
        assert readers.rows("SELECT 1") == [(1,)]
    else:
        with pytest.raises(JournalUnavailable, match=r"^cannot read the journal index.db: unable to open"):
            readers.rows("SELECT 1")
    assert len(opened) == 2
    readers.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM])
async def test_what_the_machine_cannot_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    journal = await filled(tmp_path, 3)

    def failing(self: DirectoryDisk, name: str, offset: int, size_bytes: int) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(DirectoryDisk, "read_at", failing)
    with pytest.raises(JournalUnavailable, match=f"cannot be read now: {os.strerror(number)}") as raised:
        journal.delivery("e", 1)
    assert "damaged" not in raised.value.message
    monkeypatch.undo()
    assert journal.delivery("e", 1) is not None
    journal.close()


async def test_commits_wait_for_a_descriptor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = await filled(tmp_path, 1)
    with free_descriptors(0):
        waiting = [asyncio.ensure_future(journal.commit(delivery("e", 1)))]  # a new segment for each
        await until(lambda: journal.failing is not None)
        assert "Too many open files" in journal.failing and not waiting[0].done()
    await asyncio.wait_for(waiting[0], 60)
    assert journal.failing is None
    journal.close()
    again = IndexedJournal(tmp_path)
    assert [turn.t for turn in again.turns("e")] == [0, 1]
    again.close()


def test_a_journal_that_cannot_be_opened_for_want_of_descriptors_says_so(tmp_path: Path) -> None:
    asyncio.run(filled(tmp_path, 1)).close()
    for left in range(5):
        with free_descriptors(left), pytest.raises(JournalUnavailable, match=r"ulimit -n") as raised:
            IndexedJournal(tmp_path, background=False)
        assert "damaged" not in raised.value.message
    IndexedJournal(tmp_path).close()


def test_what_is_free_is_tried() -> None:
    assert descriptors.trouble() is None
    with free_descriptors(0):
        assert "Too many open files: the limit of open files (ulimit -n) is" in str(descriptors.trouble())
    with free_descriptors(1):
        assert descriptors.trouble() is None


async def test_ready_says_that_descriptors_ran_out() -> None:
    runtime = Runtime(Settings())
    assert runtime.readiness.reasons() == []
    with free_descriptors(0):
        [reason] = runtime.readiness.reasons()
    assert "ulimit -n" in reason
    assert runtime.readiness.reasons() == []
    await runtime.close()


# -- what is logged ----------------------------------------------------------------------------------------------------


async def test_a_torn_end_that_is_dropped_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (await filled(tmp_path, 3)).close()
    last = max(path for path in tmp_path.iterdir() if path.suffix == ".log")
    size = last.stat().st_size
    os.truncate(last, size - 37)
    (tmp_path / "index.db").unlink()
    with caplog.at_level(logging.INFO):
        IndexedJournal(tmp_path).close()
        [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert "are dropped" in line and f"segment {int(last.stem)}" in line
        caplog.clear()
        IndexedJournal(tmp_path).close()
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_data_directory_that_vanishes_is_logged_once_each_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "data"
    runtime = Runtime(Settings(data_dir=place))
    assert runtime.store.trouble() is None
    away = tmp_path / "away"
    place.rename(away)
    await until(lambda: runtime.store.trouble() is not None)  # free space is believed in for a moment
    for _ in range(5):
        assert runtime.readiness.reasons() == [
            "the data directory is gone: it was removed or unmounted while the server ran"
        ]
    away.rename(place)
    await until(lambda: runtime.store.trouble() is None)
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "errata.journal"]
    assert [level for level, _ in lines] == ["ERROR", "WARNING"]
    assert "is gone" in lines[0][1] and str(place) in lines[0][1]
    await runtime.close()


@pytest.mark.parametrize("part", ["", "journal"], ids=["the data directory", "the journal in it"])
async def test_a_directory_that_vanishes_is_logged_at_once_without_a_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    place = tmp_path / "data"
    runtime = Runtime(Settings(data_dir=place))
    (place / part).rename(tmp_path / "away")
    (place / part).mkdir()  # another one in its place is not the one that was there
    await until(lambda: "is gone" in caplog.text)
    [reason] = runtime.readiness.reasons()
    assert "is gone: it was removed or unmounted while the server ran" in reason
    await runtime.close()


def test_a_server_whose_data_directory_is_removed_logs_it_before_it_ends(tmp_path: Path) -> None:
    env = {"ERRATA_JOURNAL_WAIT_S": "1"}
    with (
        ServerProcess(COUNT, tmp_path / "data", env=env) as server,
        ErrataClient(server.url, message_timeout_s=9.0).sync() as client,
    ):
        client.reset()
        shutil.rmtree(tmp_path / "data")
        with pytest.raises(RuntimeError, match="JOURNAL_UNAVAILABLE"):
            for _ in range(100):  # free space is believed in for a moment
                client.step({"n": 1})
        assert sum("the data directory is gone" in line for line in list(server.log)) == 1
        server.process.send_signal(signal.SIGKILL)
