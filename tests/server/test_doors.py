"""The doors of an OpenEnv server: WS and POST /mcp, mounts by name, several environments, principals, metrics."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from fastmcp import FastMCP
from openenv.core.env_server.http_server import HTTPEnvServer as UpstreamServer
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
from starlette.websockets import WebSocketDisconnect

from errata_protocol.errors import InvalidRequest
from errata_server.app import HTTPEnvServer, create_app, create_fastapi_app
from errata_server.app.multi_environment import compose
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation, PinnedEnvironment


class ToolEnvironment(MCPEnvironment):
    """Adds numbers and counts how often; a tool that fails."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    open_transports = 0

    def __init__(self) -> None:
        server: FastMCP[Any] = FastMCP("tools")
        calls = 0

        @server.tool
        def add(a: int, b: int) -> int:
            nonlocal calls
            calls += 1
            return a + b

        @server.tool
        def calls_so_far() -> int:
            return calls

        @server.tool
        def explode() -> str:
            raise ValueError("boom")

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools")

    @property
    def state(self) -> State:
        return State(episode_id="tools", step_count=0)


class UnopenableEnvironment(ToolEnvironment):
    """Its MCP transport cannot be opened."""

    def mcp_session(self) -> Any:
        raise ConnectionError("no transport")


@pytest.fixture(autouse=True)
def no_session_code_of_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make upstream's own session methods raise: what passes here passes on ours."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("upstream's session code ran")

    for name in ("_create_session", "_destroy_session", "_cleanup_session_resources", "_run_in_session_executor"):
        monkeypatch.setattr(UpstreamServer, name, refuse)


def tool_app(**more: Any) -> FastAPI:
    return create_fastapi_app(
        ToolEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=4, env_name="tools", **more
    )


@pytest.fixture
def tools() -> Iterator[TestClient]:
    with TestClient(tool_app()) as made:
        yield made


def rpc(method: str, id_: int = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id_, "method": method, "params": params}


def call(name: str, id_: int = 1, session_id: str | None = None, **arguments: Any) -> dict[str, Any]:
    more = {"session_id": session_id} if session_id else {}
    return rpc("tools/call", id_, name=name, arguments=arguments, **more)


# -- MCP --------------------------------------------------------------------------------------------------------------


def test_a_socket_on_mcp_is_a_session_whose_tool_calls_are_journaled(tools: TestClient) -> None:
    with tools.websocket_connect("/mcp") as ws:
        ws.send_text(json.dumps(rpc("tools/list")))
        assert {t["name"] for t in json.loads(ws.receive_text())["result"]["tools"]} == {
            "add",
            "calls_so_far",
            "explode",
        }
        exact = []
        for n in range(3):
            ws.send_text(json.dumps(call("add", n, a=n, b=1)))
            exact.append(ws.receive_text())
        ws.send_text(json.dumps(call("calls_so_far", 9)))
        assert json.loads(ws.receive_text())["result"]["data"] == 3
    (episode,) = tools.get("/episodes").json()["episodes"]
    assert episode["deliveries"] == 4
    assert [tools.get(f"/episodes/{episode['eid']}/states/{t}").text for t in (1, 2, 3)] == exact
    assert tools.get(f"/episodes/{episode['eid']}/states/0").json()["code"] == "NO_RESET"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", -32700),
        ("[1]", -32600),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "method": "x"}', -32700),
        ('{"jsonrpc": "2.0", "id": 1, "method": "nothing/such", "params": {}}', -32601),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": [1]}', -32600),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 7}}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": [1]}}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": {}}', -32602),
        ('{"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": {"session_id": "x"}}', -32602),
    ],
)
def test_bad_input_on_mcp_gets_a_json_rpc_error_and_the_session_lives(tools: TestClient, text: str, code: int) -> None:
    assert tools.post("/mcp", content=text).json()["error"]["code"] == code
    with tools.websocket_connect("/mcp") as ws:
        ws.send_text(json.dumps(call("add", a=1, b=1)))
        ws.receive_text()
        ws.send_text(text)
        assert json.loads(ws.receive_text())["error"]["code"] == code
        ws.send_text(json.dumps(call("calls_so_far")))
        assert json.loads(ws.receive_text())["result"]["data"] == 1


