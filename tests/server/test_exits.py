"""Code of an environment that calls exit(), wherever it runs, fails its own call; the server and others go on."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from fastmcp import FastMCP
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import State
from pydantic import BaseModel, field_serializer, field_validator

from errata_client import ErrataClient
from errata_protocol.errors import EnvironmentFailed
from errata_protocol.exception_text import text_of
from errata_server.app import create_fastapi_app
from errata_server.concurrency.containment import calling, contained
from errata_server.process import ServerProcess
from errata_server.serve import server as serving
from errata_server.settings import Settings

from .asgi_peer import Peer
from .conftest import simulated
from .environments import CountAction, CountEnvironment, CountObservation, PinnedEnvironment, ToolsEnvironment

LEAVES: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "exit without a status": lambda: SystemExit(),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(),
    "GeneratorExit": lambda: GeneratorExit(),
    "CancelledError": lambda: asyncio.CancelledError(),
    "its own": lambda: Panic("at the library's end"),
    "one without a text": lambda: Mute(),
    "AssertionError": lambda: AssertionError(),
    "NotImplementedError": lambda: NotImplementedError(" "),
}


def assert_named(how: str, message: str) -> None:
    """A message is not empty, and that of an exception without a text names its class."""
    assert message.strip()
    if how in ("AssertionError", "NotImplementedError"):
        assert how in message


class Panic(BaseException):
    """As extension modules raise it."""


class Mute(Exception):
    """Its message ends the program, too."""

    def __str__(self) -> str:
        sys.exit(5)


def leave(how: str) -> None:
    raise LEAVES[how]()


class LeavingAction(CountAction):
    """Its validator leaves when it is told to."""

    @field_validator("do")
    @classmethod
    def _leaves(cls, do: str) -> str:
        place, _, how = do.partition(": ")
        if place == "validator":
            leave(how)
        return do


class Serialized(BaseModel):
    """Leaves when it is serialized."""

    how: str = ""

    @field_serializer("how")
    def _leaves(self, how: str) -> str:
        if how:
            leave(how)
        return how


class LeavingObservation(Serialized, CountObservation):
    pass


class LeavingState(Serialized, State):
    pass


class Leaving:
    """What the environments of both kinds do."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    at: dict[str, str] = {}  # noqa: RUF012 - place: how; of all instances
    how = ""

    def __init__(self) -> None:
        super().__init__()
        self._leave_at("constructor")

    @classmethod
    def _leave_at(cls, place: str) -> None:
        how = cls.at.get(place)
        if how:
            leave(how)

    def _observed(self, do: str) -> CountObservation:
        place, _, how = do.partition(": ")
        if place == "step":
            leave(how)
        return LeavingObservation(n=7, how=how if place == "serializer" else "")

    @property
    def state(self) -> State:
        self._leave_at("state")
        return LeavingState(episode_id="e", step_count=0, how=self.at.get("state's serializer", ""))

    @property
    def rubric(self) -> Any:
        self._leave_at("rubric")
        return None

    @rubric.setter
    def rubric(self, value: Any) -> None:
        pass

    def get_metadata(self) -> Any:
        self._leave_at("metadata")
        return super().get_metadata()  # type: ignore[misc]

    def close(self) -> None:
        self._leave_at("close")


class PinnedLeaving(Leaving, PinnedEnvironment):
    """Runs in a thread."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self._leave_at("reset")
        return CountObservation()

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        return self._observed(action.do)


class AsyncLeaving(Leaving, CountEnvironment):
    """Runs on the event loop, and takes snapshots."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self._leave_at("reset")
        return CountObservation()

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        return self._observed(action.do)

    async def snapshot(self) -> Any:
        self._leave_at("snapshot")
        return await super().snapshot()

    async def restore(self, snapshot: Any) -> None:
        self._leave_at("restore")
        await super().restore(snapshot)


@pytest.fixture(autouse=True)
def nobody_leaves() -> Any:
    yield
    Leaving.at.clear()


def application(environment: type[Any]) -> Any:
    return create_fastapi_app(
        environment, LeavingAction, LeavingObservation, max_concurrent_envs=8, runtime=simulated(Settings())
    )


BOTH = pytest.mark.parametrize("environment", [PinnedLeaving, AsyncLeaving])
EVERY = pytest.mark.parametrize("how", LEAVES)


