"""Labels of episodes, from the client to the lists: over multiplexed and plain sockets, HTTP, forks and restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from fastmcp import FastMCP
from starlette.websockets import WebSocketDisconnect

from errata_client import EnvPool, Episodes, ErrataClient
from errata_protocol.bundle import EpisodeRecord, parse_line
from errata_protocol.episode_lists import EpisodeFilter
from errata_protocol.errors import InvalidRequest, NotSupported
from errata_protocol.labels import HEADER, MAX_HEADER, NO_LABELS, VERSION, Labels
from errata_server.app import create_fastapi_app
from errata_server.journal import IndexedJournal, ReadOnlyJournal
from errata_server.journal.base import EpisodeRow, SessionRow
from errata_server.serve.bundle_server import Archive
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation, ToolsEnvironment
from .journal_rows import rewrite_journal
from .local_server import LocalServer

COUNT = "tests.server.environments:CountEnvironment"
FIRST = Labels(run="first: é", step=3, group="prompt-7")


def labels_at(url: str, eid: str | None) -> Labels:
    return labels_in(httpx.get(f"{url}/episodes/{eid}").json())


def labels_in(summary: dict[str, Any]) -> Labels:
    return Labels(group=summary["group"], step=summary["step"], run=summary["run"])


async def test_each_episode_has_the_labels_that_the_client_had_at_its_reset(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, labels=Labels(run="r")) as client:
            await client.reset()
            assert labels_at(server.url, client.eid) == Labels(run="r")
            client.labels = FIRST
            before = client.eid
            await client.step({"n": 1})
            assert client.eid == before and labels_at(server.url, before) == Labels(run="r")
            await client.reset()
            labelled = client.eid
            assert labels_at(server.url, labelled) == FIRST
            child = await client.fork(0)
            assert labels_at(server.url, child.eid) == FIRST
            client.labels = Labels(step=4)
            await client.reset()
            # What it does not say is as the session was opened with.
            assert labels_at(server.url, client.eid) == Labels(run="r", step=4)
            with pytest.raises(TypeError, match="Labels"):
                client.labels = {"run": "r"}  # type: ignore[assignment]
        async with Episodes(server.url) as episodes:
            found = (await episodes.episodes(wanted=EpisodeFilter(group="prompt-7", step=3))).episodes
            assert {one.eid for one in found} == {labelled, child.eid} and all(one.run == FIRST.run for one in found)
            (bucket,) = (await episodes.aggregates(bucket_s=10_000_000, wanted=EpisodeFilter(run="r"))).buckets
            assert bucket.episodes == 2


async def test_labels_are_no_arguments_of_reset_and_no_part_of_a_repeated_request(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, labels=FIRST) as client:
            await client.reset(episode_id="mine")
            bundle = httpx.get(f"{server.url}/episodes/{client.eid}/bundle").text
    records = [json.loads(line) for line in bundle.splitlines()]
    (reset,) = (record for record in records if record["record"] == "delivery")
    assert "labels" not in reset["request"] and "prompt-7" not in reset["request"] + reset["payload"]
    (described,) = (record for record in records if record["record"] == "episode")
    assert labels_in(described) == FIRST


async def test_a_pool_labels_its_groups(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path) as server:
        async with EnvPool(server.url, 4, labels=Labels(run="r")) as pool:
            groups = [Labels(run="r", step=1, group=f"g{n // 2}") for n in range(4)]
            await pool.reset_batch(labels=groups)
            assert [labels_at(server.url, client.eid) for client in pool.clients] == groups
            await pool.reset_batch(labels=Labels(run="r", step=2), indices=[0, 3])
            await pool.reset_batch(indices=[1, 3])
            found = [labels_at(server.url, client.eid) for client in pool.clients]
            second = Labels(run="r", step=2)
            assert found == [second, groups[1], groups[2], second]
            with pytest.raises(InvalidRequest, match="3 labels for 4"):
                await pool.reset_batch(labels=groups[:3])
        with EnvPool(server.url, 1).sync() as blocking:
            blocking.reset_batch(labels=FIRST)
            assert labels_at(server.url, blocking.clients[0].eid) == FIRST == blocking.clients[0].labels


@pytest.mark.parametrize("durable", [False, True])
async def test_a_plain_socket_has_the_labels_that_it_was_opened_with(tmp_path: Path, durable: bool) -> None:
    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, mux=False, durable=durable, labels=FIRST) as client:
            await client.reset()
            await client.reset()
            assert labels_at(server.url, client.eid) == FIRST
            child = await client.fork(0)
            await child.reset()
            assert labels_at(server.url, child.eid) == FIRST
            client.labels = NO_LABELS
            with pytest.raises(InvalidRequest, match="opened with"):
                await client.reset()
            if durable:
                client.labels = FIRST
                await client.reattach()
                await client.reset()
                assert labels_at(server.url, client.eid) == FIRST
                await client.end_session()


@pytest.mark.parametrize("given", [NO_LABELS, Labels(run="look")], ids=["none", "others"])
@pytest.mark.parametrize("how", [{}, {"mux": False}, {"durable": True}], ids=["mux", "plain", "durable"])
async def test_a_fork_and_its_resets_have_the_labels_that_it_was_given_and_no_others(
    tmp_path: Path, how: dict[str, Any], given: Labels
) -> None:
    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, labels=FIRST, **how) as client:
            await client.reset()
            child = await client.fork(0, labels=given)
            assert labels_at(server.url, child.eid) == child.labels == given
            grandchild = await child.fork(0)
            assert labels_at(server.url, grandchild.eid) == given
            await child.reset()
            assert labels_at(server.url, child.eid) == given
            assert client.labels == FIRST
            with pytest.raises(TypeError, match="Labels"):
                await client.fork(0, labels={})  # type: ignore[arg-type]
        async with Episodes(server.url) as episodes:
            for wanted in (EpisodeFilter(group=FIRST.group), EpisodeFilter(run=FIRST.run), EpisodeFilter(step=3)):
                (bucket,) = (await episodes.aggregates(bucket_s=10_000_000, wanted=wanted)).buckets
                assert bucket.episodes == 1


def test_a_blocking_client_gives_a_fork_labels(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path) as server, ErrataClient(server.url, labels=FIRST).sync() as client:
        client.reset()
        with client.fork(0, labels=NO_LABELS) as child:
            assert labels_at(server.url, child.eid) == child.labels == NO_LABELS


async def test_a_session_of_a_fork_keeps_its_labels_over_a_restart(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, labels=FIRST, durable=True, mux=True) as client:
            await client.reset()
            ticket = (await client.fork(0, labels=NO_LABELS)).ticket()
    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient.resume(server.url, ticket) as child:
            assert labels_at(server.url, child.eid) == NO_LABELS
            await child.reset()
            assert labels_at(server.url, child.eid) == NO_LABELS
            await child.end_session()


async def test_a_server_that_ignores_the_labels_of_forks_is_asked_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("errata_protocol.labels.VERSION", 1)
    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, labels=FIRST) as client:
            await client.reset()
            with pytest.raises(NotSupported, match="leave labels out"):
                await client.fork(0, labels=NO_LABELS)
            child = await client.fork(0)
            assert labels_at(server.url, child.eid) == FIRST


class Adding(ToolsEnvironment):
    """Has one tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server: FastMCP[Any] = FastMCP("adding")

        @server.tool
        def add(a: int, b: int) -> int:
            return a + b

        super().__init__(server)


