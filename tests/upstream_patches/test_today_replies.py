"""What the page and proposals A and C of rfcs/proposals say that stock OpenEnv 0.10.0 does: a test for each sentence.

As in ``test_today.py``: ``test_today_NAME`` is that of a sentence which ``<!-- today: NAME -->`` follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from openenv.core import GenericEnvClient, env_client
from openenv.core.env_server import Action, ConcurrencyConfig, Environment, HTTPEnvServer, Observation, State
from openenv.core.env_server.types import StepRequest
from openenv.core.mcp_client import MCPToolClient
from pydantic import field_validator
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from .test_today import Tools

pytestmark = pytest.mark.upstream_patches


class AddAction(Action):
    """Add ``n``; a slow step waits until the test lets it go on."""

    n: float = 1
    slow: bool = False


class SumObservation(Observation):
    """The sum so far."""

    total: float = 0


class SumEnvironment(Environment[AddAction, SumObservation, State]):
    """Adds numbers; a negative one is added too, and then an error."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    started = threading.Event()
    may_end = threading.Event()
    closed = 0
    given: dict[str, Any] = {}  # noqa: RUF012 - what step() was called with, beside its action

    def __init__(self) -> None:
        super().__init__()
        self._total = 0.0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> SumObservation:
        self._total = 0.0
        self._state = State(episode_id=episode_id)
        return SumObservation()

    def step(self, action: AddAction, timeout_s: float | None = None, **kwargs: Any) -> SumObservation:
        type(self).given = kwargs
        self._total += action.n
        self._state.step_count += 1
        if action.slow:
            self.started.set()
            assert self.may_end.wait(30)
        if action.n < 0:
            raise ValueError("negative")
        return SumObservation(total=self._total, reward=action.n)

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        type(self).closed += 1


class PickyAction(Action):
    """Is refused if ``n`` is 0."""

    n: float

    @field_validator("n")
    @classmethod
    def _refuse(cls, n: float) -> float:
        if not n:
            raise ValueError("zero")
        return n


class PickyEnvironment(SumEnvironment):
    """Raises text that is no Unicode."""

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> SumObservation:
        raise ValueError("\udce9")


class Served:
    """A stock server on a real port, with its default of slots where ``slots`` is None."""

    def __init__(self, environment: Any, action: Any, observation: Any, slots: int | None = 4) -> None:
        app = FastAPI()
        self.server = HTTPEnvServer(environment, action, observation, max_concurrent_envs=slots)
        self.server.register_routes(app)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._listening]})

    def __enter__(self) -> Served:
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *raised: object) -> None:
        SumEnvironment.may_end.set()
        self._uvicorn.should_exit = True
        self._thread.join()

    def rpc(self, method: str, **params: Any) -> Any:
        """Call a method of /mcp."""
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return httpx.post(f"{self.url}/mcp", json=body, trust_env=False).json()

    def socket(self, session_id: str | None = None) -> connect:
        """Return a socket with a session of its own, or attached to one."""
        query = f"?session_id={session_id}" if session_id else ""
        return connect(self.url.replace("http", "ws") + "/ws" + query, proxy=None)


@pytest.fixture
def served() -> Iterator[Served]:
    assert version("openenv") == "0.10.0"
    SumEnvironment.started.clear()
    SumEnvironment.may_end.clear()
    SumEnvironment.closed = 0
    with Served(SumEnvironment, AddAction, SumObservation) as one:
        yield one


async def ask(ws: ClientConnection, message: dict[str, Any], timeout_s: float | None = 30) -> Any:
    with contextlib.suppress(ConnectionClosed):  # a refusal may be queued before the close
        await ws.send(json.dumps(message))
    return json.loads(await asyncio.wait_for(ws.recv(), timeout_s))


def step(n: float, **more: Any) -> dict[str, Any]:
    return {"type": "step", "data": {"n": n, **more}}


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - stock announces none of what is waited for
        await asyncio.sleep(0.01)


async def attached(served: Served, session_id: str) -> ClientConnection:
    """Attach to a session as soon as that is allowed."""
    while True:
        ws = await served.socket(session_id)
        answer = await ask(ws, {"type": "state"})
        if answer["type"] == "state":
            return ws
        assert "already has an attached WebSocket" in answer["data"]["message"]
        assert answer["data"]["code"] == "SESSION_ERROR"
        await ws.close()
        await asyncio.sleep(0.01)


async def cut_in_a_step(served: Served, n: float = 10) -> str:
    """Return a session whose socket was cut while its second step was executed."""
    session_id: str = served.rpc("openenv/session/create")["result"]["session_id"]
    ws = await served.socket(session_id)
    await ask(ws, {"type": "reset"})
    await ask(ws, step(1))
    await ws.send(json.dumps(step(n, slow=True)))
    await until(SumEnvironment.started.is_set)
    ws.transport.abort()
    return session_id


async def attached_again(served: Served, n: float = 10) -> ClientConnection:
    """Return a socket of a session that was cut in its second step, which has ended since."""
    session_id = await cut_in_a_step(served, n)
    SumEnvironment.may_end.set()
    return await attached(served, session_id)


