"""Whatever a door is sent: one answer with a code for each frame, and the session goes on where it stood.

``ERRATA_MUTATIONS`` sets how many mutations of valid frames each seeded run sends, 1,000 by default.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action
from pydantic import field_validator
from websockets.asyncio.client import connect as connect_websocket

from errata_protocol.episode_lists import EpisodeOrder, ListPlace
from errata_server.app import create_fastapi_app
from errata_server.doors.input_errors import MAX_ERRORS
from errata_server.process import ServerProcess
from errata_server.settings import Settings

from .asgi_peer import Peer
from .conftest import simulated
from .environments import CountAction, CountEnvironment, CountObservation
from .mutations import mutation
from .test_doors import ToolEnvironment

MUTATIONS = int(os.environ.get("ERRATA_MUTATIONS", "1000"))
DOORS = ("", "/count")


class TrickyAction(CountAction):
    """Its validators raise what a validator should not."""

    @field_validator("do")
    @classmethod
    def _raises(cls, do: str) -> str:
        match do:
            case "runtime":
                raise RuntimeError("the validator is broken")
            case "half":
                raise LookupError("\ud800")
            case "deep":
                raise RecursionError("too deep")
            case "exit":
                raise SystemExit(3)
        return do


class TrickyEnvironment(CountEnvironment):
    """Raises what has no UTF-8 form, and what would end a process."""

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> CountObservation:
        match getattr(action, "do", ""):
            case "raise half":
                raise ValueError("\ud800 is half")
            case "leave":
                raise SystemExit(4)
        return await super().step_async(action, timeout_s, **more)  # type: ignore[arg-type]


FRAMES: list[dict[str, Any]] = [
    {"type": "reset", "data": {"seed": 3, "episode_id": "e"}},
    {"type": "step", "data": {"n": 1, "do": "", "metadata": {"a": [1, 2.5, None]}}},
    {"type": "state"},
    {"type": "state", "data": {"t": 0, "eid": "ep_nobody"}},
    {"type": "state", "data": {"t": 0}},
    {"type": "capabilities"},
    {"type": "close"},
]
RPC: list[dict[str, Any]] = [
    {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}},
    {"jsonrpc": "2.0", "id": "a", "method": "tools/call", "params": {"name": "add", "arguments": {"a": 1, "b": 2}}},
    {"jsonrpc": "2.0", "id": 2, "method": "openenv/session/create", "params": {}},
    {"jsonrpc": "2.0", "id": 3, "method": "openenv/session/close", "params": {"session_id": "nobody's"}},
]

DEEP = '{"type":"step","data":' + '{"a":' * 2000 + "1" + "}" * 2001
BAD: dict[str, tuple[str | bytes, str]] = {
    "an array": ("[1]", "VALIDATION_ERROR"),
    "a binary frame": (b"\x00\xff\xfe", "INVALID_JSON"),
    "an empty frame": ("", "INVALID_JSON"),
    "an empty binary frame": (b"", "INVALID_JSON"),
    "NaN": ('{"type":"step","data":{"n":NaN}}', "INVALID_JSON"),
    "minus infinity": ('{"type":"step","data":{"n":-Infinity}}', "INVALID_JSON"),
    "beyond a double": ('{"type":"step","data":{"metadata":{"x":1e999}}}', "INVALID_JSON"),
    "beyond a double, long": ('{"type":"step","data":{"metadata":{"x":' + "9" * 250 + "e99}}}", "INVALID_JSON"),
    "digits beyond Python's limit": ('{"type":"step","data":{"n":' + "9" * 5000 + "}}", "INVALID_JSON"),
    "an unknown type": ('{"type":"nonsense"}', "UNKNOWN_TYPE"),
    "a very long type": ('{"type":"' + "x" * 2**20 + '"}', "UNKNOWN_TYPE"),
    "a type that is none": ('{"type":{"a":1}}', "UNKNOWN_TYPE"),
    "a wrong field type": ('{"type":"step","data":{"n":"x"}}', "VALIDATION_ERROR"),
    "a wrong field": ('{"type":"step","data":{"m":1}}', "VALIDATION_ERROR"),
    "data of another type": ('{"type":"step","data":[]}', "VALIDATION_ERROR"),
    "a key of the envelope too many": ('{"type":"step","data":{"n":1},"id":4}', "VALIDATION_ERROR"),
    "a validator that raises": ('{"type":"step","data":{"do":"runtime"}}', "VALIDATION_ERROR"),
    "a validator that raises half a pair": ('{"type":"step","data":{"do":"half"}}', "VALIDATION_ERROR"),
    "a validator that recurses": ('{"type":"step","data":{"do":"deep"}}', "VALIDATION_ERROR"),
    "a validator that exits": ('{"type":"step","data":{"do":"exit"}}', "VALIDATION_ERROR"),
    "an exception without UTF-8 form": ('{"type":"step","data":{"do":"raise half"}}', "EXECUTION_ERROR"),
    "an environment that exits": ('{"type":"step","data":{"do":"leave"}}', "EXECUTION_ERROR"),
    "20 MiB": ('{"type":"step","data":{"do":"' + "x" * (20 * 2**20) + '"}}', "FRAME_TOO_LARGE"),
    "20 MiB of binary": (b"\xff" * (20 * 2**20), "FRAME_TOO_LARGE"),
    "over the limit in UTF-8 only": ('{"type":"step","data":{"do":"' + "💥" * (5 * 2**20) + '"}}', "FRAME_TOO_LARGE"),
    "depth 2,000": (DEEP, "INVALID_JSON"),
    "depth 2,000 in arrays": ("[" * 2000 + "]" * 2000, "INVALID_JSON"),
    "duplicate keys": ('{"type":"step","data":{"n":1,"n":2}}', "INVALID_JSON"),
    "duplicate keys of the envelope": ('{"type":"step","type":"reset"}', "INVALID_JSON"),
    "a lone surrogate": ('{"type":"step","data":{"do":"\\ud800"}}', "VALIDATION_ERROR"),
    "surrogates the wrong way round": ('{"type":"step","data":{"do":"\\udc00\\ud800"}}', "VALIDATION_ERROR"),
    "a lone surrogate in a key": ('{"type":"step","data":{"\\uDBFF":1}}', "VALIDATION_ERROR"),
    "a lone surrogate as type": ('{"type":"\\ud800"}', "VALIDATION_ERROR"),
    "cut off": ('{"type":"step","data":{"n":1', "INVALID_JSON"),
    "two objects": ('{"type":"state"}{"type":"state"}', "INVALID_JSON"),
    "a byte order mark": ('\ufeff{"type":"state"}', "INVALID_JSON"),
}


def make_app() -> FastAPI:
    return create_fastapi_app(
        TrickyEnvironment,
        TrickyAction,
        CountObservation,
        env_name="count",
        max_concurrent_envs=64,
        runtime=simulated(Settings()),
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an ``errata serve`` process."""
    options = ("--action", f"{__name__}:TrickyAction", "--no-fsync")
    with ServerProcess(f"{__name__}:TrickyEnvironment", tmp_path_factory.mktemp("data"), *options) as server:
        yield server.url