@BOTH
@EVERY
async def test_a_step_that_leaves_is_its_own_error(how: str, environment: type[Any]) -> None:
    app = application(environment)
    async with Peer(app) as peer, Peer(app) as other:
        for socket in (peer, other):
            await socket.ask({"type": "reset"})
        for place in ("step", "serializer", "validator"):
            answer = await peer.ask({"type": "step", "data": {"do": f"{place}: {how}"}}) or {}
            code = "VALIDATION_ERROR" if place == "validator" else "EXECUTION_ERROR"
            assert (answer["type"], answer["data"]["code"]) == ("error", code), place
            if place != "validator":  # pydantic says "Assertion failed" itself
                assert_named(how, answer["data"]["message"])
            for socket in (peer, other):
                assert (await socket.ask({"type": "step", "data": {}}) or {})["type"] == "observation", place


@EVERY
@pytest.mark.parametrize(
    ("environment", "place"),
    [(made, place) for made in (PinnedLeaving, AsyncLeaving) for place in ("constructor", "reset", "rubric")]
    + [(AsyncLeaving, "snapshot")],
)
async def test_what_leaves_before_an_answer_is_that_requests_error(
    place: str, how: str, environment: type[Any]
) -> None:
    app = application(environment)
    async with Peer(app) as other:
        await other.ask({"type": "reset"})
        Leaving.at[place] = how
        async with Peer(app) as peer:
            answer = await peer.ask({"type": "reset"}) or {}
            assert answer["type"] == "error", place
            assert_named(how, answer["data"]["message"])
        Leaving.at.clear()
        assert (await other.ask({"type": "step", "data": {}}) or {})["type"] == "observation"
        async with Peer(app) as peer:
            assert (await peer.ask({"type": "reset"}) or {})["type"] == "observation"


@BOTH
@EVERY
@pytest.mark.parametrize("place", ["state", "state's serializer"])
async def test_a_state_that_leaves_is_that_reads_error(place: str, how: str, environment: type[Any]) -> None:
    async with Peer(application(environment)) as peer:
        Leaving.at[place] = how
        assert (await peer.ask({"type": "reset"}) or {})["type"] == "observation"
        answer = (await peer.ask({"type": "state"}) or {})["data"]
        assert answer["code"] == "EXECUTION_ERROR"
        assert_named(how, answer["message"])
        assert (await peer.ask({"type": "step", "data": {}}) or {})["type"] == "observation"


