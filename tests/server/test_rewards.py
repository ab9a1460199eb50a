"""Rewards that come after their delivery (PROTOCOL D8, F1, F2, F4, G)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server.http_server import create_fastapi_app as upstream_app
from pydantic import SecretStr

from errata_protocol.errors import Conflict, ErrataError, InvalidRequest, NoReset, StateOutOfRange, UnknownEpisode
from errata_protocol.mux.messages import RewardData
from errata_server import adopt
from errata_server.app import create_fastapi_app
from errata_server.app.multi_environment import compose
from errata_server.journal import IndexedJournal, Journal, MemoryJournal, RewardRow
from errata_server.runtime.rewards import push_data
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation
from .journal_rows import delivery, episode, session
from .rubric_environments import (
    Board,
    ForgetfulGameEnvironment,
    GameEnvironment,
    Move,
    RaisingGameEnvironment,
    SavedGameEnvironment,
    TaskGameEnvironment,
)
from .test_mux_door import joined

KEY = b"k" * 32


def reward(**over: Any) -> dict[str, Any]:
    return {"t": 1, "value": 0.5, "source": "verifier", "reward_id": "r", **over}


# -- over HTTP ---------------------------------------------------------------------------------------------------


@pytest.fixture
def eid(client: TestClient) -> str:
    """An episode of three deliveries."""
    with connect(client) as socket:
        made: str = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 1})
        socket.ask("step", {"n": 1})
    return made


def test_a_posted_reward_is_listed_and_posting_it_again_changes_nothing(client: TestClient, eid: str) -> None:
    path = f"/episodes/{eid}/rewards"
    assert client.get(path).json() == []
    first = client.post(path, json=reward())
    assert (first.status_code, first.json()) == (200, reward())
    again = client.post(path, json=reward())
    assert (again.status_code, again.json()) == (200, reward())
    assert client.get(path).json() == [reward()]


@pytest.mark.parametrize("over", [{"t": 2}, {"value": 0.25}, {"source": "another"}])
def test_the_same_reward_id_for_another_reward_is_a_conflict(
    client: TestClient, eid: str, over: dict[str, Any]
) -> None:
    path = f"/episodes/{eid}/rewards"
    client.post(path, json=reward())
    answer = client.post(path, json=reward(**over))
    assert (answer.status_code, answer.json()["code"]) == (409, "CONFLICT")
    assert client.get(path).json() == [reward()]


def test_a_list_is_posted_whole_or_not_at_all(client: TestClient, eid: str) -> None:
    path = f"/episodes/{eid}/rewards"
    both = [reward(reward_id="a"), reward(reward_id="b", t=0)]
    assert client.post(path, json=both).json() == both
    beyond = client.post(path, json=[reward(reward_id="c"), reward(reward_id="d", t=3)])
    assert (beyond.status_code, beyond.json()["code"]) == (404, "T_OUT_OF_RANGE")
    clash = client.post(path, json=[reward(reward_id="e"), reward(reward_id="a", value=9)])
    assert clash.status_code == 409
    assert client.post(path, json=[*both, reward(reward_id="f", value=-1)]).status_code == 200
    assert [r["reward_id"] for r in client.get(path).json()] == ["a", "b", "f"]
    assert client.post(path, json=[]).json() == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (json.dumps(reward(t=3)), 404, "T_OUT_OF_RANGE"),
        (json.dumps(reward(t=-1)), 422, "VALIDATION_ERROR"),
        (json.dumps(reward(t=True)), 422, "VALIDATION_ERROR"),
        (json.dumps(reward(value=True)), 422, "VALIDATION_ERROR"),
        (json.dumps(reward(value="1")), 422, "VALIDATION_ERROR"),
        (json.dumps(reward(value=float("nan"))), 400, "INVALID_JSON"),
        (json.dumps(reward()).replace("0.5", "1e999"), 400, "INVALID_JSON"),
        (json.dumps(reward(reward_id="")), 422, "VALIDATION_ERROR"),
        (json.dumps(reward(source="")), 422, "VALIDATION_ERROR"),
        (json.dumps(reward(more=1)), 422, "VALIDATION_ERROR"),
        (json.dumps({"t": 1, "value": 1.0}), 422, "VALIDATION_ERROR"),
        (json.dumps(reward(source="environment")), 422, "VALIDATION_ERROR"),
        (json.dumps(reward(reward_id="environment:1")), 422, "VALIDATION_ERROR"),
        ('{"t":1,"t":1,"value":1,"source":"s","reward_id":"r"}', 400, "INVALID_JSON"),
        ('{"t":1,"value":1,"source":"\\ud800","reward_id":"r"}', 422, "VALIDATION_ERROR"),
        ("1", 422, "VALIDATION_ERROR"),
        ("", 400, "INVALID_JSON"),
    ],
)
def test_a_reward_that_is_none_is_refused_with_a_code(
    client: TestClient, eid: str, body: str, status: int, code: str
) -> None:
    answer = client.post(f"/episodes/{eid}/rewards", content=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert client.get(f"/episodes/{eid}/rewards").json() == []


def test_an_unknown_and_a_foreign_episode_answer_alike() -> None:
    settings = Settings(token=SecretStr("mine,theirs"))
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, runtime=simulated(settings))
    me, them = ({"Authorization": f"Bearer {token}"} for token in ("mine", "theirs"))
    with TestClient(app, headers=me) as client:
        with connect(client) as socket:
            eid = socket.ask("reset", {})["eid"]
            socket.ask("step", {"n": 1})
        path = f"/episodes/{eid}/rewards"
        for method in ("GET", "POST"):
            body = None if method == "GET" else reward()
            foreign = client.request(method, path, json=body, headers=them)
            unknown = client.request(method, path.replace(eid, "ep_none"), json=body, headers=them)
            assert foreign.status_code == unknown.status_code == 404
            assert foreign.json()["code"] == unknown.json()["code"] == "UNKNOWN_EPISODE"
            assert foreign.text.replace(eid, "ep_none") == unknown.text
            assert client.request(method, path, json=body, headers={"Authorization": "no"}).status_code == 401
        assert client.post(path, json=reward()).status_code == 200


def test_production_mode_has_no_rewards_route() -> None:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, mode="production", runtime=simulated(), insecure=True
    )
    with TestClient(app) as client:
        assert client.post("/episodes/ep_x/rewards", json=reward()).status_code == 404
        assert "delayed_rewards" not in client.get("/capabilities").json()["extensions"]


def _below_a_mount() -> tuple[FastAPI, str]:
    app = FastAPI()
    app.mount("/below", create_fastapi_app(CountEnvironment, CountAction, CountObservation, runtime=simulated()))
    return app, "/below"


def _composed() -> tuple[FastAPI, str]:
    runtime = simulated()
    apps = {
        name: create_fastapi_app(CountEnvironment, CountAction, CountObservation, env_name=name, runtime=runtime)
        for name in ("one", "two")
    }
    return compose(apps, runtime, replayable=True), "/one"


def _adopted() -> tuple[FastAPI, str]:
    return adopt(upstream_app(CountEnvironment, CountAction, CountObservation), runtime=simulated()), ""


@pytest.mark.parametrize("make", [_below_a_mount, _composed, _adopted])
def test_rewards_are_served_below_mounts_and_in_adopted_applications(make: Any) -> None:
    app, prefix = make()
    with TestClient(app) as client:
        with connect(client, f"{prefix}/ws") as socket:
            eid = socket.ask("reset", {})["eid"]
            socket.ask("step", {"n": 1})
        assert client.post(f"{prefix}/episodes/{eid}/rewards", json=reward()).json() == reward()
        assert client.get(f"{prefix}/episodes/{eid}/rewards").json() == [reward()]
        if make is _composed:
            assert client.get(f"/episodes/{eid}/rewards").json() == [reward()]


# -- numbers of pushes -------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "indexed"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    made = MemoryJournal() if request.param == "memory" else IndexedJournal(tmp_path / "journal")
    yield made
    made.close()


async def _with_episode(journal: Journal, *, key_hash: bytes | None = KEY) -> Runtime:
    runtime = Runtime(Settings(), journal=journal)
    await journal.commit(session(key_hash=key_hash), episode("e"), *(delivery("e", t) for t in range(3)))
    return runtime


async def test_concurrent_posts_are_numbered_without_gap_or_duplicate_and_pushed_after_their_commit(
    journal: Journal,
) -> None:
    runtime = await _with_episode(journal)
    pushed: list[RewardRow] = []

    def on_pushed(sid: str, row: RewardRow) -> None:
        assert sid == "s" and row in journal.rewards("e")
        pushed.append(row)

    runtime.rewards.subscribe(on_pushed)
    posts = [runtime.rewards.post("e", n % 3, float(n), "v", f"r{n // 2}", None) for n in range(40)]
    answers = await asyncio.gather(*posts, return_exceptions=True)
    assert sum(isinstance(a, Conflict) for a in answers) == 20
    assert [row.seq for row in pushed] == list(range(1, 21))
    assert [row.seq for row in journal.pushes("s", 1, 99)] == list(range(1, 21))


async def test_a_repeated_post_is_pushed_once_and_answers_with_its_first_number(journal: Journal) -> None:
    runtime = await _with_episode(journal)
    pushed: list[RewardRow] = []
    runtime.rewards.subscribe(lambda _, row: pushed.append(row))
    first = await runtime.rewards.post("e", 1, 0.5, "v", "r", None)
    await runtime.rewards.post("e", 1, 0.5, "v", "q", None)
    assert await runtime.rewards.post("e", 1, 0.5, "v", "r", None) == first
    assert [row.reward_id for row in pushed] == ["r", "q"] and first.seq == 1


async def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    runtime = await _with_episode(IndexedJournal(tmp_path / "journal"))
    await runtime.rewards.post("e", 1, 0.5, "v", "a", None)
    runtime.store.journal.close()
    again = Runtime(Settings(), journal=IndexedJournal(tmp_path / "journal"))
    assert (await again.rewards.post("e", 1, 0.5, "v", "b", None)).seq == 2
    assert (await again.rewards.post("e", 1, 0.5, "v", "a", None)).seq == 1
    again.store.journal.close()


async def test_a_session_that_nothing_is_pushed_to_has_no_numbers(journal: Journal) -> None:
    runtime = await _with_episode(journal, key_hash=None)
    runtime.rewards.subscribe(lambda *_: pytest.fail("pushed"))
    assert (await runtime.rewards.post("e", 1, 0.5, "v", "r", None)).seq is None


async def test_what_cannot_be_posted_is_told_apart(journal: Journal) -> None:
    runtime = await _with_episode(journal)
    await journal.commit(episode("tools"), delivery("tools", 1))

    async def refusal(eid: str, t: int, value: float = 1.0, source: str = "v") -> type[ErrataError]:
        with pytest.raises(ErrataError) as caught:
            await runtime.rewards.post(eid, t, value, source, "r", None)
        return type(caught.value)

    assert await refusal("e", 3) is StateOutOfRange
    assert await refusal("tools", 0) is NoReset
    assert await refusal("none", 0) is UnknownEpisode
    assert await refusal("e", 0, value=float("inf")) is InvalidRequest
    assert await refusal("e", 0, source="environment") is InvalidRequest
    assert journal.rewards("e") == [] and journal.last_seq("s") == 0


async def test_a_caller_that_goes_away_does_not_take_the_push_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = MemoryJournal()
    runtime = await _with_episode(journal)
    begun, gone, told, commit = asyncio.Event(), asyncio.Event(), asyncio.Event(), runtime.store.commit

    async def slow(*records: Any) -> None:
        begun.set()
        await gone.wait()
        await commit(*records)

    monkeypatch.setattr(runtime.store, "commit", slow)
    runtime.rewards.subscribe(lambda *_: told.set())
    post = asyncio.create_task(runtime.rewards.post("e", 1, 0.5, "v", "r", None))
    await asyncio.wait_for(begun.wait(), 60)
    post.cancel()
    with pytest.raises(asyncio.CancelledError):
        await post
    gone.set()
    await asyncio.wait_for(told.wait(), 60)
    assert journal.last_seq("s") == 1


def test_push_data_is_the_data_of_the_reward_message() -> None:
    row = RewardRow("e", 1, 0.1, "vérifier", "r", "s", 1, 0.0)
    data = RewardData.model_validate_json(push_data(row))
    assert (data.eid, data.t, data.value, data.source, data.reward_id) == ("e", 1, 0.1, "vérifier", "r")


# -- of the environment -------------------------------------------------------------------------------------------


def _game(env: Any, runtime: Runtime | None = None, **more: Any) -> FastAPI:
    return create_fastapi_app(env, Move, Board, max_concurrent_envs=4, runtime=runtime or simulated(), **more)


def _late(client: TestClient, eid: str) -> dict[int, float]:
    found = client.get(f"/episodes/{eid}/rewards").json()
    assert all(r["source"] == "environment" and r["reward_id"] == f"environment:{r['t']}" for r in found)
    return {r["t"]: r["value"] for r in found}


@pytest.mark.parametrize("env", [GameEnvironment, TaskGameEnvironment])
def test_step_rewards_of_a_rubric_are_there_once_the_episode_is_done(env: Any) -> None:
    with TestClient(_game(env)) as client, connect(client) as socket:
        for outcome, last in (("win", 1.0), ("lose", 0.0)):
            eid = socket.ask("reset", {})["eid"]
            socket.ask("step", {"do": "go"})
            socket.ask("step", {"do": "go"})
            assert _late(client, eid) == {}
            assert socket.ask("step", {"do": outcome})["data"]["reward"] == last
            assert _late(client, eid) == {1: last / 4, 2: last / 2, 3: last}


def test_a_delivery_that_was_not_judged_and_a_judged_step_that_failed_shift_nothing() -> None:
    with TestClient(_game(GameEnvironment)) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"do": "go"})
        socket.ask("step", {"do": "pass"})
        assert socket.ask("step", {"do": "crash"})["type"] == "error"
        assert socket.ask("step", {"do": "win"})["t"] == 3
        assert _late(client, eid) == {1: 0.25, 3: 1.0}


def test_an_episode_that_goes_on_after_its_end_keeps_what_was_credited_first() -> None:
    with TestClient(_game(GameEnvironment)) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"do": "win"})
        assert socket.ask("step", {"do": "lose"})["t"] == 2
        assert _late(client, eid) == {1: 1.0, 2: 0.0}


@pytest.mark.parametrize("env", [ForgetfulGameEnvironment, RaisingGameEnvironment])
def test_rewards_that_cannot_be_computed_cost_no_step(env: Any, caplog: pytest.LogCaptureFixture) -> None:
    with TestClient(_game(env)) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        assert socket.ask("step", {"do": "win"})["t"] == 1
        assert _late(client, eid) == {}
    assert "compute_step_rewards() " in caplog.text


CREATE = {"jsonrpc": "2.0", "method": "openenv/session/create", "params": {}, "id": 1}


@pytest.mark.parametrize(("env", "options"), [(SavedGameEnvironment, {}), (GameEnvironment, {"deterministic": True})])
def test_a_session_that_was_woken_credits_the_steps_before_too(
    env: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    def app() -> FastAPI:
        return _game(env, Runtime(Settings(data_dir=tmp_path)), **options)

    with TestClient(app()) as client:
        sid = client.post("/mcp", json=CREATE).json()["result"]["session_id"]
        with connect(client, f"/ws?session_id={sid}") as socket:
            eid = socket.ask("reset", {})["eid"]
            socket.ask("step", {"do": "go"})
    with TestClient(app()) as client:
        with connect(client, f"/ws?session_id={sid}") as socket:
            assert socket.ask("step", {"do": "win"})["t"] == 2
        assert _late(client, eid) == {1: 0.5, 2: 1.0}


def test_a_woken_session_takes_a_judged_step_that_failed_for_no_delivery(tmp_path: Path) -> None:
    def app() -> FastAPI:
        return _game(SavedGameEnvironment, Runtime(Settings(data_dir=tmp_path)))

    with TestClient(app()) as client:
        sid = client.post("/mcp", json=CREATE).json()["result"]["session_id"]
        with connect(client, f"/ws?session_id={sid}") as socket:
            eid = socket.ask("reset", {})["eid"]
    with TestClient(app()) as client:
        with connect(client, f"/ws?session_id={sid}") as socket:
            socket.ask("step", {"do": "pass"})  # a delivery that nobody judged
            socket.ask("step", {"do": "crash"})  # judged, and no delivery
            assert socket.ask("step", {"do": "win"})["t"] == 2
        assert _late(client, eid) == {2: 1.0}


@pytest.mark.parametrize(("env", "options"), [(SavedGameEnvironment, {}), (GameEnvironment, {"deterministic": True})])
def test_a_fork_credits_its_own_steps_and_leaves_the_parents_alone(env: Any, options: dict[str, Any]) -> None:
    with TestClient(_game(env, **options)) as client:
        with connect(client) as socket:
            parent = socket.ask("reset", {})["eid"]
            socket.ask("step", {"do": "go"})
            socket.ask("step", {"do": "lose"})
        made = client.post(f"/episodes/{parent}/fork", json={"t": 1, "request_id": "f"}).json()
        with connect(client, f"/ws?session_id={made['session_id']}") as socket:
            socket.ask("step", {"do": "go"})
            socket.ask("step", {"do": "win"})
        assert _late(client, made["eid"]) == {1: 0.5, 2: 1.0}
        assert _late(client, parent) == {1: 0.0, 2: 0.0}


def test_a_fork_that_was_woken_takes_none_of_its_parents_steps_for_its_own(tmp_path: Path) -> None:
    def app() -> FastAPI:
        return _game(SavedGameEnvironment, Runtime(Settings(data_dir=tmp_path)))

    with TestClient(app()) as client:
        with connect(client) as socket:
            parent = socket.ask("reset", {})["eid"]
            socket.ask("step", {"do": "go"})
        made = client.post(f"/episodes/{parent}/fork", json={"t": 1, "request_id": "f"}).json()
        with connect(client, f"/ws?session_id={made['session_id']}") as socket:
            socket.ask("step", {"do": "pass"})  # one delivery, and one judged step in memory: the parent's
    with TestClient(app()) as client:
        with connect(client, f"/ws?session_id={made['session_id']}") as socket:
            socket.ask("step", {"do": "win"})
        assert _late(client, made["eid"]) == {2: 1.0}


@pytest.mark.parametrize("env", [GameEnvironment, TaskGameEnvironment])
async def test_step_rewards_are_pushed_on_a_multiplexed_socket(env: Any) -> None:
    async with joined(_game(env)) as trainer:
        opened = await trainer.open()
        reset = await trainer.ask(opened, "reset")
        await trainer.ask(opened, "step", {"do": "go"})
        await trainer.ask(opened, "step", {"do": "win"})
        found = json.loads((await trainer.read("rewards", opened)).payload)
        assert [(r["t"], r["value"], r["eid"]) for r in found] == [(1, 0.5, reset.eid), (2, 1.0, reset.eid)]
        assert trainer.pushed == found


async def test_rewards_of_a_multiplexed_session_are_numbered_in_the_commit_of_the_last_step(journal: Journal) -> None:
    runtime = Runtime(Settings(), journal=journal)
    row = session(key_hash=KEY)
    await journal.commit(row, episode("e"), delivery("e", 0), delivery("e", 1))
    pushed: list[tuple[int, int | None]] = []
    runtime.rewards.subscribe(lambda _, row: pushed.append((row.t, row.seq)))
    await runtime.rewards.post("e", 1, 9.0, "v", "r", None)
    done = delivery("e", 2, done=True)
    await asyncio.gather(
        runtime.rewards.commit(row, {1: 0.5, 2: 1.0}, done),
        *(runtime.rewards.post("e", 0, 9.0, "v", f"r{n}", None) for n in range(5)),
    )
    assert [seq for _, seq in pushed] == list(range(1, 9)) == [r.seq for r in journal.pushes("s", 1, 99)]
    assert [(r.t, r.value) for r in journal.rewards("e") if r.source == "environment"] == [(1, 0.5), (2, 1.0)]
    with pytest.raises(Conflict):
        await runtime.rewards.commit(row, {1: 7.0}, done)
    assert journal.last_seq("s") == 8