# -- clients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancelled", [False, True])
async def test_today_a_timeout_ends_the_session(served: Served, cancelled: bool) -> None:
    async with GenericEnvClient(base_url=served.url, message_timeout_s=30) as env:
        await env.reset(episode_id="mine")
        await env.step({"n": 100})
        if not cancelled:
            env._message_timeout = 0.05  # passes however fast the machine is: the step waits for may_end
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.step({"n": 1, "slow": True}), 0.5 if cancelled else None)
        SumEnvironment.may_end.set()
        env._message_timeout = 30
        assert (await env.step({"n": 10})).observation["total"] == 10
        assert (await env.state())["episode_id"] is None
        await until(lambda: SumEnvironment.closed == 1)  # the session belonged to its socket


async def test_today_a_step_that_still_runs_keeps_the_only_slot(served: Served) -> None:
    with Served(SumEnvironment, AddAction, SumObservation, slots=None) as one:
        assert one.server.max_concurrent_envs == 1
        async with GenericEnvClient(base_url=one.url, message_timeout_s=30) as env:
            await env.reset()
            env._message_timeout = 0.05
            with pytest.raises(asyncio.TimeoutError):
                await env.step({"n": 1, "slow": True})
            env._message_timeout = 30
            with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
                await env.step({"n": 10})


async def test_today_a_cut_ends_the_session(served: Served) -> None:
    async with GenericEnvClient(base_url=served.url) as env:
        await env.reset()
        await env.step({"n": 100})
        env._ws.transport.abort()
        await until(lambda: env._ws.state.name == "CLOSED")
        assert (await env.step({"n": 10})).observation["total"] == 10


async def test_today_an_mcp_client_keeps_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any, **named: Any) -> None:
        raise OSError("no route")

    with Served(Tools, Action, Observation) as served:
        async with MCPToolClient(base_url=served.url) as env:

            async def cut() -> None:
                env._ws.transport.abort()
                await until(lambda: not served.server._session_websocket_attachments)
                await until(lambda: env._ws.state.name == "CLOSED")

            await env.reset(episode_id="mine")
            await cut()
            assert (await env.state()).episode_id == "mine"
            await cut()
            with monkeypatch.context() as patch, pytest.raises(ConnectionError, match="no route"):
                patch.setattr(env_client, "ws_connect", refused)
                await env.state()
            assert served.server.active_sessions == 0  # it has closed it
            assert (await env.state()).episode_id is None


async def test_today_an_mcp_client_calls_tools_over_http() -> None:
    with Served(Tools, Action, Observation) as served:
        async with MCPToolClient(base_url=served.url) as env:
            await env.disconnect()
            with pytest.raises(RuntimeError, match="it failed"):
                await env.call_tool("fail")
            assert env._ws is None


