"""Episodes, exact payloads, fork and attach over HTTP (PROTOCOL A3, A5, C1, F2, G)."""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server.types import ConcurrencyConfig
from pydantic import SecretStr
from starlette.websockets import WebSocketDisconnect

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_server.app import create_fastapi_app
from errata_server.app.multi_environment import compose
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation, PinnedEnvironment


@pytest.fixture
def eid(client: TestClient) -> str:
    """An episode of four deliveries whose socket is closed."""
    with connect(client) as socket:
        made: str = socket.ask("reset", {"episode_id": "mine"})["eid"]
        for n in (1, 2, 3):
            socket.ask("step", {"n": n})
    return made


def test_a_state_is_the_whole_body_with_its_digest_as_etag_after_close(client: TestClient, eid: str) -> None:
    found = client.get(f"/episodes/{eid}/states/2")
    assert json.loads(found.content)["observation"]["n"] == 3
    assert found.headers["etag"] == f'"sha256:{hashlib.sha256(found.content).hexdigest()}"'
    assert found.headers["x-errata-t"] == "2" and found.headers["x-errata-kind"] == "step"
    assert client.get(f"/episodes/{eid}/states/2", headers={"If-None-Match": found.headers["etag"]}).status_code == 304


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/episodes/{eid}/states/4", 404, "T_OUT_OF_RANGE"),
        ("/episodes/{eid}/states/-1", 422, "VALIDATION_ERROR"),
        ("/episodes/{eid}/states/x", 422, "VALIDATION_ERROR"),
        ("/episodes/{eid}/states/99999999999999999999", 422, "VALIDATION_ERROR"),
        ("/episodes/ep_none/states/0", 404, "UNKNOWN_EPISODE"),
        ("/episodes/ep_none", 404, "UNKNOWN_EPISODE"),
    ],
)
def test_a_wrong_address_is_told_why(client: TestClient, eid: str, path: str, status: int, code: str) -> None:
    answer = client.get(path.format(eid=eid))
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_episodes_are_listed_with_alias_and_without_session_ids(client: TestClient, eid: str) -> None:
    page = client.get("/episodes").json()
    assert [e["eid"] for e in page["episodes"]] == [eid] and page["next"] is None
    listed = page["episodes"][0]
    assert listed["episode_id"] == "mine" and listed["deliveries"] == 4 and listed["reward"] == 3.0
    assert len(listed["session"]) == 12
    detail = client.get(f"/episodes/{eid}").json()
    assert [t["kind"] for t in detail["turns"]] == ["reset", "step", "step", "step"]
    state = client.get(f"/episodes/{eid}/states/3")
    assert detail["turns"][3]["digest"] == state.headers["etag"].strip('"')
    assert client.get("/episodes", params={"error_kind": "timeout"}).json()["episodes"] == []


def test_a_fork_stands_where_the_parent_stood_and_leaves_it_alone(client: TestClient) -> None:
    with connect(client) as parent:
        eid = parent.ask("reset", {})["eid"]
        for n in (1, 2, 3):
            parent.ask("step", {"n": n})
        made = client.post(f"/episodes/{eid}/fork", json={"t": 2, "request_id": "r1"}).json()
        assert made["origin"] == {"eid": eid, "t": 2} and made["t"] == 0 and made["eid"] != eid
        with connect(client, f"/ws?session_id={made['session_id']}") as child:
            told = child.ask("capabilities")["data"]["session"]
            assert told == {name: made[name] for name in ("session_id", "eid", "read_key")} | {"t": 0, "first": 0}
            state = child.ask("state")["data"]
            assert state["step_count"] == 0 and state["episode_id"] not in (None, made["eid"], eid)
            assert child.ask("state", {"t": 0})["digest"] == parent.ask("state", {"t": 2})["digest"]
            stepped = child.ask("step", {"n": 100})
            assert stepped["t"] == 1 and stepped["data"]["observation"]["n"] == 103
        assert parent.ask("step", {"n": 4})["data"]["observation"]["n"] == 10
    assert client.get(f"/episodes/{made['eid']}").json()["origin"] == {"eid": eid, "t": 2}