def test_a_tool_that_raises_is_an_error_response_and_a_delivery(tools: TestClient) -> None:
    with tools.websocket_connect("/mcp") as ws:
        ws.send_text(json.dumps(call("explode")))
        assert "boom" in json.loads(ws.receive_text())["error"]["message"]
    assert tools.get("/episodes").json()["episodes"][0]["deliveries"] == 1


def test_a_body_over_the_limit_is_refused_before_it_is_held() -> None:
    with TestClient(tool_app(runtime=simulated(Settings(max_frame=1000)))) as client:
        assert client.post("/mcp", content=b" " * 1001).json()["error"]["code"] == -32700


def test_a_call_without_a_session_is_no_delivery(tools: TestClient) -> None:
    assert tools.post("/mcp", json=call("add", a=2, b=3)).json()["result"]["data"] == 5
    assert tools.post("/mcp", json=call("calls_so_far")).json()["result"]["data"] == 0
    assert tools.get("/episodes").json()["episodes"] == []


def test_a_session_whose_mcp_transport_fails_leaves_nothing_behind() -> None:
    app = create_fastapi_app(UnopenableEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=1)
    with TestClient(app) as client:
        for _ in range(3):
            answer = client.post("/mcp", json=rpc("openenv/session/create")).json()
            assert "no transport" in answer["error"]["message"]
        assert app.state.errata.active_sessions == 0
        assert app.state.errata.get_capacity_status().active_sessions == 0


def test_idle_timers_end_with_the_server(tools: TestClient) -> None:
    """Upstream cancels its reaper; ours is a timer a session, and none may fire after the end."""
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=2)
    server: HTTPEnvServer = app.state.errata
    with TestClient(app) as client:
        sid = client.post("/mcp", json=rpc("openenv/session/create")).json()["result"]["session_id"]
        session = server.sessions.table.get(sid)
        assert session is not None
        timers = list(session.timers)
        assert timers and not any(timer.cancelled() for timer in timers)
    assert all(timer.cancelled() for timer in timers)


# -- stateless calls --------------------------------------------------------------------------------------------------


def test_stateless_calls_keep_an_environment_on_one_thread() -> None:
    """A sqlite3 connection made by the factory is used by reset: upstream calls them on two threads, and fails."""
    app = create_fastapi_app(PinnedEnvironment, CountAction, CountObservation)
    with TestClient(app) as client:
        assert client.post("/reset", json={}).status_code == 200
        assert client.post("/step", json={"action": {"n": 2}}).json()["observation"]["n"] == 2
        assert client.get("/state").status_code == 200
        assert client.get("/metadata").json()["name"]
        assert client.post("/step", json={"action": {"n": "x"}}).status_code == 422
        assert client.get("/episodes").json()["episodes"] == []
    assert app.state.errata.active_sessions == 0


# -- names and mounts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/count", "/count/count"])
def test_an_environment_is_served_at_the_root_and_under_its_name(prefix: str) -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=2)
    with TestClient(app) as client:
        with connect(client, f"{prefix}/ws") as socket:
            assert socket.ask("capabilities")["data"]["environment"] == "count"
            assert socket.ask("reset", {})["t"] == 0
        for path in ("/health", "/ready", "/schema", "/metadata", "/capabilities", "/episodes", "/openapi.json"):
            assert client.get(prefix + path).status_code == 200, path
        assert client.get(f"{prefix}/count/splits").status_code == 501


