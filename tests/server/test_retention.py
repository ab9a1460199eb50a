"""What goes when it is old or too much, and what never goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from errata_client import ErrataClient
from errata_protocol.errors import InvalidRequest
from errata_server.app import create_fastapi_app
from errata_server.cli import commands
from errata_server.episodes.retention import DAY_S, apply, plan
from errata_server.episodes.rollouts import all_held
from errata_server.journal import IndexedJournal, Journal, MemoryJournal
from errata_server.runtime.runtime import Runtime
from errata_server.runtime.shard_dirs import shards
from errata_server.settings import Settings

from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation
from .journal_rows import delivery, episode, reward, session
from .local_server import LocalServer
from .rubric_environments import Board, Move, SavedGameEnvironment

COUNT = "tests.server.environments:CountEnvironment"


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    made = MemoryJournal() if request.param == "memory" else IndexedJournal(tmp_path / "journal")
    yield made
    made.close()


async def add(journal: Journal, eid: str, day: float, *, sid: str = "", size: int = 100, **over: Any) -> None:
    """Commit an episode of one delivery of ``size`` bytes made on a day, its session closed unless it is named."""
    if not sid:
        sid = f"s-{eid}"
        await journal.commit(session(sid, status="closed"))
    made = {"created": day * DAY_S, "payload": b"x" * size, "request": b"", "state": None}
    await journal.commit(episode(eid, sid, created=day * DAY_S, **over), delivery(eid, 0, sid=sid, **made))


async def gone(journal: Journal, **bounds: Any) -> list[str]:
    chosen = await plan(Runtime(Settings(), journal=journal).store, now=100 * DAY_S, **bounds)
    return [held.row.eid for held in chosen.delete]


async def test_what_is_older_goes_and_an_open_sessions_current_episode_does_not(journal: Journal) -> None:
    await journal.commit(session("open"))
    await add(journal, "old", 1)
    await add(journal, "earlier", 2, sid="open")
    await add(journal, "current", 3, sid="open")
    await add(journal, "other owner's", 4, principal="p" * 12)
    await add(journal, "new", 95)
    assert await gone(journal, keep_days=10) == ["old", "earlier", "other owner's"]
    assert await gone(journal, keep_days=99) == [] == await gone(journal)
    assert await gone(journal, keep_days=0) == ["old", "earlier", "other owner's", "new"]


async def test_the_last_request_says_how_old_an_episode_is(journal: Journal) -> None:
    await add(journal, "long", 1)
    await journal.commit(delivery("long", 1, sid="s-long", created=99 * DAY_S))
    assert await gone(journal, keep_days=10) == []


async def test_an_ancestor_of_a_kept_fork_stays_and_goes_with_the_last_of_them(journal: Journal) -> None:
    await add(journal, "root", 1)
    await add(journal, "middle", 2, origin_eid="root", origin_t=0)
    await add(journal, "leaf", 95, origin_eid="middle", origin_t=0)
    await add(journal, "alone", 3)
    assert await gone(journal, keep_days=10) == ["alone"]
    chosen = await plan(Runtime(Settings(), journal=journal).store, keep_days=10, now=100 * DAY_S)
    assert (chosen.kept, chosen.held_back) == (3, 2)
    assert await gone(journal, keep_days=0) == ["leaf", "middle", "root", "alone"]


async def test_the_oldest_go_until_the_rest_fits(journal: Journal) -> None:
    for number in range(10):
        await add(journal, f"e{number}", number, size=1000)
    assert await gone(journal, max_bytes=10_000) == []
    assert await gone(journal, max_bytes=9_999) == ["e0"]
    assert await gone(journal, max_bytes=2_500) == [f"e{n}" for n in range(8)]
    assert await gone(journal, max_bytes=0) == [f"e{n}" for n in range(10)]
    assert await gone(journal, max_bytes=9_500, keep_days=97.5) == ["e0", "e1", "e2"]


async def test_a_parent_goes_before_younger_ones_as_soon_as_its_fork_has_gone(journal: Journal) -> None:
    await add(journal, "parent", 1, size=1000)
    await add(journal, "fork", 2, size=1000, origin_eid="parent", origin_t=0)
    await add(journal, "young", 3, size=1000)
    assert await gone(journal, max_bytes=1_500) == ["fork", "parent"]
    assert await gone(journal, max_bytes=2_500) == ["fork"], "one was enough"


async def test_applying_deletes_rows_and_rewards_of_every_owner(journal: Journal) -> None:
    await add(journal, "a", 1)
    await add(journal, "b", 2, principal="p" * 12)
    await add(journal, "c", 99)
    await journal.commit(reward("a", 0, sid="s-a"))
    runtime = Runtime(Settings(), journal=journal)
    chosen = await plan(runtime.store, keep_days=10, now=100 * DAY_S)
    assert await apply(runtime.store, runtime.collect, chosen.delete) == 2
    assert await apply(runtime.store, runtime.collect, chosen.delete) == 0
    assert [held.row.eid async for held in all_held(runtime.store)] == ["c"]
    assert journal.rewards("a") == []


async def test_what_was_forked_since_it_was_chosen_stays_with_all_that_it_comes_from(journal: Journal) -> None:
    await add(journal, "root", 1)
    await add(journal, "leaf", 2, origin_eid="root", origin_t=0)
    await add(journal, "alone", 3)
    runtime = Runtime(Settings(), journal=journal)
    chosen = await plan(runtime.store, keep_days=10, now=100 * DAY_S)
    assert [held.row.eid for held in chosen.delete] == ["leaf", "root", "alone"]
    await add(journal, "fork", 99, origin_eid="leaf", origin_t=0)
    assert await apply(runtime.store, runtime.collect, chosen.delete) == 1
    assert [held.row.eid async for held in all_held(runtime.store)] == ["root", "leaf", "fork"]


async def test_held_says_what_an_episode_takes_with_its_errors(journal: Journal) -> None:
    await journal.commit(session(recovery="reexecute"), episode("e"))
    assert journal.held(after=0, limit=9)[0].deliveries == 0
    sizes = {"payload": b"12345", "request": b"123", "state": b"1"}
    await journal.commit(
        delivery("e", 0, **sizes),
        delivery("e", None, **{**sizes, "state": None}, status="EXECUTION_ERROR", created=9.0),
        delivery("e", 1, **sizes, done=True),
    )
    (held,) = journal.held(after=0, limit=9)
    assert (held.deliveries, held.payload_bytes, held.request_bytes, held.state_bytes) == (2, 15, 9, 2)
    assert (held.last, held.done, held.size_bytes) == (9.0, True, 26)
    await journal.commit(episode("f"))
    assert [h.row.eid for h in journal.held(after=0, limit=1)] == ["e"]
    assert [h.row.eid for h in journal.held(after=held.n, limit=9)] == ["f"]


def test_a_server_prunes_by_itself_at_most_once_an_hour() -> None:
    runtime = simulated(Settings(retention_days=0))
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=4, runtime=runtime)
    now = [runtime.clock.time()]
    runtime.clock.time = lambda: now[0]  # type: ignore[method-assign]
    with TestClient(app) as client:
        with connect(client) as socket:
            socket.ask("reset", {})
        now[0] += 3599 - (now[0] - runtime.retention_clock._last)
        with connect(client) as socket:
            socket.ask("reset", {})
        assert len(client.get("/episodes").json()["episodes"]) == 2
        now[0] += 2
        with connect(client) as socket:
            last = socket.ask("reset", {})["eid"]
            assert [e["eid"] for e in client.get("/episodes").json()["episodes"]] == [last]


def run(*arguments: str) -> Any:
    answer = CliRunner().invoke(commands.cli, ["journal", "retention", *arguments, "--json"])
    if answer.exception is not None:
        raise answer.exception
    return json.loads(answer.stdout)


def test_the_command_says_what_would_go_and_deletes_with_and_without_a_server(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path))
    with LocalServer(COUNT, tmp_path) as server:
        eids = []
        for _ in range(3):
            with ErrataClient(server.url).sync() as client:
                client.reset()
                eids.append(str(client.eid))
        with ErrataClient(server.url).sync() as client:
            client.reset()
            current = str(client.eid)
            dry = run("--keep-days", "0", "--dry-run", *where)
            assert (dry["episodes"], dry["kept"], dry["held_back"]) == (eids, 1, 1) and "deleted" not in dry
            size = dry["bytes"] + dry["kept_bytes"]
            assert run("--max-bytes", str(size - 1), *where)["deleted"] == 1
            assert run("--keep-days", "0", *where)["deleted"] == 2
            assert client.step({"n": 1}).observation["n"] == 1, "the session that is open goes on"
        listed = CliRunner().invoke(commands.cli, ["episodes", "--json", *where]).stdout
        assert [e["eid"] for e in json.loads(listed)["episodes"]] == [current]
    assert run("--max-bytes", "0k", *where)["deleted"] == 1
    with pytest.raises(InvalidRequest, match="what to keep"):
        run(*where)
    assert CliRunner().invoke(commands.cli, ["journal", "retention", "--max-bytes", "lots", *where]).exit_code == 2


@pytest.mark.parametrize(
    "words", [("retention", "--keep-days", "0"), ("salvage", "--dry-run")], ids=lambda words: words[0]
)
def test_a_command_that_works_on_one_directory_names_those_of_further_workers(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    directories = shards(tmp_path, 3)
    for directory in directories:
        app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, data_dir=directory)
        with TestClient(app) as client, connect(client) as socket:
            socket.ask("reset", {})

    def said(directory: Path) -> str:
        answer = CliRunner().invoke(commands.cli, ["journal", *words, "--data-dir", str(directory), "--json"])
        assert answer.exit_code == 0 and json.loads(answer.stdout), answer.output
        return str(answer.stderr)

    further = f"give --data-dir with each of {directories[1]}, {directories[2]} for the other workers"
    assert said(directories[0]) == f"only {directories[0]}: {further}\n"
    assert said(directories[2]) == ""


def test_bulk_deletion_names_what_it_did_not_find(tmp_path: Path) -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, runtime=simulated())
    with TestClient(app) as client:
        with connect(client) as socket:
            eid = socket.ask("reset", {})["eid"]
        body = {"eids": [eid, "ep_none", eid]}
        assert client.post("/episodes/delete", json=body).json() == {
            "deleted": {eid: 1},
            "unknown": ["ep_none"],
            "in_use": [],
        }
        assert client.post("/episodes/delete", json={"eids": 5}).json()["code"] == "VALIDATION_ERROR"
        assert client.get("/episodes").json()["episodes"] == []


def test_bulk_deletion_keeps_what_is_in_use_where_that_is_asked_for() -> None:
    app = create_fastapi_app(SavedGameEnvironment, Move, Board, max_concurrent_envs=4, runtime=simulated())
    with TestClient(app) as client:
        with connect(client) as socket:
            parent = socket.ask("reset", {})["eid"]
        fork = client.post(f"/episodes/{parent}/fork", json={"t": 0, "request_id": "r"}).json()
        asked = {"eids": [parent, fork["eid"]], "unused_only": True}
        kept = {"deleted": {}, "unknown": [], "in_use": [parent, fork["eid"]]}
        assert client.post("/episodes/delete", json=asked).json() == kept
        with connect(client, f"/ws?session_id={fork['session_id']}") as socket:
            assert "data" in socket.ask("step", {"do": "go"}), "its session goes on"
        gone = client.post("/episodes/delete", json={"eids": [parent, fork["eid"]]}).json()
        assert list(gone["deleted"]) == [parent, fork["eid"]] and gone["in_use"] == []