def name_of_environment(url: str) -> str:
    return str(httpx.get(f"{url}/capabilities").json()["environment"])


# -- sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", BAD)
async def test_a_bad_frame_is_answered_with_its_code_and_the_session_goes_on(what: str, door: str) -> None:
    frame, code = BAD[what]
    async with Peer(make_app(), f"{door}/ws") as peer:
        await peer.ask({"type": "capabilities"})
        assert (await peer.ask({"type": "reset"}) or {})["t"] == 0
        answer = await peer.ask(frame) or {}
        assert (answer["type"], answer["data"]["code"]) == ("error", code) and answer["data"]["message"]
        assert len(json.dumps(answer)) < 20_000
        stepped = await peer.ask({"type": "step", "data": {"n": 5}}) or {}
        assert stepped["t"] == 1 and stepped["data"]["observation"]["n"] == 5
        assert peer.got.empty()


@pytest.mark.parametrize("mounted", [False, True])
async def test_bad_frames_one_after_the_other_in_one_session_of_a_real_server(serving: str, mounted: bool) -> None:
    base = serving.replace("http", "ws") + (f"/{name_of_environment(serving)}" if mounted else "")
    async with connect_websocket(f"{base}/ws", max_size=None) as ws:

        async def ask(frame: str | bytes) -> dict[str, Any]:
            await ws.send(frame)
            return dict(json.loads(await asyncio.wait_for(ws.recv(), 60)))

        await ask('{"type":"capabilities"}')
        eid = (await ask('{"type":"reset"}'))["eid"]
        for t, (what, (frame, code)) in enumerate(BAD.items(), 1):
            answer = await ask(frame)
            assert (answer["type"], answer["data"]["code"]) == ("error", code), what
            assert (await ask('{"type":"step","data":{"n":1}}'))["t"] == t, what
        detail = httpx.get(f"{serving}/episodes/{eid}").json()
    assert [turn["t"] for turn in detail["turns"]] == list(range(len(BAD) + 1))