async def test_a_call_before_any_reset_begins_an_episode_with_the_labels_of_the_session(tmp_path: Path) -> None:
    with LocalServer("tests.server.test_labels:Adding", tmp_path) as server:
        async with ErrataClient(server.url, labels=FIRST) as client:
            await client.call_tool("add", {"a": 1, "b": 2})
            assert client.t == 1 and labels_at(server.url, client.eid) == FIRST


@pytest.mark.parametrize("reader", ["killed", "index made again", "bundle"])
async def test_labels_survive_a_restart_and_stand_in_bundles(tmp_path: Path, reader: str) -> None:
    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, labels=FIRST, durable=True, mux=True) as client:
            await client.reset()
            eid, ticket = client.eid, client.ticket()
            bundle = httpx.get(f"{server.url}/episodes/{eid}/bundle").content
    if reader == "bundle":
        assert isinstance(record := parse_line(bundle.splitlines(True)[1]), EpisodeRecord) and record.step == 3
        (tmp_path / "file").write_bytes(bundle)
        archive = Archive([tmp_path / "file"])
        page = await archive.page(limit=9, cursor=None, wanted=EpisodeFilter(run=FIRST.run, step=3), principal=None)
        assert [one.eid for one in page.episodes] == [eid]
        page = await archive.page(limit=9, cursor=None, wanted=EpisodeFilter(step=4), principal=None)
        assert page.episodes == []
        return
    if reader == "index made again":
        (tmp_path / "journal" / "index.db").unlink()
    with LocalServer(COUNT, tmp_path) as server:
        assert labels_at(server.url, eid) == FIRST
        async with ErrataClient.resume(server.url, ticket) as client:  # which says no labels: the session has its own
            await client.reset()
            assert client.eid != eid and labels_at(server.url, client.eid) == FIRST
            await client.end_session()


async def test_rows_of_before_have_no_labels(tmp_path: Path) -> None:
    """Segments of an earlier Errata have rows without these columns."""
    from errata_server.journal import columns

    with LocalServer(COUNT, tmp_path) as server:
        async with ErrataClient(server.url, labels=FIRST) as client:
            await client.reset()
            eid = client.eid
    assert eid is not None

    def shortened(record: Any) -> Any:
        if isinstance(record, EpisodeRow):
            return columns.episode(columns.of_episode(record)[:-3])
        return columns.session(columns.of_session(record)[:-3]) if isinstance(record, SessionRow) else record

    rewrite_journal(tmp_path / "journal", shortened)
    for opened in (ReadOnlyJournal, IndexedJournal):
        journal = opened(tmp_path / "journal")
        (one,) = journal.episodes(limit=9, principal=None)[0]
        assert (one.eid, one.group, one.step, one.run) == (eid, None, None, None)
        journal.close()


