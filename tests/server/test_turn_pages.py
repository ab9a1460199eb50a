"""Turns of an episode, page by page, from every store, over HTTP, from a bundle and by the client."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from errata_client import Episodes, ErrataClient
from errata_protocol.bundle_check import verify_bundle
from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import InvalidRequest, UnknownEpisode
from errata_protocol.turn_pages import MAX_ACTION_TEXT, MAX_PAGE_BYTES
from errata_server.app import create_fastapi_app
from errata_server.environments import discovery
from errata_server.episodes import agent_texts
from errata_server.episodes.agent_texts import AgentTexts
from errata_server.episodes.reads import JournalReads
from errata_server.journal import IndexedJournal, Journal, MemoryJournal, ReadOnlyJournal
from errata_server.journal.segments import Segments
from errata_server.runtime.store import Store
from errata_server.serve.bundle_server import Archive, archive_app
from errata_server.settings import Settings

from ..counted_work import calls_of
from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation
from .journal_rows import delivery, episode, reward, session
from .local_server import LocalServer
from .test_journal import STORES

ALL = {**STORES, "indexed, some waits for its index": lambda d: IndexedJournal(d, batch_rows=30, background=False)}
SPEC = EnvironmentSpec(
    name="count",
    factory="tests.server.environments:CountEnvironment",
    action_cls=CountAction,
    observation_cls=CountObservation,
    agent_text=lambda observation: f"n is {observation['n']}",
    agent_text_version="7",
)


@pytest.fixture(params=ALL)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    made = ALL[request.param](tmp_path)
    yield made
    made.close()


async def test_deliveries_behind_a_t_are_read_whole_in_order(journal: Journal) -> None:
    rows = [delivery("e1", t, id=t + 1, payload=b"x" * 10) for t in range(40)]
    await journal.commit(session(), episode("e1"), episode("e2"))
    for row in rows:
        await journal.commit(row)
        await journal.commit(delivery("e2", row.t, id=100 + (row.t or 0)))
    assert journal.deliveries("e1", limit=500, most_bytes=10**6) == rows
    assert journal.deliveries("e1", after=7, limit=5, most_bytes=10**6) == rows[8:13]
    assert journal.deliveries("e1", after=37, limit=5, most_bytes=10**6) == rows[38:]
    assert journal.deliveries("e1", after=39, limit=5, most_bytes=10**6) == []
    assert journal.deliveries("e1", after=2**53, limit=5, most_bytes=10**6) == []
    assert journal.deliveries("none", limit=5, most_bytes=10**6) == []
    assert journal.deliveries("e1", limit=40, most_bytes=25) == rows[:3]  # 12 bytes each
    journal.delete_episode("e1")
    assert journal.deliveries("e1", limit=5, most_bytes=10**6) == []


async def test_an_episode_without_a_reset_or_with_a_gap_is_read_without_what_is_missing(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"))
    for t in (1, 2, 3, 60, 61):
        await journal.commit(delivery("e1", t, id=t))
    for limit in (1, 2, 3, 500):
        found: list[int | None] = []
        while page := journal.deliveries("e1", after=found[-1] or 0 if found else -1, limit=limit, most_bytes=10**6):
            found += [row.t for row in page]
        assert found == [1, 2, 3, 60, 61]


async def test_late_rewards_are_counted_by_delivery(journal: Journal) -> None:
    await journal.commit(session(), episode("e1"), episode("e2"), delivery("e2", 1, id=1))
    for t in range(40):
        await journal.commit(delivery("e1", t, id=t + 2))
    seq = 0
    for t, count in ((3, 2), (4, 1), (39, 3)):
        for n in range(count):
            seq += 1
            await journal.commit(reward("e1", t, reward_id=f"{t}-{n}", seq=seq))
    await journal.commit(reward("e2", 1, seq=seq + 1))
    assert journal.late_rewards("e1", first=0, last=100) == {3: 2, 4: 1, 39: 3}
    assert journal.late_rewards("e1", first=4, last=38) == {4: 1}
    assert journal.late_rewards("none", first=0, last=9) == {}
    journal.delete_episode("e1")
    assert journal.late_rewards("e1", first=0, last=100) == {}


@pytest.mark.parametrize("store", ["memory", "indexed", "read only"])
async def test_a_page_of_a_long_episode_costs_what_one_of_a_short_one_does(store: str, tmp_path: Path) -> None:
    journal: Journal = MemoryJournal() if store == "memory" else IndexedJournal(tmp_path, batch_rows=100)
    await journal.commit(session(), episode("short"), episode("long"))
    for eid, count in (("short", 60), ("long", 6000)):
        rows = [delivery(eid, t, id=None) for t in range(count)]
        for at in range(0, count, 1000):
            await journal.commit(*rows[at : at + 1000])
        rewards = [reward(eid, t, reward_id=f"{t}", seq=None) for t in range(count)]
        await journal.commit(*rewards)
    if isinstance(journal, IndexedJournal):
        journal.close()  # all of it is in the index then
        journal = ReadOnlyJournal(tmp_path) if store == "read only" else IndexedJournal(tmp_path)
    store_of = Store(None, floor_bytes=0, wait_s=0)
    store_of.open(journal, None)
    reads = JournalReads(store_of)
    work = {}

    async def scan(function: Callable[[Journal], Any]) -> Any:
        found = []
        work[eid] = calls_of(lambda: found.append(function(journal)))
        return found[0]

    store_of.scan = scan  # type: ignore[method-assign]  # on this thread, whose calls are counted
    for eid, after in (("short", 9), ("long", 9), ("short", 29), ("long", 5000)):
        page = await reads.turns(eid, after=after, limit=20, principal=None)
        assert [turn.t for turn in page.turns] == list(range(after + 1, after + 21))
        assert {turn.late_rewards for turn in page.turns} == {1}
        assert page.next == str(after + 20) and page.deliveries == (60 if eid == "short" else 6000)
        assert work.get("long", 0) <= work["short"] * 1.5
    store_of.close()
    journal.close()


@contextlib.contextmanager
def counting(data_dir: Path, tokens: str | None = None, **more: Any) -> Iterator[TestClient]:
    settings = Settings(data_dir=data_dir, token=SecretStr(tokens) if tokens is not None else None)
    app: FastAPI = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=8, settings=settings,
        **more,
    )  # fmt: skip
    with TestClient(app) as client:
        yield client


def play(client: TestClient) -> str:
    """Play an episode with a marked turn, a long action, a failed request and late rewards; return its eid."""
    with connect(client) as socket:
        eid = str(socket.ask("reset", {"episode_id": "mine"})["eid"])
        socket.ask("step", {"n": 2, "do": "é😀"})
        socket.ask("step", {"do": "mark"})
        assert socket.ask("step", {"do": "raise"})["type"] == "error"
        socket.ask("step", {"n": 5, "do": "x" * 9000})
    rewards = [{"t": 1, "value": 0.5, "source": "me", "reward_id": f"r{n}"} for n in range(2)]
    assert client.post(f"/episodes/{eid}/rewards", json=rewards).status_code == 200
    return eid


def test_pages_say_what_the_agent_did_where_it_went_wrong_and_how_long_it_took(tmp_path: Path) -> None:
    with counting(tmp_path / "data") as client:
        eid = play(client)
        page = client.get(f"/episodes/{eid}/turns").json()
        reset, first, marked, long = page["turns"]
        assert (page["next"], page["deliveries"]) == (None, 4)
        listed = client.get(f"/episodes/{eid}").json()["turns"]
        assert [{name: turn[name] for name in listed[0]} for turn in page["turns"]] == listed
        assert reset["kind"] == "reset" and reset["since_s"] is None and reset["action"]["episode_id"] == "mine"
        assert first["action"] == {"n": 2, "do": "é😀"} and not first["action_cut"] and first["late_rewards"] == 2
        assert first["error_site"] is first["error_kind"] is first["severity"] is None
        assert marked["error_kind"] == "nonzero_exit" and marked["severity"] == "error" and not marked["late_rewards"]
        assert marked["error_site"]["action_field"] == "do" and marked["error_site"]["action_span"] == [0, 4]
        assert long["action"] == {"n": 5, "do": "x" * MAX_ACTION_TEXT} and long["action_cut"]
        whole = client.get(f"/episodes/{eid}/states/3/action")
        assert whole.json() == {"n": 5, "do": "x" * 9000} and long["action_bytes"] == len(whole.content)
        times = [turn["created"] for turn in page["turns"]]
        assert times == sorted(times) and [turn["since_s"] for turn in page["turns"][1:]] == [
            after - before for before, after in itertools.pairwise(times)
        ]

        pages, cursor = [], None
        while cursor is not None or not pages:
            part = client.get(f"/episodes/{eid}/turns", params={"limit": 1, **({"cursor": cursor} if cursor else {})})
            pages += part.json()["turns"]
            cursor = part.json()["next"]
        assert pages == page["turns"]
        assert client.get(f"/episodes/{eid}/turns?cursor=3").json() == {"turns": [], "next": None, "deliveries": 4}


def test_a_bundle_and_a_read_only_journal_have_the_same_pages(tmp_path: Path) -> None:
    paths = ["turns", "turns?limit=2", "turns?cursor=1&limit=1", "turns?cursor=99", "states/3/action"]
    paths += ["states/0/agent_text", "states/2/agent_text"]
    with counting(tmp_path / "data") as client:
        eid = play(client)
        live = [client.get(f"/episodes/{eid}/{path}") for path in paths]
        file = tmp_path / "bundle.jsonl"
        file.write_bytes(client.get(f"/episodes/{eid}/bundle").content)
        with file.open("rb") as lines:
            assert verify_bundle(lines).ok
    archive = Archive([file])
    with TestClient(archive_app(archive, Settings())) as bundled:
        served = [bundled.get(f"/episodes/{eid}/{path}") for path in paths]
        assert [answer.content for answer in served] == [answer.content for answer in live]
        missing = bundled.get(f"/episodes/{eid}/states/4/action"), bundled.get("/episodes/ep_none/turns")
        assert [answer.json()["code"] for answer in missing] == ["T_OUT_OF_RANGE", "UNKNOWN_EPISODE"]


async def test_a_page_ends_early_where_its_turns_are_large(tmp_path: Path) -> None:
    journal = MemoryJournal()
    large = json.dumps({"observation": {"output": "x" * (MAX_PAGE_BYTES // 2)}}).encode()
    await journal.commit(session(), episode("e1"), *(delivery("e1", t, id=t + 1, payload=large) for t in range(5)))
    store = Store(None, floor_bytes=0, wait_s=0)
    store.open(journal, None)
    reads = JournalReads(store)
    first = await reads.turns("e1", after=-1, limit=100, principal=None)
    assert ([turn.t for turn in first.turns], first.next) == ([0, 1], "1")
    last = await reads.turns("e1", after=3, limit=100, principal=None)
    assert ([turn.t for turn in last.turns], last.next) == ([4], None)
    store.close()


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("turns?limit=0", 422, "VALIDATION_ERROR"),
        ("turns?limit=501", 422, "VALIDATION_ERROR"),
        ("turns?cursor=-1", 422, "VALIDATION_ERROR"),
        ("turns?cursor=", 422, "VALIDATION_ERROR"),
        ("turns?cursor=99999999999999999999", 422, "VALIDATION_ERROR"),
        ("turns?from=1", 422, "VALIDATION_ERROR"),
        ("states/x/action", 422, "VALIDATION_ERROR"),
        ("states/9/action", 404, "T_OUT_OF_RANGE"),
        ("states/9/agent_text", 404, "T_OUT_OF_RANGE"),
    ],
)
def test_a_wrong_page_is_told_why(tmp_path: Path, path: str, status: int, code: str) -> None:
    with counting(tmp_path) as client:
        answer = client.get(f"/episodes/{play(client)}/{path}")
        assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_another_principal_sees_no_turn(tmp_path: Path) -> None:
    with counting(tmp_path, "one,two") as client:
        one, two = ({"Authorization": f"Bearer {token}"} for token in ("one", "two"))
        with client.websocket_connect("/ws", headers=one) as ws:
            ws.send_json({"type": "capabilities"})
            ws.receive_json()
            ws.send_json({"type": "reset"})
            eid = ws.receive_json()["eid"]
        for path in ("turns", "states/0/action", "states/0/agent_text"):
            assert client.get(f"/episodes/{eid}/{path}", headers=one).status_code == 200
            refused = client.get(f"/episodes/{eid}/{path}", headers=two)
            assert refused.json()["code"] == "UNKNOWN_EPISODE"
            assert refused.content == client.get(f"/episodes/ep_none/{path}", headers=two).content.replace(
                b"ep_none", eid.encode()
            )


# -- what the agent read ---------------------------------------------------------------------------------------------


def test_what_the_agent_read_is_served_of_every_t(tmp_path: Path) -> None:
    with counting(tmp_path / "data", spec=SPEC) as client:
        eid = play(client)
        assert [client.get(f"/episodes/{eid}/states/{t}/agent_text").json() for t in range(4)] == [
            {
                "t": t,
                "kind": "step" if t else "reset",
                "agent_text": f"n is {n}",
                "agent_text_version": "7",
                "as_read": True,
            }
            for t, n in enumerate((0, 2, 3, 9))
        ]
    with counting(tmp_path / "data") as client:  # it is not served with its spec any more, nor installed
        read = client.get(f"/episodes/{eid}/states/1/agent_text").json()
        assert not read["as_read"] and read["agent_text_version"] is None
        assert json.loads(read["agent_text"])["n"] == 2


class _Point:
    def __init__(self, spec: EnvironmentSpec | Exception) -> None:
        self._spec = spec

    def load(self) -> EnvironmentSpec:
        if isinstance(self._spec, Exception):
            raise self._spec
        return self._spec


@pytest.mark.parametrize("installed", ["7", "8", "broken", "raises"])
def test_an_installed_environment_is_used_in_the_version_that_was_played(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(observation: Any) -> str:
        if installed == "raises":
            raise KeyError("n")
        return f"n is {observation['n']}"

    spec: EnvironmentSpec | Exception = ImportError("it needs another package")
    if installed != "broken":
        version = "7" if installed == "raises" else installed
        spec = EnvironmentSpec("count", "", object, object, agent_text=made, agent_text_version=version)
    monkeypatch.setattr(agent_texts, "published", lambda: {"count": _Point(spec)})
    payload = b'{"observation":{"n":4,"metadata":{"error_kind":"x"}},"reward":1.0,"done":false}'
    read = AgentTexts().read("count", "7", 3, "step", payload)
    if installed == "7":
        assert (read.agent_text, read.agent_text_version, read.as_read) == ("n is 4", "7", True)
    else:
        assert read.agent_text == '{"done":false,"n":4,"reward":1.0}' and not read.as_read
        assert read.agent_text_version is None


def test_an_environment_without_a_text_of_its_own_was_read_as_json_and_a_tool_as_its_answer() -> None:
    assert discovery.published().get("count") is None
    texts = AgentTexts()
    read = texts.read("count", None, 3, "step", b'{"observation":{"n":4,"metadata":{}},"reward":null,"done":true}')
    assert (read.agent_text, read.as_read) == ('{"done":true,"n":4,"reward":null}', True)
    assert texts.read("count", "7", 3, "mcp", b'{"result":1}').agent_text == '{"result":1}'
    for other in (b"[]", b"{", b'{"observation":[1]}'):
        read = texts.read("count", None, 3, "step", other)
        assert (read.agent_text, read.as_read) == (other.decode(), False)


# -- the client ------------------------------------------------------------------------------------------------------


async def test_the_client_reads_turns_actions_and_texts(tmp_path: Path) -> None:
    with LocalServer("tests.server.environments:CountEnvironment", tmp_path) as server:
        async with ErrataClient(server.url) as client:
            await client.reset()
            for n in range(4):
                await client.step({"n": n})
            eid = str(client.eid)
        async with Episodes(server.url) as episodes:
            first = await episodes.turns(eid, limit=3)
            assert [(turn.t, turn.action) for turn in first.turns][1:] == [(1, {"n": 0}), (2, {"n": 1})]
            second = await episodes.turns(eid, cursor=first.next)
            assert [turn.t for turn in second.turns] == [3, 4] and second.next is None
            assert (await episodes.turns(eid, cursor=3)).turns == second.turns[1:]
            assert json.loads(await episodes.action(eid, 4)) == {"n": 3}
            read = await episodes.agent_text(eid, 4)
            assert json.loads(read.agent_text)["n"] == 6 and read.as_read
            with pytest.raises(InvalidRequest, match="limit"):
                await episodes.turns(eid, limit=501)
            with pytest.raises(UnknownEpisode):
                await episodes.turns("ep_none")
        assert httpx.get(f"{server.url}/episodes/{eid}/states/4/action").headers["cache-control"].endswith("immutable")


def test_no_segment_is_read_for_turns_that_are_not_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(tmp_path) as client:
        with connect(client) as socket:
            eid = socket.ask("reset")["eid"]
            for n in range(30):
                socket.ask("step", {"n": n})
        read: list[object] = []
        original = Segments.read
        monkeypatch.setattr(Segments, "read", lambda self, place: read.append(place) or original(self, place))
        page = client.get(f"/episodes/{eid}/turns?cursor=9&limit=5").json()
        assert [turn["t"] for turn in page["turns"]] == [10, 11, 12, 13, 14]
        assert len(read) == 7  # the one before, and whether others follow
