"""What rfcs/proposals/ a and c say about today, on the installed openenv 0.10.0; each test names its sentence."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, ConcurrencyConfig, Environment, HTTPEnvServer, Observation, State
from openenv.core.env_server.types import StepRequest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed


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


class Served:
    """A stock server on a real port."""

    def __init__(self) -> None:
        app = FastAPI()
        self.server = HTTPEnvServer(SumEnvironment, AddAction, SumObservation, max_concurrent_envs=4)
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
    with Served() as one:
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


async def cut_in_a_step(served: Served) -> str:
    """Return a session whose socket was cut while its second step was executed."""
    session_id: str = served.rpc("openenv/session/create")["result"]["session_id"]
    ws = await served.socket(session_id)
    await ask(ws, {"type": "reset"})
    await ask(ws, step(1))
    await ws.send(json.dumps(step(10, slow=True)))
    await until(SumEnvironment.started.is_set)
    ws.transport.abort()
    return session_id


async def test_today_a_kept_socket_takes_the_late_reply(served: Served) -> None:
    """A: "took the late reply for that of the next request". C: "No reply says which request it answers"."""
    async with served.socket() as ws:
        await ask(ws, {"type": "reset"})
        with pytest.raises(asyncio.TimeoutError):
            await ask(ws, step(1, slow=True), 0.05)
        SumEnvironment.may_end.set()
        late = await ask(ws, step(10))
        assert late["data"]["observation"]["total"] == 1
        assert set(late) == {"type", "data"}


@pytest.mark.parametrize("cancelled", [False, True])
async def test_today_the_step_after_a_timeout_runs_in_a_fresh_environment(served: Served, cancelled: bool) -> None:
    """A: "no error, an observation of the wrong episode", and "The same happens when a caller cancels"."""
    async with GenericEnvClient(base_url=served.url, message_timeout_s=30) as env:
        await env.reset()
        await env.step({"n": 100})
        if not cancelled:
            env._message_timeout = 0.05
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.step({"n": 1, "slow": True}), 0.5 if cancelled else None)
        SumEnvironment.may_end.set()
        env._message_timeout = 30
        assert (await env.step({"n": 10})).observation["total"] == 10
        await until(lambda: SumEnvironment.closed == 1)  # the session belonged to its socket


async def test_today_the_step_after_a_cut_runs_in_a_fresh_environment(served: Served) -> None:
    """A: "or when a tunnel or proxy closes the socket"."""
    async with GenericEnvClient(base_url=served.url) as env:
        await env.reset()
        await env.step({"n": 100})
        env._ws.transport.abort()
        await until(lambda: env._ws.state.name == "CLOSED")
        assert (await env.step({"n": 10})).observation["total"] == 10


async def test_today_attaching_again_finds_the_step_but_not_its_reply(served: Served) -> None:
    """A: "the step in flight has been executed", "cannot be had"; C: "the step acts twice"."""
    session_id = await cut_in_a_step(served)
    SumEnvironment.may_end.set()
    ws = await attached(served, session_id)
    assert (await ask(ws, {"type": "state"}))["data"]["step_count"] == 2
    for message in ({"type": "delivery", "data": {"t": 2}}, {"type": "capabilities"}):
        answer = await ask(ws, message)
        assert answer["data"]["code"] == "UNKNOWN_TYPE"
    answer = await ask(ws, {"type": "state", "data": {"t": 2}})
    assert answer["data"]["code"] == "VALIDATION_ERROR"
    assert (await ask(ws, step(10)))["data"]["observation"]["total"] == 21
    await ws.close()


async def test_today_a_socket_counts_as_attached_until_its_requests_are_done(served: Served) -> None:
    """A-13: "a socket counts as attached until the server is done with its requests"."""
    session_id = await cut_in_a_step(served)
    async with served.socket(session_id) as ws:
        answer = json.loads(await ws.recv())
        assert answer["data"]["code"] == "SESSION_ERROR"
    SumEnvironment.may_end.set()
    ws = await attached(served, session_id)
    await ws.close()
    async with served.socket("unknown") as ws:
        assert json.loads(await ws.recv())["data"]["code"] == "SESSION_ERROR"  # open question 2 of A


async def test_today_an_error_is_lost_like_any_reply(served: Served) -> None:
    """C: "or the environment raised an error whose text is lost"; its step may have acted."""
    session_id = served.rpc("openenv/session/create")["result"]["session_id"]
    ws = await served.socket(session_id)
    await ask(ws, {"type": "reset"})
    await ws.send(json.dumps(step(-1, slow=True)))
    await until(SumEnvironment.started.is_set)
    ws.transport.abort()
    SumEnvironment.may_end.set()
    ws = await attached(served, session_id)
    assert (await ask(ws, {"type": "state"}))["data"]["step_count"] == 1
    await ws.close()


async def test_today_an_attached_session_holds_its_slot_until_it_is_closed(served: Served) -> None:
    """A: "holds its slot until it is closed", "`session_timeout`, which is off by default"."""
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


async def test_today_request_id_is_refused_on_ws_and_declared_on_http(served: Served) -> None:
    """C: "HTTP's `StepRequest` declares a `request_id`", "`/ws` refuses the key"."""
    assert "tracking" in (StepRequest.model_fields["request_id"].description or "")
    assert StepRequest(action={}, request_id="x" * 255)
    with pytest.raises(ValueError, match="255"):
        StepRequest(action={}, request_id="x" * 256)
    for _ in range(2):  # handed to the environment, and otherwise without effect
        body = {"action": {"n": 1}, "request_id": "a"}
        answer = await asyncio.to_thread(httpx.post, f"{served.url}/step", json=body, trust_env=False)
        assert answer.json()["observation"]["total"] == 1
        assert SumEnvironment.given == {"request_id": "a"}
    async with served.socket() as ws:
        answer = await ask(ws, {**step(1), "request_id": "a"})
        assert answer["data"]["code"] == "VALIDATION_ERROR"
        assert (await ask(ws, {"type": "state"}))["data"]["step_count"] == 0


def test_today_released_clients_attach_only_for_mcp() -> None:
    """A: the client makes one `POST /mcp`, "as `MCPToolClient` does"; `EnvClient` has no session to attach to."""
    from openenv.core import env_client, mcp_client

    assert "session_id" not in inspect.getsource(env_client)
    assert "openenv/session/create" in inspect.getsource(mcp_client)