def test_a_repeated_fork_request_names_the_same_child(client: TestClient, eid: str) -> None:
    body = {"t": 1, "request_id": "r1"}
    first = client.post(f"/episodes/{eid}/fork", json=body)
    assert client.post(f"/episodes/{eid}/fork", json=body).json() == first.json()
    other = client.post(f"/episodes/{eid}/fork", json={"t": 2, "request_id": "r1"})
    assert (other.status_code, other.json()["code"]) == (409, "CONFLICT")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"t": 9, "request_id": "r"}, 404, "T_OUT_OF_RANGE"),
        ({"t": 1}, 422, "VALIDATION_ERROR"),
        ({"t": "1", "request_id": "r"}, 422, "VALIDATION_ERROR"),
        ({"t": 1, "request_id": ""}, 422, "VALIDATION_ERROR"),
        ({"t": 1, "request_id": "r", "x": 1}, 422, "VALIDATION_ERROR"),
        ([1], 422, "VALIDATION_ERROR"),
    ],
)
def test_a_wrong_fork_request_is_told_why(client: TestClient, eid: str, body: object, status: int, code: str) -> None:
    answer = client.post(f"/episodes/{eid}/fork", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_a_forked_episode_can_be_forked_again(client: TestClient, eid: str) -> None:
    first = client.post(f"/episodes/{eid}/fork", json={"t": 1, "request_id": "r1"}).json()
    second = client.post(f"/episodes/{first['eid']}/fork", json={"t": 0, "request_id": "r1"}).json()
    with connect(client, f"/ws?session_id={second['session_id']}") as socket:
        assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 2


def test_a_given_out_session_outlives_its_socket_and_an_ungiven_one_does_not(client: TestClient) -> None:
    created = client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}).json()
    sid = created["result"]["session_id"]
    for total in (1, 2, 3):
        with connect(client, f"/ws?session_id={sid}") as socket:
            if total == 1:
                socket.ask("reset", {})
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == total
    with connect(client, f"/ws?session_id={sid}") as socket:
        socket.ws.send_text('{"type":"close"}')  # upstream: an attached socket only leaves
    close = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": {"session_id": sid}}
    assert client.post("/mcp", json=close).json()["result"] == {"session_id": sid, "closed": True}
    with client.websocket_connect(f"/ws?session_id={sid}") as ws:
        assert json.loads(ws.receive_text())["data"]["code"] == "SESSION_ERROR"


def test_closing_a_session_by_rpc_waits_for_its_socket_to_leave(client: TestClient) -> None:
    created = client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}).json()
    sid = created["result"]["session_id"]
    close = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": {"session_id": sid}}
    with connect(client, f"/ws?session_id={sid}") as socket:
        assert client.post("/mcp", json=close).json()["result"]["closing"] is True
        socket.ask("reset", {})
    with client.websocket_connect(f"/ws?session_id={sid}") as ws:
        assert json.loads(ws.receive_text())["data"]["code"] == "SESSION_ERROR"


def test_a_session_id_asked_for_on_its_socket_makes_it_outlive_the_socket(client: TestClient) -> None:
    with connect(client) as socket:
        socket.ask("reset", {})
        answer = socket.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"})
        sid = answer["data"]["result"]["session_id"]
        socket.ask("step", {"n": 4})
    with connect(client, f"/ws?session_id={sid}") as socket:
        assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 5


def test_a_session_has_one_socket_at_a_time(client: TestClient) -> None:
    created = client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}).json()
    path = f"/ws?session_id={created['result']['session_id']}"
    with connect(client, path), client.websocket_connect(path) as second:
        refused = json.loads(second.receive_text())["data"]
        assert refused["code"] == "SESSION_ERROR" and "already has an attached WebSocket" in refused["message"]


def test_detached_sessions_make_room_before_anyone_is_refused() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=1)
    with TestClient(app) as client:
        created = client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}).json()
        path = f"/ws?session_id={created['result']['session_id']}"
        with connect(client, path) as socket:
            socket.ask("reset", {})
            socket.ask("step", {"n": 3})
        with connect(client) as socket:
            socket.ask("reset", {})
        with connect(client, path) as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 4


def test_a_detached_session_that_cannot_sleep_is_lost_before_anyone_is_refused() -> None:
    app = create_fastapi_app(PinnedEnvironment, CountAction, CountObservation, max_concurrent_envs=1)
    with TestClient(app) as client:
        created = client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}).json()
        path = f"/ws?session_id={created['result']['session_id']}"
        with client.websocket_connect("/ws") as ws:  # never attached: as upstream, it is not evicted
            assert json.loads(ws.receive_text())["data"]["code"] == "CAPACITY_REACHED"
        with connect(client, path) as socket:
            socket.ask("reset", {})
        with connect(client) as socket:
            assert socket.ask("reset", {})["t"] == 0
        with client.websocket_connect(path) as ws:
            assert json.loads(ws.receive_text())["data"]["code"] == "SESSION_LOST"


def test_an_idle_session_without_socket_ends_after_upstreams_session_timeout() -> None:
    config = ConcurrencyConfig(max_concurrent_envs=2, session_timeout=0.01)
    app = create_fastapi_app(PinnedEnvironment, CountAction, CountObservation, concurrency_config=config)
    with TestClient(app) as client:
        created = client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}).json()
        deadline = time.monotonic() + 60
        while app.state.errata.sessions.capacity.used and time.monotonic() < deadline:
            client.get("/ready")
        with client.websocket_connect(f"/ws?session_id={created['result']['session_id']}") as ws:
            assert json.loads(ws.receive_text())["data"]["code"] == "SESSION_ERROR"