@pytest.mark.parametrize("made", [create_app, create_fastapi_app, "web"])
@pytest.mark.parametrize("prefix", ["", "/count", "/elsewhere"])
def test_every_way_to_make_an_app_answers_capabilities_at_the_root_and_mounted(
    made: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if made == "web":
        monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
        made = create_app
    app = made(CountEnvironment, CountAction, CountObservation, env_name="count", runtime=simulated())
    outer = FastAPI()
    outer.mount("/elsewhere", app)
    client = TestClient(outer if prefix == "/elsewhere" else app)
    with connect(client, f"{prefix}/ws", told=False) as socket:
        told = socket.ask("capabilities")
    assert told["type"] == "capabilities" and told["data"]["environment"] == "count"
    assert client.get(f"{prefix}/capabilities").json()["environment"] == "count"


def test_an_app_mounted_by_somebody_else_works_without_its_lifespan() -> None:
    inner = create_fastapi_app(CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=2)
    outer = FastAPI()
    outer.mount("/some/where", inner)
    with TestClient(outer) as client:
        with connect(client, "/some/where/ws") as socket:
            eid = socket.ask("reset", {})["eid"]
            assert socket.ask("step", {"n": 3})["data"]["observation"]["n"] == 3
        assert client.get(f"/some/where/episodes/{eid}/states/1").json()["observation"]["n"] == 3


def two(settings: Settings | None = None, **more: Any) -> FastAPI:
    runtime = Runtime(settings or Settings())
    apps = {
        "count": create_fastapi_app(
            CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=2, runtime=runtime
        ),
        "tools": tool_app(runtime=runtime),
    }
    return compose(apps, runtime, replayable=True, **more)


def test_several_environments_share_what_the_root_serves() -> None:
    with TestClient(two()) as client:
        with connect(client, "/count/ws") as socket:
            eid = socket.ask("reset", {})["eid"]
        client.post("/tools/mcp", json=call("add", a=1, b=1))
        assert client.get("/list_environments").json() == ["count", "tools"]
        assert set(client.get("/capabilities").json()["environments"]) == {"count", "tools"}
        assert client.get("/health").json() == {"status": "healthy"}
        assert client.get("/ready").status_code == 200
        assert [e["eid"] for e in client.get("/episodes").json()["episodes"]] == [eid]
        assert client.get(f"/episodes/{eid}/states/0").content == client.get(f"/count/episodes/{eid}/states/0").content
        assert client.get("/count/capabilities").json()["environment"] == "count"
        assert client.get("/Count/splits").status_code == 501  # routed to its environment, which has no tasks
        assert client.post("/count/tasks", json={"split": "train"}).status_code == 501
        assert client.get("/nothing/splits").status_code == 404
        index = client.get("/").json()
        assert index["environments"] == {"count": "/count", "tools": "/tools"} and index["web"] == {}
        assert client.get("/web").status_code == 404
        with client.websocket_connect("/ws") as ws:
            assert "/count/ws" in json.loads(ws.receive_text())["data"]["message"]
        assert [e["eid"] for e in client.get("/count/episodes").json()["episodes"]] == [eid]
        assert client.get("/tools/episodes").json()["episodes"] == []


@pytest.mark.parametrize("above", ["", "/elsewhere"])
def test_several_environments_with_web_pages_list_them_at_web_and_to_browsers_at_the_root(
    above: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    runtime = simulated()
    made = {
        name: create_app(CountEnvironment, CountAction, CountObservation, env_name=name, runtime=runtime)
        for name in ("count", "other")
    }
    root = compose(made, runtime, replayable=True)
    outer = FastAPI()
    outer.mount("/elsewhere", root)
    client = TestClient(outer if above else root)
    for path in ("/web", "/web/", "/"):
        page = client.get(f"{above}{path}", headers={"accept": "text/html,*/*"})
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        links = re.findall('href="([^"]+)"', page.text)
        assert f"{above}/count/web/" in links and f"{above}/other/web/" in links
        for link in links:
            assert client.get(link).status_code == 200, link
    told = client.get(f"{above}/").json()
    assert told["environments"] == {"count": f"{above}/count", "other": f"{above}/other"}
    assert told["web"]["other"] == f"{above}/other/web/"


@pytest.mark.parametrize("names", [("a/b",), ("metrics",), ("one", "ONE")])
def test_names_that_cannot_be_paths_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        compose({name: FastAPI() for name in names}, Runtime(Settings()), replayable=True)


# -- who may -----------------------------------------------------------------------------------------------------------


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_what_belongs_to_another_principal_is_not_found_just_like_what_never_was() -> None:
    app = create_fastapi_app(
        CountEnvironment,
        CountAction,
        CountObservation,
        max_concurrent_envs=4,
        runtime=simulated(Settings(token="alice-token,bob-token")),  # type: ignore[arg-type]
    )
    with TestClient(app) as client:
        sid = client.post("/mcp", json=rpc("openenv/session/create"), headers=bearer("alice-token")).json()
        sid = sid["result"]["session_id"]
        with client.websocket_connect(f"/ws?session_id={sid}", headers=bearer("alice-token")) as ws:
            ws.send_text('{"type": "capabilities"}')
            ws.receive_text()
            ws.send_text('{"type": "reset"}')
            eid = json.loads(ws.receive_text())["eid"]
        unknown = "ep_" + "x" * (len(eid) - 3)
        paths = ["/episodes/{}", "/episodes/{}/states/0", "/episodes/{}/states/99"]
        for path in paths:
            foreign = client.get(path.format(eid), headers=bearer("bob-token"))
            missing = client.get(path.format(unknown), headers=bearer("bob-token"))
            assert (foreign.status_code, foreign.text.replace(eid, "E")) == (404, missing.text.replace(unknown, "E"))
        body = {"t": 0, "request_id": "r"}
        foreign = client.post(f"/episodes/{eid}/fork", json=body, headers=bearer("bob-token"))
        missing = client.post(f"/episodes/{unknown}/fork", json=body, headers=bearer("bob-token"))
        assert (foreign.status_code, foreign.text.replace(eid, "E")) == (404, missing.text.replace(unknown, "E"))
        assert client.delete(f"/episodes/{eid}", headers=bearer("bob-token")).status_code == 404
        assert client.get("/episodes", headers=bearer("bob-token")).json()["episodes"] == []
        answers = {}
        for name in (sid, "0" * 8 + sid[8:]):
            with client.websocket_connect(f"/ws?session_id={name}", headers=bearer("bob-token")) as ws:
                answers[name] = ws.receive_text().replace(name, "S")
            tool = client.post("/mcp", json=call("x", session_id=name), headers=bearer("bob-token"))
            answers[name] += tool.text.replace(name, "S")
        assert len(set(answers.values())) == 1
        assert len(client.get("/episodes", headers=bearer("alice-token")).json()["episodes"]) == 1
        assert client.get("/episodes", headers=bearer("carol")).status_code == 401


def outsider(app: FastAPI) -> TestClient:
    return TestClient(app, client=("192.0.2.7", 4000))


@pytest.mark.parametrize("made", [create_app, create_fastapi_app])
def test_under_plain_uvicorn_other_machines_need_a_token_or_the_operators_word(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = made(CountEnvironment, CountAction, CountObservation)
    assert outsider(app).get("/health").status_code == 403
    with pytest.raises(WebSocketDisconnect), outsider(app).websocket_connect("/ws"):
        pass
    monkeypatch.setenv("ERRATA_INSECURE", "1")
    assert outsider(made(CountEnvironment, CountAction, CountObservation)).get("/health").status_code == 200
    monkeypatch.delenv("ERRATA_INSECURE")
    monkeypatch.setenv("ERRATA_TOKEN", "secret-word")
    app = made(CountEnvironment, CountAction, CountObservation)
    assert outsider(app).get("/schema").status_code == 401
    assert outsider(app).get("/schema", headers=bearer("secret-word")).status_code == 200


def test_an_app_built_by_hand_is_guarded_too() -> None:
    app = FastAPI()
    HTTPEnvServer(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=2).register_routes(app)

    @app.get("/own")
    def own() -> str:
        return "kept"

    assert TestClient(app).get("/own").json() == "kept"
    assert outsider(app).get("/own").status_code == 403
    with connect(TestClient(app)) as socket:
        assert socket.ask("reset", {})["t"] == 0


def page(origin: str, host: str = "localhost:8000") -> dict[str, str]:
    return {"origin": origin, "host": host}


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        (page("http://localhost:8000"), True),
        (page("http://127.0.0.1:8000", "127.0.0.1:8000"), True),
        (page("http://evil.example"), False),
        (page("http://localhost:9999"), False),
        (page("null"), False),
        (page("http://evil.example:8000", "evil.example:8000"), False),  # a name rebound to 127.0.0.1
    ],
)
def test_a_page_of_another_origin_opens_no_socket_on_this_machine(headers: dict[str, str], allowed: bool) -> None:
    client = TestClient(create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=2))
    assert client.get("/health", headers=headers).status_code == (200 if allowed else 403)
    for path in ("/ws", "/mcp"):
        if allowed:
            with client.websocket_connect(path, headers=headers):
                continue
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(path, headers=headers):
            pass


