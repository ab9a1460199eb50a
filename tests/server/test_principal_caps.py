"""A principal has so many sessions and no more, on whatever door, and takes no room from another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from errata_protocol.errors import CapacityReached
from errata_server.app import create_fastapi_app
from errata_server.app.multi_environment import compose
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation, PinnedEnvironment
from .test_metrics import samples
from .test_mux_door import joined

ONE, OTHER = ({"Authorization": f"Bearer {token}"} for token in ("one", "other"))
CREATE = {"jsonrpc": "2.0", "method": "openenv/session/create", "params": {}, "id": 1}


def capped(cap: int = 2) -> Runtime:
    return simulated(Settings(token=SecretStr("one,other"), max_sessions_per_principal=cap))


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=8, runtime=capped()
    )
    with TestClient(app) as made:
        yield made


def refusal(client: TestClient, path: str, headers: dict[str, str]) -> dict[str, Any]:
    with client.websocket_connect(path, headers=headers) as ws:
        ws.send_json({"type": "reset", "data": {}} if path.endswith("/ws") else CREATE)
        found: dict[str, Any] = ws.receive_json()
        return found


def test_the_next_session_of_a_principal_is_refused_with_a_time_to_wait_and_anothers_is_not(client: TestClient) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            ws = stack.enter_context(client.websocket_connect("/ws", headers=ONE))
            ws.send_json({"type": "reset", "data": {}})
            assert ws.receive_json()["type"] == "observation"
        told = refusal(client, "/ws", ONE)["data"]
        assert told["code"] == "CAPACITY_REACHED" and told["retry_after"] > 0
        assert (told["active_sessions"], told["max_sessions"]) == (2, 2)
        assert refusal(client, "/ws", OTHER)["type"] == "observation"
        over_http = client.post("/mcp", json=CREATE, headers=ONE).json()
        assert over_http["error"]["code"] == -32000
        assert refusal(client, "/mcp", ONE)["error"]["code"] == -32000
        text = client.get("/metrics", headers=ONE).text
    assert samples(text, "errata_sessions_refused_total") == {("count", "principal"): 3}
    assert refusal(client, "/ws", ONE)["type"] == "observation", "closed sessions give their places back"


def test_a_principals_detached_session_makes_room_for_its_next_and_for_no_others() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=8, runtime=capped(1))
    with TestClient(app) as client:
        sid = {
            name: client.post("/mcp", json=CREATE, headers=headers).json()["result"]["session_id"]
            for name, headers in (("one", ONE), ("other", OTHER))
        }
        for name, headers in (("one", ONE), ("other", OTHER)):
            with client.websocket_connect(f"/ws?session_id={sid[name]}", headers=headers) as ws:
                ws.send_json({"type": "reset", "data": {}})
                ws.receive_json()
        sessions = app.state.errata.sessions
        assert refusal(client, "/ws", ONE)["type"] == "observation"
        assert sessions.table.get(sid["one"]) is None, "it sleeps"
        assert sessions.table.get(sid["other"]).host is not None


def test_sessions_of_all_environments_count_together_and_make_room_for_each_other() -> None:
    runtime = capped(1)
    apps = {
        name: create_fastapi_app(
            env, CountAction, CountObservation, env_name=name, max_concurrent_envs=4, runtime=runtime
        )
        for name, env in (("count", CountEnvironment), ("pinned", PinnedEnvironment))
    }
    with TestClient(compose(apps, runtime, replayable=True)) as client:
        with client.websocket_connect("/pinned/ws", headers=ONE) as ws:
            ws.send_json({"type": "reset", "data": {}})
            ws.receive_json()
            assert refusal(client, "/count/ws", ONE)["data"]["code"] == "CAPACITY_REACHED"
        sid = client.post("/count/mcp", json=CREATE, headers=ONE).json()["result"]["session_id"]
        with client.websocket_connect(f"/count/ws?session_id={sid}", headers=ONE) as ws:
            ws.send_json({"type": "reset", "data": {}})
            ws.receive_json()
        assert refusal(client, "/pinned/ws", ONE)["type"] == "observation"
        assert apps["count"].state.errata.sessions.table.get(sid) is None


async def test_a_multiplexed_session_counts_and_one_that_was_left_makes_room() -> None:
    app = create_fastapi_app(
        CountEnvironment,
        CountAction,
        CountObservation,
        max_concurrent_envs=8,
        runtime=simulated(Settings(max_sessions_per_principal=2)),
    )
    async with joined(app) as trainer, joined(app, seed=1) as another:
        first, second = await trainer.open(), await trainer.open()
        for session in (first, second):
            await trainer.ask(session, "reset")
        opening = asyncio.ensure_future(another.open())
        await another.refused.wait()
        assert isinstance(another.refusals[0], CapacityReached) and another.refusals[0].details["retry_after"] > 0
        await trainer.cut()
        await another.tick()
        third = await opening
        assert (await another.ask(third, "reset")).t == 0
        assert app.state.errata.runtime.room_of(None).used == 2


def test_without_a_bound_and_without_tokens_nothing_is_refused() -> None:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, max_concurrent_envs=4, runtime=simulated()
    )
    with TestClient(app) as client, ExitStack() as stack:
        for _ in range(4):
            assert stack.enter_context(connect(client)).ask("reset", {})["t"] == 0
