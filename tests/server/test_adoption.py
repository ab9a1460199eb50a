"""Adopting an application in place: our sessions behind its own routes, middleware, hooks and dependencies."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server.http_server import HTTPEnvServer as UpstreamServer
from openenv.core.env_server.http_server import create_app as upstream_create_app
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.websockets import WebSocketDisconnect

from errata_protocol.errors import InvalidRequest
from errata_server import adopt, create_app
from errata_server.app.adoption import is_ours, sites
from errata_server.settings import Settings

from ..environments import applications
from ..environments.ledger import LedgerAction, LedgerEnvironment, LedgerObservation
from .conftest import connect

PLACES = [("make", ""), ("mounted", "/env"), ("included", "/env")]


def upstreams(app: Starlette) -> UpstreamServer:
    (site,) = sites(app)
    return site.server


@pytest.mark.parametrize(("make", "prefix"), PLACES)
def test_sessions_are_ours_wherever_the_routes_stand_and_upstreams_stay_unused(make: str, prefix: str) -> None:
    app = getattr(applications, make)()
    upstream = upstreams(app)
    assert adopt(app) is app
    with TestClient(app) as client:
        with connect(client, f"{prefix}/ws") as socket:
            reset = socket.ask("reset", {})
            assert socket.ask("step", {"amount": 5})["data"]["observation"]["balance"] == 5
            assert socket.ask("state", {"t": 1})["data"]["observation"]["balance"] == 5
            assert socket.ask("state")["data"] == {"episode_id": "ledger", "step_count": 1, "entries": 1}
            assert upstream.active_sessions == 0
        kept = client.get(f"{prefix}/episodes/{reset['eid']}/states/1")
        assert kept.json()["observation"]["balance"] == 5

        def rpc(method: str, **params: Any) -> Any:
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return client.post(f"{prefix}/mcp", json=body).json()["result"]

        sid = rpc("openenv/session/create")["session_id"]
        with connect(client, f"{prefix}/ws?session_id={sid}") as socket:
            socket.ask("reset", {})
        assert rpc("openenv/session/close", session_id=sid)["closed"] is True
        assert client.get(f"{prefix}/capabilities").json()["environment"] == "ledger"
        assert client.post(f"{prefix}/reset").json()["observation"]["balance"] == 0
        assert client.get(f"{prefix}/schema").json()["state"]["properties"]["entries"]
        assert upstream.active_sessions == 0


@pytest.mark.parametrize(("make", "prefix"), PLACES[:1])
def test_custom_routes_middleware_handlers_and_hooks_are_kept(make: str, prefix: str) -> None:
    applications.HOOKS.clear()
    app = adopt(getattr(applications, make)())
    with TestClient(app) as client:
        assert client.get("/hooks").json() == ["startup"]
        assert client.get("/hooks").headers["x-stamp"] == "ledger"
        assert client.get("/teapot").json() == {"told": "short and stout"}
        assert client.get("/ready").json() == "the application's own"
        documented = client.get("/openapi.json").json()
        assert documented["info"]["title"] == "OpenEnv Environment HTTP API"
        assert {"/hooks", "/reset", "/mcp", "/episodes/{eid}/states/{t}"} <= set(documented["paths"])
    assert applications.HOOKS == ["startup", "shutdown"]


def test_what_stands_before_an_applications_routes_stands_before_ours() -> None:
    applications.HOOKS.clear()
    app = adopt(applications.by_hand())
    key = {"x-key": "sesame"}
    with TestClient(app) as client:
        assert applications.HOOKS == ["lifespan"]
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws"):
            pass
        for path in ("/episodes", "/capabilities", "/rest/of/it"):
            assert client.get(path).status_code == 403, path
            assert client.get(path, headers=key).status_code == 200, path
        create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
        assert client.post("/mcp", json=create).status_code == 403
        sid = client.post("/mcp", json=create, headers=key).json()["result"]["session_id"]
        with client.websocket_connect(f"/ws?session_id={sid}", headers=key) as socket:
            socket.send_text('{"type":"reset"}')
            assert socket.receive_json()["data"]["observation"]["balance"] == 0
        assert len(client.get("/episodes", headers=key).json()["episodes"]) == 1
        assert client.get("/rest/of/it", headers=key).json() == {"rest": "rest/of/it"}
        assert client.get("/openapi.json", headers=key).json()["info"]["title"] == "By hand"
    assert applications.HOOKS == ["lifespan", "environment closed", "lifespan over"]


def test_an_include_keeps_its_own_dependencies_and_prefix() -> None:
    inner = applications.by_hand()
    outer, middle = FastAPI(), APIRouter(prefix="/v1")
    middle.include_router(inner.router, prefix="/env")
    outer.include_router(middle)
    adopt(outer)
    with TestClient(outer) as client:
        assert client.get("/v1/env/episodes").status_code == 403
        assert client.get("/v1/env/episodes", headers={"x-key": "sesame"}).json()["episodes"] == []


def test_a_starlette_application_around_it_is_adopted_with_its_mount() -> None:
    app = adopt(Starlette(routes=[Mount("/env", applications.make())]))
    with TestClient(app) as client, connect(client, "/env/ws") as socket:
        assert socket.ask("reset", {})["t"] == 0
    assert is_ours(app)


def test_the_token_guards_an_adopted_application_with_its_own_routes() -> None:
    app = adopt(applications.make(), settings=Settings(token="secret"))  # type: ignore[arg-type]
    with TestClient(app) as client:
        assert client.get("/hooks").status_code == 401
        assert client.get("/hooks", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/episodes").status_code == 401


def test_production_mode_is_read_from_the_routes_and_has_no_replay() -> None:
    app = adopt(applications.production())
    with TestClient(app) as client:
        assert client.get("/episodes").status_code == 404
        assert client.post("/reset").status_code == 404
        assert client.get("/capabilities").json()["extensions"].keys() == {"error_markers", "labels", "mux"}
        with connect(client, told=False) as socket:
            socket.ask("reset", {})
            assert socket.ask("state", {"t": 0})["data"]["code"] == "VALIDATION_ERROR"
    with pytest.raises(InvalidRequest, match="made in production mode, not simulation"):
        adopt(applications.production(), mode="simulation")


def test_adopting_twice_or_adopting_ours_changes_nothing() -> None:
    once = adopt(applications.make())
    before = [id(route) for route in once.router.routes]
    assert adopt(once) is once
    assert [id(route) for route in once.router.routes] == before
    ours = create_app(LedgerEnvironment, LedgerAction, LedgerObservation)
    before = [id(route) for route in ours.router.routes]
    assert adopt(ours) is ours
    assert [id(route) for route in ours.router.routes] == before


def test_an_environment_at_the_root_is_served_under_its_name_too() -> None:
    with TestClient(adopt(applications.make())) as client, connect(client, "/ledger/ws") as socket:
        eid = socket.ask("reset", {})["eid"]
        assert client.get(f"/ledger/episodes/{eid}/states/0").status_code == 200
        assert client.get("/ledger/hooks").status_code == 200


def test_an_environment_served_at_two_paths_has_the_same_sessions_at_both() -> None:
    app = adopt(applications.twice())
    with TestClient(app) as client, connect(client, "/ws") as socket:
        eid = socket.ask("reset", {})["eid"]
        with connect(client, "/alias/ws") as other:
            other.ask("reset", {})
        assert client.get(f"/alias/episodes/{eid}/states/0").content == client.get(f"/episodes/{eid}/states/0").content
        assert len(client.get("/alias/episodes").json()["episodes"]) == 2


def test_an_application_without_an_environment_or_with_two_is_refused() -> None:
    plain = FastAPI()

    @plain.websocket("/ws")
    async def own(websocket: Any) -> None: ...

    with pytest.raises(InvalidRequest, match="has no OpenEnv session route"):
        adopt(plain)
    with pytest.raises(InvalidRequest, match=r"several environments \(ledger at /a, ledger at /b\)"):
        adopt(applications.two())


def test_an_application_that_serves_already_is_refused_and_untouched() -> None:
    app = applications.make()
    upstream = upstreams(app)
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
    with pytest.raises(InvalidRequest, match="has served requests already"):
        adopt(app)
    assert upstreams(app) is upstream


@pytest.mark.parametrize("prefix", ["", "/name"])
def test_the_web_interface_of_an_adopted_application_drives_our_session(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    app = adopt(upstream_create_app(LedgerEnvironment, LedgerAction, LedgerObservation, env_name="ledger"))
    outer = FastAPI()
    outer.mount("/name", app)
    with TestClient(outer if prefix else app) as client:
        assert client.get(f"{prefix}/", follow_redirects=False).headers["location"] == f"{prefix}/web/"
        client.post(f"{prefix}/web/reset")
        stepped = client.post(f"{prefix}/web/step", json={"action": {"amount": 3}})
        assert stepped.json()["observation"]["balance"] == 3
        (episode,) = client.get(f"{prefix}/episodes").json()["episodes"]
        assert episode["deliveries"] == 2