def client_of_app() -> TestClient:
    return TestClient(
        create_fastapi_app(
            CountEnvironment,
            CountAction,
            CountObservation,
            env_name="count",
            max_concurrent_envs=8,
            settings=Settings(),
        )
    )


def test_a_header_labels_the_sessions_that_http_and_plain_sockets_make() -> None:
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    with client_of_app() as client:
        made = client.post("/mcp", json=create, headers={HEADER: FIRST.header()}).json()["result"]["session_id"]
        with connect(client, f"/ws?session_id={made}") as socket:
            eid = socket.ask("reset")["eid"]
        assert labels_in(client.get(f"/episodes/{eid}").json()) == FIRST
        fork = client.post(f"/episodes/{eid}/fork", json={"t": 0, "request_id": "f"}).json()
        assert labels_in(client.get(f"/episodes/{fork['eid']}").json()) == FIRST
        listed = client.get("/episodes", params={"group": "prompt-7", "run": FIRST.run or "", "step": 3}).json()
        assert {one["eid"] for one in listed["episodes"]} == {eid, fork["eid"]}
        assert client.get("/episodes", params={"step": 2}).json()["episodes"] == []
        assert client.get("/episodes", params={"step": "x"}).status_code == 422


def test_a_fork_over_http_has_the_labels_of_its_first_request() -> None:
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    with client_of_app() as client:
        made = client.post("/mcp", json=create, headers={HEADER: FIRST.header()}).json()["result"]["session_id"]
        with connect(client, f"/ws?session_id={made}") as socket:
            eid = socket.ask("reset")["eid"]
        route = f"/episodes/{eid}/fork"
        look = client.post(route, json={"t": 0, "request_id": "look", "labels": {"run": "é", "step": 0}}).json()
        assert labels_in(client.get(f"/episodes/{look['eid']}").json()) == Labels(run="é", step=0)
        assert client.post(route, json={"t": 0, "request_id": "look", "labels": {}}).json() == look
        assert client.post(route, json={"t": 0, "request_id": "look"}).json() == look
        none = client.post(route, json={"t": 0, "request_id": "none", "labels": {"run": None}}).json()
        assert labels_in(client.get(f"/episodes/{none['eid']}").json()) == NO_LABELS
        same = client.post(route, json={"t": 0, "request_id": "same", "labels": None}).json()
        assert labels_in(client.get(f"/episodes/{same['eid']}").json()) == FIRST
        for wrong in ([], "r", {"run": ""}, {"step": "1"}, {"step": True}, {"epoch": 1}, {"group": "a\nb"}):
            refused = client.post(route, json={"t": 0, "request_id": "wrong", "labels": wrong})
            assert (refused.status_code, refused.json()["code"]) == (422, "VALIDATION_ERROR"), wrong
        half = client.post(route, content=b'{"t":0,"request_id":"wrong","labels":{"run":"\\ud800"}}')
        assert (half.status_code, half.json()["code"]) == (422, "VALIDATION_ERROR")
        listed = client.get("/episodes", params={"origin": eid}).json()["episodes"]
        assert {one["eid"] for one in listed} == {look["eid"], none["eid"], same["eid"]}


@pytest.mark.parametrize("sent", ["{", "[]", '{"step":"1"}', '{"run":"a","run":"b"}', " " * (MAX_HEADER + 1), "", "é"])
def test_a_header_without_labels_is_refused_before_a_session_is_made(sent: str) -> None:
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    with client_of_app() as client:
        headers = {HEADER: sent.encode()}
        error = client.post("/mcp", json=create, headers=headers).json()["error"]  # type: ignore[arg-type]
        assert error["data"]["code"] == "VALIDATION_ERROR" and HEADER in error["message"]
        with client.websocket_connect("/ws", headers=headers) as socket:  # type: ignore[arg-type]
            frame = json.loads(socket.receive_text())
            assert frame["type"] == "error" and frame["data"]["code"] == "VALIDATION_ERROR"
            with pytest.raises(WebSocketDisconnect):
                socket.receive_text()
        twice = [(HEADER, "{}"), (HEADER, "{}")]
        assert "2 times" in client.post("/mcp", json=create, headers=twice).text
        assert client.get("/capabilities").json()["extensions"]["labels"] == VERSION
        assert client.post("/mcp", json={**create, "method": "tools/list"}, headers=headers).status_code == 200  # type: ignore[arg-type]


def test_a_server_that_knows_no_labels_is_sent_none() -> None:
    from errata_client.doors.mux_door import MuxDoor
    from errata_protocol.capabilities import Capabilities

    class OfBefore:
        capabilities = Capabilities(environment="e", extensions={"mux": 1})

    class Lease:
        connection = OfBefore()

    client = ErrataClient("http://127.0.0.1:1", labels=FIRST)
    door: MuxDoor = client._mux
    door._lease = Lease()  # type: ignore[assignment]
    assert door._labels() == NO_LABELS
    OfBefore.capabilities = Capabilities(environment="e", extensions={"mux": 1, "labels": 1})
    assert door._labels() == FIRST
