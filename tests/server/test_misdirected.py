"""What names another data directory is answered MISDIRECTED, at every door (PROTOCOL F5).

The doors are found: HTTP routes by their parameters, messages of the multiplexed socket by their golden bytes. A new
one that takes an id is covered, or fails here until it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import CODES
from errata_protocol.mux import ServerConfig, ServerProtocol
from errata_protocol.shards import named, shard_of
from errata_server.app import create_fastapi_app
from errata_server.runtime import shard_name

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation

GOLDEN = Path(__file__).parents[1] / "golden" / "mux"
SID, CHILD, EID = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "child0Zq3vK8s0T1u5Wb7Y", "e-5f0c"
"""Ids of the golden messages."""
OTHER = "0therserver0"
FOREIGN_SID = named(OTHER, "Zq3vK8s0T1u5Wb7Yc9Xd2A")
FOREIGN_EID = f"ep_{named(OTHER, 'y0rsiJrIWNUoEqRMxH0cEIVn')}"
NAMING = {"eid", "eids", "also", "session_id", "sid"}
"""Names of parameters that are ids."""
WITHOUT_ID = {"/episodes", "/episodes/aggregates", "/episodes/events", "/episodes/delete"}
"""Routes below /episodes whose path has no id; `BODIES` and their parameters have those that they take."""
BODIES: dict[str, Any] = {
    "/episodes/{eid}/fork": {"t": 0, "request_id": "r"},
    "/episodes/{eid}/rewards": {"t": 0, "value": 1.0, "source": "s", "reward_id": "r"},
    "/episodes/delete": {"eids": ["ep_unnamed", FOREIGN_EID]},
}


@pytest.fixture(params=["named", "unnamed"])
def shard(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return shard_name.draw(tmp_path) if request.param == "named" else None


@pytest.fixture
def app(shard: str | None, tmp_path: Path) -> FastAPI:
    names: dict[str, Any] = {"env_name": "CountEnvironment", "max_concurrent_envs": 8, "data_dir": tmp_path}
    return create_fastapi_app(CountEnvironment, CountAction, CountObservation, **names)


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as made:
        yield made


def is_misdirected(data: dict[str, Any]) -> bool:
    return data.get("code") == "MISDIRECTED" and data.get("shard") == OTHER and data.get("retry_after") == 1.0


def asked() -> list[tuple[str, str, str, str]]:
    """Return method, route and path of each request over HTTP that names another directory's episode or session."""
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=1)
    found = []
    for route in app.routes:
        if not isinstance(route, APIRoute):
            continue
        parameters = {field.alias for field in route.dependant.query_params} & NAMING
        if not route.path.startswith("/episodes"):
            assert not parameters and not any(f"{{{name}}}" in route.path for name in NAMING), route.path
            continue
        path = route.path.replace("{eid}", FOREIGN_EID).replace("{t}", "0")
        assert "{" not in path, f"{route.path}: what does its parameter name?"
        own = path.replace(FOREIGN_EID, "ep_unnamed")
        queries = [f"{own}?{name}={FOREIGN_EID}" for name in sorted(parameters)]
        for method in sorted(route.methods - {"HEAD"}):
            if "{eid}" in route.path or route.path == "/episodes/delete":
                found.append((method, route.path, path, json.dumps(BODIES.get(route.path))))
            found += [(method, route.path, query, json.dumps(BODIES.get(route.path))) for query in queries]
            assert "{eid}" in route.path or route.path in WITHOUT_ID, f"{route.path}: does it take an id?"
    return found


HTTP = asked()


def test_the_doors_are_found() -> None:
    assert len({path for _, path, _, _ in HTTP}) >= 10
    assert {("GET", "/episodes/events"), ("POST", "/episodes/delete"), ("DELETE", "/episodes/{eid}")} <= {
        (method, path) for method, path, _, _ in HTTP
    }
    assert any("also=" in path for _, _, path, _ in HTTP)