def test_a_detached_session_is_hibernated_and_wakes_where_it_stood() -> None:
    settings = Settings(detach_ttl_s=0)
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, max_concurrent_envs=4, runtime=simulated(settings)
    )
    with TestClient(app) as client:
        created = client.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}).json()
        path = f"/ws?session_id={created['result']['session_id']}"
        with connect(client, path) as socket:
            socket.ask("reset", {})
            socket.ask("step", {"n": 3})
        client.get("/ready")  # the loop runs on; with a ttl of 0 the session is hibernated by now
        assert app.state.errata.sessions.capacity.used == 0
        with connect(client, path) as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 4


def test_deleting_an_episode_forgets_it(client: TestClient, eid: str) -> None:
    assert client.delete(f"/episodes/{eid}").json() == {"eid": eid, "deleted": 4}
    assert client.get(f"/episodes/{eid}").status_code == 404


def test_a_token_guards_every_door() -> None:
    settings = Settings(token=SecretStr("s3cret"))
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, runtime=simulated(settings), max_concurrent_envs=4
    )
    good = {"Authorization": "Bearer s3cret"}
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/episodes").status_code == 401
        assert client.get("/episodes", headers={"Authorization": "Bearer wrong"}).json()["code"] == "UNAUTHORIZED"
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws"):
            pass
        with client.websocket_connect("/ws", headers=good) as ws:
            ws.send_text('{"type":"reset","data":{}}')
            assert json.loads(ws.receive_text())["type"] == "observation"
        assert len(client.get("/episodes", headers=good).json()["episodes"]) == 1


def test_a_name_rebound_to_this_machine_cannot_use_a_local_server() -> None:
    settings = Settings(allowed_hosts=("localhost", "::1"))
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, runtime=simulated(settings))
    with TestClient(app) as client:
        for host, status in (("localhost:8000", 200), ("[::1]:8000", 200), ("evil.example:8000", 403), ("", 403)):
            assert client.get("/episodes", headers={"Host": host}).status_code == status
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws", headers={"Host": "evil.example"}):
            pass


def test_a_page_of_another_origin_cannot_use_a_local_server(client: TestClient) -> None:
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/ws", headers={"Origin": "http://evil"}),
    ):
        pass
    assert client.get("/episodes", headers={"Origin": "http://evil"}).status_code == 403
    assert client.get("/episodes", headers={"Origin": "http://testserver"}).status_code == 200


def test_every_door_answers_a_capability_probe_alike(app: FastAPI) -> None:
    """Plain sockets add where their session stands, and nothing else."""
    fields = {"protocol", "environment", "extensions", "recovery", "agent_text_version", "limits"}
    with TestClient(app) as client:
        over_http = client.get("/capabilities").json()
        assert over_http.keys() == fields
        with connect(client, told=False) as plain:
            plain.ask("reset")
            on_plain = plain.ask("capabilities")["data"]
        position = on_plain.pop("session")
        assert (position["session_id"], position["t"]) == (None, 0) and position["eid"].startswith("ep_")
        with client.websocket_connect("/ws", subprotocols=[PROTOCOL_NAME]) as mux:
            mux.send_text(json.dumps({"type": "open", "sid": "a" * 22, "data": {"key": "k" * 32}}))
            opened = json.loads(mux.receive_text())
            assert opened["type"] == "opened", opened
            mux.send_text(json.dumps({"type": "capabilities", "sid": "a" * 22, "q": 1}))
            on_mux = json.loads(mux.receive_text())["data"]
        assert on_plain == over_http == on_mux
        assert opened["data"]["recovery"] == on_plain["recovery"]
        composed = compose({"count": app}, app.state.errata.runtime, replayable=True)
        assert TestClient(composed).get("/capabilities").json() == {"environments": {"count": over_http}}


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that reader threads were given, in their order."""
    taken: list[str] = []
    submit = ThreadPoolExecutor.submit

    def counted(pool: ThreadPoolExecutor, function: Any, /, *args: Any, **more: Any) -> Any:
        if pool._thread_name_prefix == "errata-read":
            taken.append(getattr(function, "__qualname__", repr(function)))
        return submit(pool, function, *args, **more)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    return taken


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/episodes/{eid}/states/1", 200),
        ("/episodes/{eid}/states/9", 404),
        ("/episodes/ep_none/states/0", 404),
        ("/episodes/{eid}", 200),
        ("/episodes/{eid}/rewards", 200),
    ],
)
def test_a_read_of_an_episode_makes_one_trip_to_the_reader_threads(
    tmp_path: Path, trips: list[str], path: str, status: int
) -> None:
    runtime = Runtime(Settings(data_dir=tmp_path, sandbox="fake"))
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, runtime=runtime)
    with TestClient(app) as client:
        with connect(client) as socket:
            eid = socket.ask("reset")["eid"]
            socket.ask("step", {"n": 1})
        trips.clear()
        assert client.get(path.format(eid=eid)).status_code == status
        assert len(trips) == 1, trips