def test_an_origin_can_be_allowed() -> None:
    settings = Settings(allowed_origins="https://lab.example, https://other.example")  # type: ignore[arg-type]
    client = TestClient(
        create_fastapi_app(CountEnvironment, CountAction, CountObservation, runtime=simulated(settings))
    )
    assert client.get("/health", headers=page("https://lab.example")).status_code == 200
    assert client.get("/health", headers=page("https://lab.example.evil")).status_code == 403


def test_a_browser_reaches_the_pages_with_the_token_as_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    runtime = simulated(Settings(token="secret-word"))  # type: ignore[arg-type]
    client = TestClient(create_app(CountEnvironment, CountAction, CountObservation, env_name="count", runtime=runtime))
    for path in ("/web/", "/count/web/"):
        asked = client.get(path)
        assert asked.status_code == 401
        assert any(value.startswith("Basic ") for value in asked.headers.get_list("www-authenticate"))
        assert client.get(path, auth=("anybody", "secret-word")).status_code == 200
        assert client.get(path, auth=("secret-word", "wrong")).status_code == 401
    assert "Basic" not in str(client.get("/schema").headers.get_list("www-authenticate"))
    assert client.get("/schema", headers={"authorization": "Basic !"}).status_code == 401


# -- figures ----------------------------------------------------------------------------------------------------------