@pytest.mark.parametrize(("method", "route", "path", "body"), HTTP, ids=[f"{m} {p}" for m, _, p, _ in HTTP])
def test_each_route(client: TestClient, method: str, route: str, path: str, body: str) -> None:
    answer = client.request(method, path, content=body if method == "POST" else None)
    assert answer.status_code == 421 and is_misdirected(answer.json()), answer.text
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("method", ["tools/call", "tools/list", "openenv/session/close", "openenv/session/no_such"])
def test_mcp_over_http(client: TestClient, method: str) -> None:
    params = {"session_id": FOREIGN_SID, "name": "f", "arguments": {}}
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    error = client.post("/mcp", json=body).json()["error"]
    assert is_misdirected(error["data"]) and error["code"] == -32000, error


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_closing_a_session_on_the_socket_of_another(client: TestClient, path: str) -> None:
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": {"session_id": FOREIGN_SID}}
    with client.websocket_connect(path) as socket:
        socket.send_json(rpc if path == "/mcp" else {"type": "mcp", "data": rpc})
        answer = socket.receive_json()
    error = (answer if path == "/mcp" else answer["data"])["error"]
    assert is_misdirected(error["data"]), answer


def test_attaching_a_plain_socket(client: TestClient) -> None:
    with client.websocket_connect(f"/ws?session_id={FOREIGN_SID}") as socket:
        answer = socket.receive_json()
    assert answer["type"] == "error" and is_misdirected(answer["data"])


@pytest.mark.parametrize("once", [False, True], ids=["plain", "with a request_id"])
def test_requests_of_a_plain_socket(client: TestClient, once: bool) -> None:
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    sid = client.post("/mcp", json=create).json()["result"]["session_id"]
    with connect(client, f"/ws?session_id={sid}") as socket:
        socket.ask("reset")
        more = {"request_id": "r-1"} if once else {}
        place = {"injected_state": {"episode_id": FOREIGN_EID, "t": 0}}
        for answer in (socket.ask("reset", place, **more), socket.ask("state", {"t": 0, "eid": FOREIGN_EID})):
            assert answer["type"] == "error" and is_misdirected(answer["data"]), answer
        assert socket.ask("step", {"n": 2}, **more)["data"]["observation"]["n"] == 2  # nothing ran, the id is free


def renamed(value: Any, old: str, new: str) -> Any:
    return json.loads(json.dumps(value).replace(old, new))


MESSAGES = {path.stem.removeprefix("client."): json.loads(path.read_bytes()) for path in GOLDEN.glob("client.*.json")}
WITH_SID = {name: renamed(m, SID, FOREIGN_SID) for name, m in MESSAGES.items() if SID in json.dumps(m)}
WITH_SID |= {"Resume": renamed(MESSAGES["Resume"], CHILD, FOREIGN_SID)}
WITHOUT_SID = {"CapabilitiesRequest", "CloseGroup"}
"""Messages that name no session: a group ends where it is, and its name is the client's own."""


@pytest.mark.parametrize("own", [None, "myownserver0"])
@pytest.mark.parametrize("name", sorted(WITH_SID))
def test_each_message_with_a_sid(name: str, own: str | None) -> None:
    server = ServerProtocol(ServerConfig(shard=own))
    connection = server.connect()
    asked = server.receive(connection, json.dumps(WITH_SID[name]), 0.0)
    answer = json.loads(connection.data_to_send()[0])
    assert answer["type"] == "error" and is_misdirected(answer["data"]) and answer["sid"] == FOREIGN_SID, answer
    numbers = {key: WITH_SID[name][key] for key in ("id", "q") if key in WITH_SID[name]}
    assert {key: answer[key] for key in ("id", "q") if key in answer} == numbers
    assert not any(type(effect).__name__ == "FindSession" for effect in asked), "nothing is looked up"


def test_each_message_is_one_of_them() -> None:
    assert set(MESSAGES) == set(WITH_SID) | WITHOUT_SID


@pytest.mark.parametrize("own", [None, "myownserver0"])
def test_sessions_of_a_resume_are_answered_each(own: str | None) -> None:
    server = ServerProtocol(ServerConfig(shard=own))
    connection = server.connect()
    entries = [{"sid": sid, "key": "k" * 22} for sid in (SID, FOREIGN_SID, named("myownserver0", SID))]
    effects = server.receive(connection, json.dumps({"type": "resume", "data": entries}), 0.0)
    found = [effect.session.sid for effect in effects if type(effect).__name__ == "FindSession"]
    assert found == [SID] + ([entries[2]["sid"]] if own else [])
    told = [one for frame in connection.data_to_send() for one in listed(json.loads(frame))]
    assert [one["sid"] for one in told] == [FOREIGN_SID] + ([] if own else [entries[2]["sid"]])
    assert {one["data"]["code"] for one in told} == {"MISDIRECTED"}