@BOTH
@EVERY
async def test_a_close_that_leaves_is_logged(
    how: str, environment: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    app = application(environment)
    Leaving.at["close"] = how
    async with Peer(app) as other:
        await other.ask({"type": "reset"})
        async with Peer(app) as peer:
            await peer.ask({"type": "reset"})
            await peer.ask({"type": "close"})
        assert (await other.ask({"type": "step", "data": {}}) or {})["type"] == "observation"
    assert "failed" in caplog.text


@BOTH
@EVERY
def test_http_routes_answer_what_leaves(how: str, environment: type[Any]) -> None:
    with TestClient(application(environment), raise_server_exceptions=False) as client:
        for place, method, path in (
            ("state", "GET", "/state"),
            ("metadata", "GET", "/metadata"),
            ("reset", "POST", "/reset"),
            ("constructor", "POST", "/reset"),
        ):
            Leaving.at[place] = how
            answer = client.request(method, path)
            assert answer.status_code == 500 and answer.json()["code"], place
            assert_named(how, answer.json()["message"])
            Leaving.at.clear()
        for place in ("step", "serializer"):
            answer = client.post("/step", json={"action": {"do": f"{place}: {how}"}})
            assert answer.status_code == 500 and answer.json()["code"], place
            assert_named(how, answer.json()["message"])
        assert client.post("/step", json={"action": {}}).json()["observation"]["n"] == 7


class LeavingTools(ToolsEnvironment):
    """Tools that leave in a function, in a coroutine, in a task of their own, and while they are listed."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    shared: FastMCP[Any] | None = None

    def __init__(self) -> None:
        server: FastMCP[Any] = type(self).shared or FastMCP("leaving")

        @server.tool
        def blocking(how: str) -> str:
            leave(how)
            return "not reached"

        @server.tool
        async def later(how: str) -> str:
            await asyncio.sleep(0)
            leave(how)
            return "not reached"

        @server.tool
        def stays() -> int:
            return 42

        super().__init__(server)


class ServerOnly(CountEnvironment):
    """Has tools without a client, so that they are called where the environment lives."""

    def __init__(self) -> None:
        super().__init__()
        self.mcp_server = LeavingTools().mcp_server


def call_of(tool: str, **arguments: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


@pytest.mark.parametrize("how", [how for how in LEAVES if how != "GeneratorExit"])  # it ends FastMCP's generators
@pytest.mark.parametrize("tool", ["blocking", "later"])
async def test_a_tool_that_leaves_is_that_calls_error(tool: str, how: str) -> None:
    app = create_fastapi_app(
        LeavingTools, CallToolAction, CallToolObservation, max_concurrent_envs=8, runtime=simulated(Settings())
    )
    async with Peer(app) as peer, Peer(app, "/mcp") as rpc, Peer(app) as other:
        for socket in (peer, other):
            await socket.ask({"type": "reset"})
        for _ in range(2):
            action = {"type": "call_tool", "tool_name": tool, "arguments": {"how": how}}
            answer = await peer.ask({"type": "step", "data": action}) or {}
            assert_named(how, answer["data"]["observation"]["error"]["message"])
            answer = await rpc.ask(call_of(tool, how=how)) or {}
            assert "error" in answer or answer["result"]["is_error"]
            assert_named(how, json.dumps(answer))
            answer = await rpc.ask(call_of("stays")) or {}
            assert answer["result"]["data"] == 42
            for socket in (peer, other):
                action = {"type": "call_tool", "tool_name": "stays", "arguments": {}}
                assert "42" in json.dumps(await socket.ask({"type": "step", "data": action}))


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("tool", ["blocking", "later"])
async def test_a_tool_of_an_environment_without_a_client_leaves_its_call(tool: str, how: str) -> None:
    async with Peer(application(ServerOnly), "/mcp") as peer:
        answer = await peer.ask(call_of(tool, how=how)) or {}
        assert_named(how, answer["error"]["message"])
        assert (await peer.ask(call_of("stays")) or {})["result"] == 42


async def test_a_server_that_instances_share_is_prepared_once() -> None:
    LeavingTools.shared = FastMCP("shared", on_duplicate="replace")
    try:
        app = create_fastapi_app(
            LeavingTools, CallToolAction, CallToolObservation, max_concurrent_envs=8, runtime=simulated(Settings())
        )
        chains = []
        for _ in range(3):
            async with Peer(app, "/mcp") as peer:
                assert (await peer.ask(call_of("blocking", how="SystemExit")) or {})["id"] == 1
                chains.append(len(LeavingTools.shared.middleware))
        assert len(set(chains)) == 1
    finally:
        LeavingTools.shared = None


class Scattered(CountEnvironment):
    """Leaves in tasks and callbacks of its own, which nobody awaits."""

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **more: Any) -> CountObservation:
        loop = asyncio.get_running_loop()
        left = asyncio.Event()

        async def leaves() -> None:
            left.set()
            leave(action.do.partition(": ")[2])

        match action.do.partition(": ")[0]:
            case "task":
                self._kept = asyncio.create_task(leaves())
                await left.wait()
            case "awaited task":
                await asyncio.create_task(leaves())
            case "callback":
                loop.call_soon(left.set)
                loop.call_soon(leave, action.do.partition(": ")[2])
                await left.wait()
            case "group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(leaves())
        return await super().step_async(CountAction(n=action.n), timeout_s, **more)


async def test_a_served_environment_may_leave_in_tasks_of_its_own(tmp_path: Path) -> None:
    with ServerProcess(f"{__name__}:Scattered", tmp_path, "--no-fsync") as server:
        async with ErrataClient(server.url) as one, ErrataClient(server.url) as other:
            for client in (one, other):
                await client.reset()
            for how in ("SystemExit", "exit without a status", "KeyboardInterrupt"):
                for place in ("task", "callback"):
                    assert (await one.step({"do": f"{place}: {how}"})).observation["text"] == ""
                for place in ("awaited task", "group"):
                    with pytest.raises(EnvironmentFailed):
                        await one.step({"do": f"{place}: {how}"})
                await other.step({"n": 1})
            assert one.t == 6 and other.t == 3
        assert server.process is not None and server.process.poll() is None


def test_the_main_task_of_a_server_may_exit() -> None:
    async def main() -> None:
        raise SystemExit(7)

    with pytest.raises(SystemExit) as caught:
        serving._run(main(), asyncio.new_event_loop)
    assert caught.value.code == 7


def test_a_signal_before_the_server_takes_signals_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.getsignal", lambda number: signal.default_int_handler)  # ignored under nohup

    async def main() -> None:
        asyncio.get_running_loop().call_soon(leave, "KeyboardInterrupt")
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        serving._run(main(), asyncio.new_event_loop)


def test_what_ends_no_call_is_kept_as_it_is() -> None:
    own = ValueError("its own")
    assert contained(own) is own and calling(int, "7") == 7
    for how in LEAVES:
        with pytest.raises(Exception) as caught:
            calling(leave, how)
        assert isinstance(caught.value, Exception)
        assert_named(how, text_of(caught.value))
