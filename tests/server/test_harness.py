"""Upstream's ``/harness`` route, which drives an agentic harness for one client, on one of our sessions.

A socket's context ends when its endpoint has returned, so what is looked at after it is what is left.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server import create_app as upstream_create_app
from openenv.core.env_server.types import Observation
from openenv.core.harness import AgenticHarnessAdapter, HarnessConfig, HarnessEvent, HarnessEventType
from openenv.core.harness.environment import HarnessAction, HarnessEnvironment

from errata_server import adopt
from errata_server.app import create_app


class Parrot(AgenticHarnessAdapter):
    """A harness without a process: says again what it is told, and does a few other things when told so."""

    def __init__(self) -> None:
        super().__init__(HarnessConfig(name="parrot", command=["parrot"], session_timeout_s=30.0))
        self.running = False
        self.turns = 0

    async def start(self, working_directory: str) -> None:
        self.running = True

    async def stop(self) -> None:
        self.running = False

    async def inject_tools(self, tools: list[Any], bridge_url: str | None = None) -> None:
        pass

    async def is_alive(self) -> bool:
        return self.running

    async def send_message_streaming(self, message: str) -> AsyncIterator[HarnessEvent]:
        self.turns += 1
        yield HarnessEvent(type=HarnessEventType.TEXT_OUTPUT, data={"text": message})
        if message == "crash":
            raise OSError("the token is secret")
        if message == "stop in between":
            return
        while message == "talk on":
            yield HarnessEvent(type=HarnessEventType.LLM_CHUNK, data={"content": "word", "index": 0})
        yield HarnessEvent(type=HarnessEventType.TURN_COMPLETE, data={"response": f"{self.turns}: {message}"})


class ParrotEnvironment(HarnessEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    closed = 0

    def __init__(self) -> None:
        super().__init__(Parrot())

    def close(self) -> None:
        super().close()
        type(self).closed += 1


def ours() -> FastAPI:
    return create_app(
        ParrotEnvironment, HarnessAction, Observation, env_name="parrot", max_concurrent_envs=1, mode="production"
    )


def adopted() -> FastAPI:
    stock = upstream_create_app(ParrotEnvironment, HarnessAction, Observation, env_name="parrot", max_concurrent_envs=1)
    return adopt(stock)


@pytest.fixture(
    params=[(ours, ""), (ours, "/parrot"), (adopted, ""), (ours, "/mounted")], ids=lambda p: f"{p[0].__name__}{p[1]}"
)
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TestClient, str, Any]]:
    """A client, the path of the route, and our server object."""
    monkeypatch.setenv("OPENENV_MODE", "production")
    made: Callable[[], FastAPI]
    made, prefix = request.param
    app = made()
    if prefix == "/mounted":
        outer = FastAPI()
        outer.mount(prefix, app)
        with TestClient(outer) as client:
            yield client, f"{prefix}/harness", app.state.errata
        return
    with TestClient(app) as client:
        yield client, f"{prefix}/harness", app.state.errata


def say(ws: Any, content: str) -> list[dict[str, Any]]:
    """Send a message and return the events of its turn."""
    ws.send_json({"type": "message", "content": content})
    events = [ws.receive_json()]
    while events[-1]["type"] not in ("turn_complete", "error"):
        events.append(ws.receive_json())
    return events


def test_a_message_is_answered_by_events_that_end_with_turn_complete(served: tuple[TestClient, str, Any]) -> None:
    client, path, server = served
    with client.websocket_connect(path) as ws:
        started = ws.receive_json()
        assert (started["type"], started["data"]["harness"]) == ("session_started", "parrot")
        assert server.sessions.table.get(started["data"]["session_id"]) is not None
        for turn, content in ((1, "hello"), (2, "again")):
            events = say(ws, content)
            assert [event["type"] for event in events] == ["text_output", "turn_complete"]
            assert events[-1]["data"]["response"] == f"{turn}: {content}"
        assert (server.active_sessions, server._sessions) == (1, {})  # ours; upstream's table stays empty


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "INVALID_JSON"),
        ('{"type": "message"}', "VALIDATION_ERROR"),
        ('{"type": "step", "content": "x"}', "VALIDATION_ERROR"),
        ("[1]", "VALIDATION_ERROR"),
    ],
)
def test_a_malformed_frame_starts_no_turn_and_the_socket_goes_on(frame: str, code: str) -> None:
    with TestClient(ours()) as client, client.websocket_connect("/harness") as ws:
        ws.receive_json()
        ws.send_text(frame)
        error = ws.receive_json()
        assert (error["type"], error["data"]["code"]) == ("protocol_error", code)
        assert say(ws, "hello")[-1]["data"]["response"] == "1: hello"


def test_places_are_held_while_a_socket_is_open_and_given_back(served: tuple[TestClient, str, Any]) -> None:
    client, path, server = served
    with client.websocket_connect(path) as ws:
        assert ws.receive_json()["type"] == "session_started"
        with client.websocket_connect(path) as refused:
            error = refused.receive_json()
            assert (error["type"], error["data"]["code"]) == ("error", "CAPACITY_REACHED")
        assert say(ws, "hello")[-1]["type"] == "turn_complete"
    assert server.active_sessions == 0
    with client.websocket_connect(path) as ws:
        assert ws.receive_json()["type"] == "session_started"


def test_a_client_that_leaves_in_the_middle_of_a_turn_ends_its_session(served: tuple[TestClient, str, Any]) -> None:
    client, path, server = served
    closed = ParrotEnvironment.closed
    with client.websocket_connect(path) as ws:
        ws.receive_json()
        ws.send_json({"type": "message", "content": "talk on"})
        assert ws.receive_json()["type"] == "text_output"
        assert ws.receive_json()["type"] == "llm_chunk"
        assert server.active_sessions == 1
    assert (server.active_sessions, server._sessions, ParrotEnvironment.closed) == (0, {}, closed + 1)


@pytest.mark.parametrize(("content", "told"), [("crash", "turn failed"), ("stop in between", "TURN_COMPLETE")])
def test_a_harness_that_fails_ends_its_session_and_no_secret_is_told(content: str, told: str) -> None:
    app = ours()
    with TestClient(app) as client:
        with client.websocket_connect("/harness") as ws:
            ws.receive_json()
            error = say(ws, content)[-1]
            assert (error["type"], error["data"]["recoverable"]) == ("error", False)
            assert told in error["data"]["message"] and "secret" not in json.dumps(error)
            assert ws.receive()["type"] == "websocket.close"
        assert app.state.errata.active_sessions == 0


def test_a_harness_is_served_in_production_mode_only() -> None:
    app = create_app(ParrotEnvironment, HarnessAction, Observation, env_name="parrot", mode="simulation")
    assert not any(getattr(route, "path", None) == "/harness" for route in app.router.routes)