async def test_many_wrong_fields_do_not_multiply_a_long_input() -> None:
    long = "x" * 10_000
    data = ",".join(f'"k{n}":"{long}"' for n in range(200))
    async with Peer(make_app()) as peer:
        answer = await peer.ask(f'{{"type":"step","data":{{{data}}}}}') or {}
        assert len(answer["data"]["errors"]) == MAX_ERRORS
        assert len(json.dumps(answer)) < 30_000


async def _mutated(app: FastAPI, door: str, seed: int) -> None:
    chance, left = random.Random(seed), MUTATIONS
    frames = FRAMES + [{"type": "mcp", "data": rpc} for rpc in RPC]
    while left:
        async with Peer(app, f"{door}/ws") as peer:
            await peer.ask({"type": "capabilities"})
            began = await peer.ask({"type": "reset"}) or {}
            eid, t = began["eid"], 0
            while left:
                left -= 1
                frame = mutation(chance, frames)
                answer = await peer.ask(frame)
                if answer is None:
                    assert json.loads(frame)["type"] == "close", frame
                    break
                if answer["type"] == "error":
                    assert answer["data"]["code"] and answer["data"]["message"], frame
                elif answer["type"] in ("observation", "mcp") and "t" in answer:
                    assert answer["t"] == (t + 1 if answer["eid"] == eid else 0), frame
                    eid, t = answer["eid"], answer["t"]
                stepped = await peer.ask({"type": "step", "data": {"n": 1}}) or {}
                t += 1
                assert (stepped.get("type"), stepped.get("eid"), stepped.get("t")) == ("observation", eid, t), frame
            assert peer.got.empty() or answer is None
        await asyncio.sleep(0)
        turns = (await app.state.errata.episodes.reads.detail(eid, None)).turns
        assert [turn.t for turn in turns] == list(range(t + 1))