def listed(frame: Any) -> list[Any]:
    return frame if isinstance(frame, list) else [frame]


def mux_requests() -> dict[str, dict[str, Any]]:
    """Return the messages that name an episode or a child, with those of another directory."""
    found = {name: renamed(m, EID, FOREIGN_EID) for name, m in MESSAGES.items() if EID in json.dumps(m.get("data"))}
    fork = MESSAGES["Fork"]
    state = {**MESSAGES["State"], "data": {"t": 0, "eid": FOREIGN_EID}}
    reset = {**MESSAGES["Reset"], "data": {"injected_state": {"episode_id": FOREIGN_EID, "t": 0}}}
    of_other = {**fork, "data": {**fork["data"], "t": 0, "eid": FOREIGN_EID}}
    return found | {
        "State": state,
        "Reset": reset,
        "Fork": of_other,
        "Fork of a child": renamed({**fork, "data": {**fork["data"], "t": 0}}, CHILD, FOREIGN_SID),
    }


def test_each_message_with_an_eid(client: TestClient) -> None:
    with client.websocket_connect("/ws", subprotocols=[PROTOCOL_NAME]) as socket:

        def ask(message: dict[str, Any]) -> dict[str, Any]:
            socket.send_json(message)
            return dict(socket.receive_json())

        assert ask({**MESSAGES["Open"], "sid": SID})["type"] == "opened"
        assert ask({"sid": SID, "id": 1, "type": "reset", "data": {}})["type"] == "observation"
        for name, message in mux_requests().items():
            number = {"q": 7} if "q" in message else {"id": 2}
            message = {k: v for k, v in message.items() if k not in ("id", "q", "if", "labels")} | number | {"sid": SID}
            answer = ask(message)
            assert answer["type"] == "error" and is_misdirected(answer["data"]), (name, answer)
            assert number.items() <= answer.items() and answer["data"].get("next_id", 2) == 2
        step = ask({"sid": SID, "id": 2, "type": "step", "data": {"n": 3}})
        assert step["data"]["observation"]["n"] == 3, "the id is free, and the session goes on"


def test_a_directory_finds_what_it_named_and_what_it_made_before(shard: str | None, client: TestClient) -> None:
    with connect(client) as socket:
        eid = socket.ask("reset")["eid"]
    assert shard_of(eid) == shard
    assert client.get(f"/episodes/{eid}/states/0").status_code == 200
    child = client.post(f"/episodes/{eid}/fork", json={"t": 0, "request_id": "r"}).json()
    assert shard_of(child["eid"]) == shard_of(child["session_id"]) == shard
    assert client.get("/episodes").json()["episodes"][0]["episode_id"].count("-") in (0, 4)  # the alias names nothing
    with connect(client, f"/ws?session_id={child['session_id']}") as socket:
        assert socket.ask("step", {"n": 2})["data"]["observation"]["n"] == 2
    unknown = client.get("/episodes/ep_of_nobody/states/0")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "UNKNOWN_EPISODE")


def test_capabilities_name_the_directory(shard: str | None, client: TestClient) -> None:
    told = client.get("/capabilities").json()
    assert told.get("shard") == shard and ("shard" in told) is (shard is not None)


def test_ids_of_before_the_name_stay_valid(tmp_path: Path) -> None:
    def serve() -> TestClient:
        names: dict[str, Any] = {"env_name": "CountEnvironment", "max_concurrent_envs": 8, "data_dir": tmp_path}
        return TestClient(create_fastapi_app(CountEnvironment, CountAction, CountObservation, **names))

    with serve() as client, connect(client) as socket:
        eid = socket.ask("reset")["eid"]
        child = client.post(f"/episodes/{eid}/fork", json={"t": 0, "request_id": "r"}).json()
    shard = shard_name.draw(tmp_path)
    with serve() as client:
        assert client.get(f"/episodes/{eid}").status_code == 200
        with connect(client, f"/ws?session_id={child['session_id']}") as socket:
            assert socket.ask("step", {"n": 2})["data"]["observation"]["n"] == 2
            assert shard_of(socket.ask("reset")["eid"]) == shard


def test_the_code_gives_ids_back() -> None:
    info = CODES["MISDIRECTED"]
    assert (info.retryable, info.consumes_id, info.session_survives, info.http_status) == (True, False, True, 421)