async def test_today_a_client_takes_any_frame_for_its_reply() -> None:
    async def push(ws: ServerConnection) -> None:
        await ws.send('{"type":"observation","data":{"observation":{"late":true},"reward":null,"done":false}}')
        await ws.wait_closed()

    async with serve(push, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with GenericEnvClient(base_url=f"http://127.0.0.1:{port}") as env:
            assert (await env.step({"n": 1})).observation == {"late": True}


async def test_today_keyword_arguments_go_to_the_provider() -> None:
    given = []

    def start(*args: Any, **kwargs: Any) -> str:
        given.append(kwargs)
        raise RuntimeError("started")

    provider: Any = SimpleNamespace(start_container=start, start=start, stop_container=lambda: None, stop=lambda: None)
    with pytest.raises(RuntimeError, match="started"):
        await GenericEnvClient.from_docker_image("image", provider, recovery_timeout_s=1)
    with pytest.raises(RuntimeError, match="started"):
        await GenericEnvClient.from_env("owner/name", provider=provider, recovery_timeout_s=1)
    assert [kwargs["recovery_timeout_s"] for kwargs in given] == [1, 1]


# -- sessions ---------------------------------------------------------------------------------------------------------


async def test_today_a_created_session_outlives_its_socket(served: Served) -> None:
    ws = await attached_again(served)
    assert (await ask(ws, {"type": "state"}))["data"]["step_count"] == 2
    assert (await ask(ws, step(100)))["data"]["observation"]["total"] == 111
    await ws.close()


async def test_today_a_lost_reply_cannot_be_had(served: Served) -> None:
    ws = await attached_again(served)
    assert set((await ask(ws, {"type": "state"}))["data"]) == {"episode_id", "step_count"}
    answer = await ask(ws, {"type": "state", "data": {"t": 2}})
    assert answer["data"]["code"] == "VALIDATION_ERROR"
    await ws.close()


async def test_today_an_error_is_lost_like_any_reply(served: Served) -> None:
    ws = await attached_again(served, -10)
    assert (await ask(ws, {"type": "state"}))["data"] == {"episode_id": None, "step_count": 2}
    assert (await ask(ws, step(100)))["data"]["observation"]["total"] == 91  # it had acted
    await ws.close()


async def test_today_a_step_sent_again_acts_twice(served: Served) -> None:
    ws = await attached_again(served)
    assert (await ask(ws, step(10)))["data"]["observation"]["total"] == 21
    await ws.close()


async def test_today_a_socket_is_attached_until_its_requests_are_done(served: Served) -> None:
    session_id = await cut_in_a_step(served)
    async with served.socket(session_id) as ws:
        assert json.loads(await ws.recv())["data"]["code"] == "SESSION_ERROR"
    SumEnvironment.may_end.set()
    ws = await attached(served, session_id)
    await ws.close()


async def test_today_an_unknown_session_is_a_session_error(served: Served) -> None:
    async with served.socket("unknown") as ws:
        refused = json.loads(await ws.recv())["data"]
        assert refused["code"] == "SESSION_ERROR" and refused["message"].startswith("Unknown session_id")
        with pytest.raises(ConnectionClosed):
            await ws.recv()


async def test_today_a_created_session_holds_its_slot_until_it_is_closed(served: Served) -> None:
    session_id = served.rpc("openenv/session/create")["result"]["session_id"]
    async with served.socket(session_id) as ws:
        await ask(ws, {"type": "reset"})
        await ws.send('{"type":"close"}')
    await until(lambda: session_id not in served.server._session_websocket_attachments)
    assert served.server.active_sessions == 1
    assert ConcurrencyConfig().session_timeout is None
    assert served.server.concurrency_config.session_timeout is None
    await asyncio.to_thread(served.rpc, "openenv/session/close", session_id=session_id)
    assert served.server.active_sessions == 0


async def test_today_create_ignores_parameters_it_does_not_know(served: Served) -> None:
    for params in ({"for_socket": True}, {"note": [1]}):
        created = await asyncio.to_thread(served.rpc, "openenv/session/create", **params)
        assert set(created["result"]) == {"session_id"}
        assert created.get("error") is None
        async with served.socket(created["result"]["session_id"]) as ws:
            assert (await ask(ws, {"type": "reset"}))["type"] == "observation"
    assert served.server.active_sessions == 2


def test_today_uvicorn_notices_a_half_open_socket_after_40_s() -> None:
    config = uvicorn.Config("any")
    assert config.ws_ping_interval + config.ws_ping_timeout == 40


# -- messages ---------------------------------------------------------------------------------------------------------


async def test_today_a_reply_does_not_name_its_request(served: Served) -> None:
    async with served.socket() as ws:
        await ask(ws, {"type": "reset"})
        with pytest.raises(asyncio.TimeoutError):
            await ask(ws, step(1, slow=True), 0.05)
        SumEnvironment.may_end.set()
        late = await ask(ws, step(10))
        assert late["data"]["observation"]["total"] == 1
        assert set(late) == {"type", "data"}


async def test_today_an_error_without_json_ends_the_session() -> None:
    with Served(PickyEnvironment, PickyAction, SumObservation) as served:
        for n in (0, 1):  # refused by its own validator; text that is no Unicode
            async with served.socket() as ws:
                assert (await ask(ws, step(n)))["data"]["code"] == "SESSION_ERROR"
                with pytest.raises(ConnectionClosed):
                    await ws.recv()


async def test_today_an_unknown_message_is_refused(served: Served) -> None:
    async with served.socket() as ws:
        for message in ({"type": "capabilities"}, {"type": "delivery", "data": {"t": 2}}):
            answer = await ask(ws, message)
            assert (answer["type"], answer["data"]["code"]) == ("error", "UNKNOWN_TYPE")
        assert (await ask(ws, {"type": "state"}))["type"] == "state"


@pytest.mark.parametrize("key", ["note", "request_id"])
async def test_today_an_unknown_key_is_refused(served: Served, key: str) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with served.socket() as ws:
        for message in (
            {"type": "reset"},
            step(1),
            {"type": "state"},
            {"type": "mcp", "data": call},
            {"type": "close"},
        ):
            answer = await ask(ws, {**message, key: "a"})
            assert answer["data"]["code"] == "VALIDATION_ERROR", message
        assert (await ask(ws, {"type": "state"}))["data"]["step_count"] == 0


async def test_today_http_hands_a_request_id_to_the_environment(served: Served) -> None:
    assert "tracking" in (StepRequest.model_fields["request_id"].description or "")
    assert StepRequest(action={}, request_id="x" * 255)
    with pytest.raises(ValueError, match="255"):
        StepRequest(action={}, request_id="x" * 256)
    for _ in range(2):  # without further effect, and in an environment of its own each
        body = {"action": {"n": 1}, "request_id": "a"}
        answer = await asyncio.to_thread(httpx.post, f"{served.url}/step", json=body, trust_env=False)
        assert answer.json()["observation"]["total"] == 1
        assert SumEnvironment.given == {"request_id": "a"}
    assert SumEnvironment.closed == 2


async def test_today_mcp_ids_may_repeat_or_be_left_out() -> None:
    call = {"jsonrpc": "2.0", "method": "tools/list"}
    with Served(Tools, Action, Observation) as served:
        async with served.socket() as ws:
            for given in ({"id": 1}, {"id": 1}, {}):
                answer = await ask(ws, {"type": "mcp", "data": call | given})
                assert [tool["name"] for tool in answer["data"]["result"]["tools"]] == ["fail"]