def test_metrics_count_sessions_and_requests_by_kind_and_outcome(tmp_path: Path) -> None:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=4, data_dir=tmp_path
    )
    with TestClient(app) as client:
        with connect(client) as socket:
            socket.ask("reset", {})
            socket.ask("step", {"n": 1})
            socket.ask("step", {"n": 1, "do": "raise"})
            during = client.get("/metrics").text
        deadline = time.monotonic() + 60
        while 'how="closed"' not in (after := client.get("/metrics").text) and time.monotonic() < deadline:
            pass  # the socket's session closes after the socket
    assert 'errata_sessions_active{environment="count"} 1.0' in during
    assert 'errata_request_seconds_count{environment="count",kind="step",outcome="ok"} 1.0' in during
    assert 'errata_request_seconds_count{environment="count",kind="step",outcome="EXECUTION_ERROR"} 1.0' in during
    assert 'errata_sessions_active{environment="count"} 0.0' in after
    assert 'errata_sessions_ended_total{environment="count",how="closed"} 1.0' in after


# -- the web interface ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/pinned"])
@pytest.mark.parametrize("started", [True, False])
def test_the_web_interface_drives_one_of_our_sessions(
    prefix: str, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    app = create_app(PinnedEnvironment, CountAction, CountObservation, env_name="pinned")
    client = TestClient(app)
    with client if started else contextlib.nullcontext():
        landing = client.get(f"{prefix}/", follow_redirects=False)
        assert (landing.status_code, landing.headers["location"]) == (307, f"{prefix}/web/")
        assert "gradio" in client.get(f"{prefix}/web/").text
        assert client.post(f"{prefix}/web/reset").json()["observation"]["n"] == 0
        assert client.post(f"{prefix}/web/step", json={"action": {"n": 4}}).json()["observation"]["n"] == 4
        assert client.get(f"{prefix}/web/state").json()["step_count"] == 1
        assert client.post(f"{prefix}/web/step", json={"action": {"n": "x"}}).status_code == 422
        (episode,) = client.get(f"{prefix}/episodes").json()["episodes"]
        assert episode["deliveries"] == 2
        with connect(client, f"{prefix}/ws") as socket:  # the page's session takes no place
            assert socket.ask("capabilities")["data"]["environment"] == "pinned"
            assert socket.ask("reset", {})["t"] == 0


def test_the_web_interface_lists_the_tools_of_an_mcp_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    app = create_app(ToolEnvironment, CallToolAction, CallToolObservation, env_name="tools")
    with TestClient(app) as client:
        assert "explode" in client.get("/web/config").text
        client.post("/web/reset")
        action = {"type": "call_tool", "tool_name": "add", "arguments": '{"a": 1, "b": 2}'}
        assert client.post("/web/step", json={"action": action}).json()["observation"]["result"]["data"] == 3
