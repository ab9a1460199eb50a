"""Journal stores are found by their entry points: our own, and one of another distribution without a line of ours."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient, Ticket
from errata_os.plugins import PluginGroup
from errata_protocol.errors import InvalidRequest, JournalUnavailable, NotSupported
from errata_protocol.payload import digest
from errata_server.journal import IndexedJournal, JournalType, registry
from errata_server.process import ServerProcess
from errata_server.runtime.runtime import Runtime
from errata_server.serve.server import Bind, checked_settings
from errata_server.settings import Settings

from .command_line import Ended, assert_refused, run
from .json_lines_journal import FILE, JsonLinesJournal
from .local_server import LocalServer

COUNT = "tests.server.environments:CountEnvironment"
JSON_LINES = Settings(journal_store="json_lines", disk_floor_bytes=0)


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install another distribution, which brings the stores ``json_lines``, ``broken`` and ``odd``."""
    site = tmp_path_factory.mktemp("site")
    info = site / "json_lines_journal-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: json-lines-journal\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[errata.journal_stores]\njson_lines = tests.server.json_lines_journal:JsonLinesType\n"
        "broken = no_such_module:It\nodd = tests.server.json_lines_journal:JsonLinesJournal\n"
    )
    monkeypatch.syspath_prepend(str(site))
    for name in ("ERRATA_DATA_DIR", "ERRATA_JOURNAL_STORE", "ERRATA_TOKEN", "ERRATA_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(registry, "STORES", PluginGroup(registry.GROUP, JournalType, "journal store"))
    return site


async def played(url: str) -> tuple[str, Ticket, list[bytes]]:
    """Play two steps; return the episode's id, the session's ticket and the payloads that the server answered with."""
    async with ErrataClient[Any, Any, Any](f"{url}/CountEnvironment", mux=True, durable=True) as client:
        await client.reset(seed=7)
        await client.step({"n": 3})
        await client.step({"n": 4, "do": "mark"})
        eid = str(client.eid)
        payloads = [httpx.get(f"{url}/episodes/{eid}/states/{t}").content for t in range(3)]
        return eid, client.ticket(), payloads


async def goes_on(url: str, eid: str, ticket: Ticket, payloads: list[bytes]) -> None:
    """Fail unless an episode has the same payloads, and its session goes on and can be forked."""
    assert [httpx.get(f"{url}/episodes/{eid}/states/{t}").content for t in range(3)] == payloads
    again = ErrataClient[Any, Any, Any].resume(f"{url}/CountEnvironment", ticket)
    assert (await again.step({"n": 1})).observation["n"] == 8
    child = await again.fork(1)
    assert (await child.step({"n": 10})).observation["n"] == 13
    await child.close()
    await again.close()


async def errata(*words: str, data_dir: Path) -> Ended:
    return await asyncio.to_thread(run, *words, "--data-dir", str(data_dir))  # a command has event loops of its own


def test_our_own_store_is_an_entry_point() -> None:
    assert registry.DEFAULT in registry.STORES.installed


@pytest.mark.usefixtures("elsewhere")
async def test_another_distributions_store_keeps_what_a_server_answered(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path, JSON_LINES) as server:
        assert isinstance(server.served.runtime.store.journal, JsonLinesJournal)
        eid, ticket, payloads = await played(server.url)
        read = await errata("replay", eid, "1", data_dir=tmp_path)  # beside the server
        assert (read.status, read.stdout.encode()) == (0, payloads[1])
    with LocalServer(COUNT, tmp_path) as server:  # without the store's name
        await goes_on(server.url, eid, ticket, payloads)
    assert {file.name for file in (tmp_path / registry.DIRECTORY).iterdir()} == {FILE}


@pytest.mark.usefixtures("elsewhere")
async def test_commands_read_and_change_it_without_being_told_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalServer(COUNT, tmp_path, JSON_LINES) as server:
        eid, _, payloads = await played(server.url)
    monkeypatch.setenv("ERRATA_JOURNAL_STORE", registry.DEFAULT)  # of the servers of this user; commands look for it
    read = await errata("replay", eid, "2", data_dir=tmp_path)
    assert digest(read.stdout.encode()) == digest(payloads[2]), read.stderr
    listed = json.loads((await errata("episodes", "--json", data_dir=tmp_path)).stdout)
    assert [episode["eid"] for episode in listed["episodes"]] == [eid]
    assert json.loads((await errata("journal", "verify", "--json", data_dir=tmp_path)).stdout)["ok"]
    size = json.loads((await errata("journal", "size", "--json", data_dir=tmp_path)).stdout)
    assert size["total"]["deliveries"] == 3 and size["files"]["journal"] > 0
    assert (await errata("episodes", "delete", eid, data_dir=tmp_path)).status == 0
    assert json.loads((await errata("episodes", "--json", data_dir=tmp_path)).stdout)["episodes"] == []


@pytest.mark.usefixtures("elsewhere")
async def test_a_store_without_a_repair_says_so(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path, JSON_LINES) as server:
        await played(server.url)
    ended = await errata("journal", "salvage", "--dry-run", data_dir=tmp_path)
    assert_refused(ended)
    assert "its store (tests.server.json_lines_journal) has no repair; restore it from a copy" in ended.stderr
    with pytest.raises(NotSupported, match="has no repair"):
        Runtime(JSON_LINES.model_copy(update={"data_dir": tmp_path, "journal_salvage": True}))


@pytest.mark.usefixtures("elsewhere")
async def test_a_data_directory_keeps_the_store_that_it_has(tmp_path: Path) -> None:
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    with LocalServer(COUNT, mine, JSON_LINES) as server:
        await played(server.url)
    with LocalServer(COUNT, ours) as server:
        await played(server.url)
    for directory, has, wants in ((mine, "json_lines", "segments"), (ours, "segments", "json_lines")):
        with pytest.raises(InvalidRequest, match=f"one of the store '{has}', not of '{wants}': give --journal-store"):
            Runtime(Settings(data_dir=directory, journal_store=wants))
    assert not (ours / registry.NAME_FILE).exists()  # as every data directory before there were stores
    runtime = Runtime(Settings(data_dir=ours, journal_store="segments"))
    assert isinstance(runtime.store.journal, IndexedJournal)
    await runtime.close()


@pytest.mark.usefixtures("elsewhere")
async def test_a_directory_without_a_journal_may_get_another_store(tmp_path: Path) -> None:
    registry.write_name(tmp_path, "json_lines")  # its server ended before it made a journal
    runtime = Runtime(Settings(data_dir=tmp_path, journal_store="segments"))
    assert isinstance(runtime.store.journal, IndexedJournal)
    await runtime.close()
    assert registry.name_in(tmp_path) == "segments"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nope", "no journal store 'nope' is installed; there are: broken, json_lines, odd, segments"),
        ("broken", "journal store 'broken' (no_such_module:It) cannot be imported: No module named 'no_such_module'"),
        (
            "odd",
            "journal store 'odd' (tests.server.json_lines_journal:JsonLinesJournal) is not an "
            "errata_server.journal.journal_type.JournalType",
        ),
    ],
)
def test_a_store_that_cannot_be_used_is_named_with_its_reason(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Runtime(Settings(data_dir=tmp_path / "data", journal_store=name))
    assert refused.value.message == says
    assert not (tmp_path / "data" / registry.NAME_FILE).exists()


async def test_errata_serve_takes_the_name_of_a_store(elsewhere: Path, tmp_path: Path) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(elsewhere), os.environ.get("PYTHONPATH", "")])}
    with ServerProcess(COUNT, tmp_path, "--journal-store", "json_lines", env=env) as server:
        eid, ticket, payloads = await played(server.url)
        server.kill()
    with LocalServer(COUNT, tmp_path) as again:
        await goes_on(again.url, eid, ticket, payloads)


def test_a_store_that_is_not_installed_is_refused_by_the_check_of_the_settings() -> None:
    with pytest.raises(InvalidRequest, match="no journal store 'nope' is installed; there are: "):
        checked_settings(Settings(journal_store="nope"), Bind())


async def test_the_journal_of_a_store_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "one" / registry.DIRECTORY).mkdir(parents=True)
    registry.write_name(tmp_path / "one", "uninstalled")
    for words in (["episodes"], ["journal", "salvage"]):
        ended = await errata(*words, data_dir=tmp_path / "one")
        assert_refused(ended)
        assert "no journal store 'uninstalled' is installed" in ended.stderr
    with pytest.raises(InvalidRequest, match="no journal store 'uninstalled' is installed"):
        Runtime(Settings(data_dir=tmp_path / "one"))


def test_a_name_that_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    (tmp_path / registry.NAME_FILE).mkdir()
    with pytest.raises(JournalUnavailable, match="cannot read the name of the journal's store"):
        Runtime(Settings(data_dir=tmp_path))
    with pytest.raises(JournalUnavailable, match="cannot write the name of the journal's store"):
        registry.write_name(tmp_path / "missing", "json_lines")