@pytest.mark.timeout(600 + MUTATIONS // 100)
@pytest.mark.parametrize("door", DOORS)
async def test_mutations_of_valid_frames_leave_the_session_and_its_t_right(door: str) -> None:
    await _mutated(make_app(), door, seed=20261121 + len(door))


@pytest.mark.timeout(600 + MUTATIONS // 100)
async def test_mutations_of_json_rpc_on_a_socket_leave_its_session_right() -> None:
    app = tool_app()
    chance = random.Random(20261122)
    calls = {
        "jsonrpc": "2.0",
        "id": 9,
        "method": "tools/call",
        "params": {"name": "add", "arguments": {"a": 2, "b": 3}},
    }
    async with Peer(app, "/tools/mcp") as peer:
        for _ in range(MUTATIONS // 4):
            frame = mutation(chance, RPC)
            answer = await peer.ask(frame) or {}
            assert answer["jsonrpc"] == "2.0", frame
            assert "result" in answer or isinstance(answer["error"]["code"], int), frame
            added = await peer.ask(calls) or {}
            assert (added["id"], added["result"]["data"]) == (9, 5), frame
        assert peer.got.empty()


def tool_app() -> FastAPI:
    return create_fastapi_app(
        ToolEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=8, env_name="tools"
    )


# -- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def web() -> Iterator[tuple[TestClient, str]]:
    """A client, and an episode of two deliveries."""
    with TestClient(make_app(), raise_server_exceptions=False) as client:
        with client.websocket_connect("/ws") as ws:
            ws.send_text('{"type":"capabilities"}')
            ws.receive_text()
            ws.send_text('{"type":"reset"}')
            eid = json.loads(ws.receive_text())["eid"]
            ws.send_text('{"type":"step","data":{"n":2}}')
            ws.receive_text()
        yield client, eid


NUMBERS = ("reward_min", "reward_max", "created_from", "created_before", "last_from", "last_before")
NOTHING = [
    *("environment=%00", "error_kind=%ff%fe", "task=%00", "text=%00", "text=%25", "text=%f0%9f%98%80", "status=lost"),
    *(f"reward_min=1e308&{name}=0" for name in NUMBERS[1:]),
    f"cursor={EpisodeOrder().cursor(ListPlace(float('-inf'), ''))}",
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "query",
    [
        *("limit=" + text for text in ("0", "-1", "501", "1e9", "NaN", "9" * 5000, "%00", "%D9%A3", "", "1&limit=-1")),
        "x=1",
        *("cursor=" + text for text in ("-1", "%D9%A3", "1%0a", "", "9" * 30, "%00", "1%20", "%EF%BC%91", "9" * 5000)),
        *(
            "cursor=" + urlsafe_b64encode(text.encode()).decode().rstrip("=")
            for text in (
                *("", "1", "[]", "null", "[" * 700, '["created",true,1.0]', '["created",true,NaN,"e"]'),
                *('["created",true,"1","e"]', '["created",true,true,"e"]', '["created",1,1.0,"e"]'),
                *('["name",true,1.0,"e"]', '["created",true,1.0,7]', '["created",false,1.0,"e"]'),
                *('["reward",true,1.0,"e"]', f'["created",true,{"9" * 400},"e"]'),
            )
        ),
        *("sort=" + text for text in ("", "eid", "created,last")),
        *("order=" + text for text in ("", "down", "DESC")),
        *("status=" + text for text in ("", "running", "OPEN")),
        *(f"{name}={text}" for name in NUMBERS for text in ("", "x", "nan", "inf", "-inf", "1e999", "1,5", "0x1")),
        *("text=" + text for text in ("", "x" * 257)),
    ],
)
def test_a_wrong_page_of_episodes_has_a_code(web: tuple[TestClient, str], door: str, query: str) -> None:
    answer = web[0].get(f"{door}/episodes?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_ERROR") and answer.json()["message"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "query",
    ["bucket_s=0", "bucket_s=-1", "bucket_s=1.5", "bucket_s=", "bucket_s=99999999", "limit=1", "status=x"],
)
def test_wrong_aggregates_have_a_code(web: tuple[TestClient, str], door: str, query: str) -> None:
    answer = web[0].get(f"{door}/episodes/aggregates?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_ERROR") and answer.json()["message"]


@pytest.mark.parametrize("door", DOORS)
def test_aggregates_have_the_filters_of_lists(web: tuple[TestClient, str], door: str) -> None:
    for query in NOTHING[:-1]:
        assert web[0].get(f"{door}/episodes/aggregates?{query}").json() == {"bucket_s": 86_400, "buckets": []}
    answer = web[0].get(f"{door}/episodes/aggregates?bucket_s=31622400&text=ep_").json()
    (bucket,) = answer["buckets"]
    assert bucket["episodes"] == 1 and bucket["deliveries"] == 2 and bucket["start"] % 31_622_400 == 0


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("query", NOTHING)
def test_a_page_of_nothing_is_empty(web: tuple[TestClient, str], door: str, query: str) -> None:
    answer = web[0].get(f"{door}/episodes?{query}")
    assert answer.status_code == 200 and answer.json() == {"episodes": [], "next": None}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "query",
    [
        f"cursor={EpisodeOrder().cursor(ListPlace(1e300, chr(0x10FFFF)))}",
        f"sort=reward&order=asc&cursor={EpisodeOrder('reward', False).cursor(ListPlace(float('-inf'), ''))}",
        *("reward_min=-1e308", "reward_max=1e308", "created_from=-1", "last_before=1e308", "sort=last&order=asc"),
        *("text=EP_", "created_before=99999999999"),
    ],
)
def test_a_page_of_all_is_whole(web: tuple[TestClient, str], door: str, query: str) -> None:
    answer = web[0].get(f"{door}/episodes?{query}")
    assert answer.status_code == 200 and [e["eid"] for e in answer.json()["episodes"]] == [web[1]]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "t",
    ["-1", "9" * 30, "1e0", "%D9%A1", "%EF%BC%91", "%00", "1%00", "+1", "%201", "0x1", "1_0", "-0", "²", "1.0", "true"],
)
def test_what_is_no_delivery_index_is_refused(web: tuple[TestClient, str], door: str, t: str) -> None:
    client, eid = web
    answer = client.get(f"{door}/episodes/{eid}/states/{t}")
    assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_ERROR")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("eid", ["%00", "%ff", "ep_%00", "....", "e" * 5000, "%F0%9F%92%A5", "'%20or%201=1--", "%25"])
def test_what_is_no_episode_is_unknown(web: tuple[TestClient, str], door: str, eid: str) -> None:
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/states/0"), ("POST", "/fork")):
        answer = web[0].request(method, f"{door}/episodes/{eid}{rest}", content='{"t":0,"request_id":"r"}')
        assert (answer.status_code, answer.json()["code"]) == (404, "UNKNOWN_EPISODE")


@pytest.mark.parametrize("path", ["..%2f..%2fetc%2fpasswd", "../../etc/passwd", "a%2fb", "x/states/..%2f0", "%2e%2e"])
def test_no_path_leads_out_of_the_episodes(web: tuple[TestClient, str], path: str) -> None:
    answer = web[0].get(f"/episodes/{path}")
    assert answer.status_code == 404 and "root:" not in answer.text


FORKS: tuple[bytes, ...] = (
    b"", b"[", b"null", b"[]", b"\xff", b"{}", b"NaN", b'"x"',
    b'{"t":NaN,"request_id":"r"}', b'{"t":1e999,"request_id":"r"}', b'{"t":-1,"request_id":"r"}',
    b'{"t":' + b"9" * 5000 + b',"request_id":"r"}', b'{"t":1180591620717411303424,"request_id":"r"}',
    b'{"t":0,"t":1,"request_id":"r"}', b'{"t":0.0,"request_id":"r"}', b'{"t":true,"request_id":"r"}',
    b'{"t":0,"request_id":"\\ud800"}', b'{"t":0,"request_id":["r"]}', b'{"t":0,"request_id":"r","principal":"p"}',
    b'{"t":0,"request_id":"' + b"k" * 10_000 + b'"}', b"[" * 5000, b'{"a":' * 2000 + b"1" + b"}" * 2000,
)  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("body", FORKS)
def test_a_wrong_fork_body_has_a_code(web: tuple[TestClient, str], door: str, body: bytes) -> None:
    client, eid = web
    answer = client.post(f"{door}/episodes/{eid}/fork", content=body)
    assert answer.status_code in (400, 422) and answer.json()["code"] in ("INVALID_JSON", "VALIDATION_ERROR")
    assert len(answer.content) < 5000


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("path", ["/reset", "/step", "/mcp"])
@pytest.mark.parametrize(
    "body",
    [
        b"[", b"null", b"[]", b"\xff", b'{"seed":NaN}', b'{"seed":"\\ud800"}', b'{"action":NaN}',
        b'{"action":{"n":"\\ud800"}}', b'{"action":{"n":1e999}}', b'{"action":{"do":"\\ud800"}}',
        b'{"action":{"do":"half"}}', b'{"action":{"do":"runtime"}}', b'{"action":{"do":"exit"}}',
        b'{"seed":' + b"9" * 5000 + b"}", b'{"a":' * 3000 + b"1" + b"}" * 3000, b'{"seed":"' + b"x" * 2**20 + b'"}',
        b'{"jsonrpc":"2.0","id":1e999,"method":"tools/list"}', b'{"jsonrpc":"2.0","id":"\\ud800","method":"x"}',
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x","session_id":["\\u0000"]}}',
    ],
)  # fmt: skip
def test_a_bad_body_never_breaks_a_route_of_upstreams(
    web: tuple[TestClient, str], door: str, path: str, body: bytes
) -> None:
    answer = web[0].post(door + path, content=body, headers={"Content-Type": "application/json"})
    if path == "/mcp":
        assert answer.json()["error"]["code"] and answer.status_code == 200
    elif answer.status_code != 200:  # reset ignores what it does not take, as upstream
        assert answer.status_code in (400, 422) and answer.json()["code"] and answer.json()["message"]
    assert len(answer.content) < 20_000


@pytest.mark.parametrize("path", ["/episodes/x/fork", "/mcp", "/reset", "/step", "/count/reset", "/tasks"])
async def test_a_body_without_end_is_refused_before_it_is_held(path: str) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1000 * 2**20:
            sent += 2**20
            yield b"x" * 2**20

    transport = httpx.ASGITransport(make_app(), client=("testclient", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        answer = await client.post(path, content=endless())
    assert sent < 20 * 2**20
    if path == "/mcp":
        assert answer.json()["error"]["code"] and answer.status_code == 200
    else:
        assert (answer.status_code, answer.json()["code"]) == (413, "FRAME_TOO_LARGE")


@pytest.mark.timeout(600 + MUTATIONS // 100)
async def test_mutations_of_json_rpc_over_http_are_answered_and_no_session_is_left_over() -> None:
    chance, app = random.Random(20261123), tool_app()
    transport = httpx.ASGITransport(app, client=("testclient", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        for _ in range(MUTATIONS // 10):
            frame = mutation(chance, RPC)
            answer = (await client.post("/mcp", content=frame)).json()
            assert "result" in answer or isinstance(answer["error"]["code"], int), frame
            if "session_id" in (answer.get("result") or {}):
                close = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/close", "params": answer["result"]}
                assert (await client.post("/mcp", json=close)).json()["result"]["closed"] is True
    assert app.state.errata.active_sessions == 0


def test_long_headers_and_long_paths_leave_a_real_server_answering(serving: str, tmp_path: Path) -> None:
    with httpx.Client(base_url=serving, timeout=30) as client:
        for headers, path in (({"X-Long": "x" * 10_000_000}, "/health"), ({}, "/episodes/" + "e" * 60_000)):
            try:
                assert client.get(path, headers=headers).status_code in (400, 404, 414, 431)
            except httpx.TransportError:
                pass  # it hung up on us in the middle of the headers
        assert client.get("/health").status_code == 200
