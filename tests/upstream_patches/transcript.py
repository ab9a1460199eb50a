"""Plays client messages to an OpenEnv server, and prints what it answers as JSON.

Run by the Python and with the ``PYTHONPATH`` of the OpenEnv to be looked at; imports nothing of ours::

    python transcript.py record  # what OpenEnv's own clients send to it, one JSON line a connection or request
    python transcript.py play    # the answers to such lines on stdin

A line is ``{"app", "ws", "frames"}`` or ``{"app", "method", "path", "body"}``. SESSION in it stands for the session
that was made last.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import sys
import threading
import time
import uuid
from typing import Any

import openenv
import uvicorn
from fastapi.testclient import TestClient
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    ListToolsAction,
    ListToolsObservation,
    Observation,
    State,
    Tool,
    create_app,
)
from starlette.websockets import WebSocketDisconnect

numbers = itertools.count(1)
uuid.uuid4 = lambda: uuid.UUID(int=next(numbers), version=4)  # session ids: the same in each run
SESSION_ID = re.compile(r"00000000-0000-4000-8000-[0-9a-f]{12}")


class WordAction(Action):
    """Say a word."""

    word: str = ""
    factor: float = 1.0


class WordObservation(Observation):
    """What was said so far."""

    words: list[str] = []  # noqa: RUF012
    size: float = 0.0


class WordEnvironment(Environment[WordAction, WordObservation, State]):
    """Collects words; refuses one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._words: list[str] = []
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> WordObservation:
        self._words = []
        self._state = State(episode_id=episode_id, step_count=0)
        return WordObservation(metadata={"seed": seed} if seed is not None else {})

    def step(self, action: WordAction, timeout_s: float | None = None, **kwargs: Any) -> WordObservation:
        if action.word == "no":
            raise ValueError("the word is refused: né")
        self._words.append(action.word)
        self._state.step_count += 1
        size = len(action.word) * action.factor
        return WordObservation(words=list(self._words), size=size, reward=size, done=action.word == "end")

    @property
    def state(self) -> State:
        return self._state


class ToolEnvironment(Environment[Action, Observation, State]):
    """Has one tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return CallToolObservation(tool_name="none")

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=[Tool(name="echo", description="Repeats", input_schema={})])
        if action.tool_name != "echo":
            raise ValueError(f"no tool {action.tool_name}")
        return CallToolObservation(tool_name="echo", result=[action.arguments, 1e-7, "né", None])

    @property
    def state(self) -> State:
        return State()


def apps() -> dict[str, Any]:
    """Return the applications by name."""
    words, tools = (
        (WordEnvironment, WordAction, WordObservation),
        (ToolEnvironment, CallToolAction, CallToolObservation),
    )
    return {
        "words": create_app(*words, env_name="words", max_concurrent_envs=4),
        "tools": create_app(*tools, env_name="tools", max_concurrent_envs=4),
        "production": create_app(*words, env_name="words", max_concurrent_envs=4, mode="production"),
    }


# -- play -------------------------------------------------------------------------------------------------------------


def played(line: dict[str, Any], client: TestClient) -> Any:
    """Return the answers to one line: texts of frames, or status, type and text of a body."""
    if "ws" not in line:
        body = line["body"].encode() if line["body"] is not None else None
        answer = client.request(
            line["method"], line["path"], content=body, headers={"content-type": "application/json"}
        )
        return [answer.status_code, answer.headers.get("content-type"), answer.text]
    answers = []
    try:
        with client.websocket_connect(line["ws"]) as ws:
            for frame in line["frames"]:
                ws.send_text(frame)
                answers.append(ws.receive_text())
    except WebSocketDisconnect as closed:
        answers.append(f"closed {closed.code}")
    return answers


# -- record -----------------------------------------------------------------------------------------------------------


def tapped(name: str, app: Any, lines: list[dict[str, Any]]) -> Any:
    """Return an ASGI application that notes what clients send to another."""

    async def tap(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "") + ("?" + scope["query_string"].decode() if scope.get("query_string") else "")
        line: dict[str, Any] = {"app": name}
        if scope["type"] == "websocket":
            lines.append(line | {"ws": path, "frames": []})
        elif scope["type"] == "http":
            lines.append(line | {"method": scope["method"], "path": path, "body": None})
        line = lines[-1] if scope["type"] != "lifespan" else {}

        async def noted() -> Any:
            message = await receive()
            if message["type"] == "websocket.receive":
                line["frames"].append(message["text"])
            elif message["type"] == "http.request" and message.get("body"):
                line["body"] = (line["body"] or "") + message["body"].decode()
            return message

        await app(scope, noted, send)

    return tap


def recorded() -> list[dict[str, Any]]:
    """Return what OpenEnv's own clients send."""
    from openenv import GenericEnvClient
    from openenv.core.mcp_client import MCPToolClient

    lines: list[dict[str, Any]] = []
    urls = {}
    for name, app in apps().items():
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(tapped(name, app, lines), log_level="warning"))
        threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True).start()
        while not server.started:
            time.sleep(0.01)
        urls[name] = f"http://127.0.0.1:{bound.getsockname()[1]}"

    async def use() -> None:
        async with GenericEnvClient(base_url=urls["words"]) as env:
            await env.reset(seed=3, episode_id="mine")
            for word in ("one", "né \U0001f600", "end"):
                await env.step({"word": word, "factor": 0.1})
            await env.state()
            for wrong in ({"word": "no"}, {"wrong": 1}, {"word": 5}):
                try:
                    await env.step(wrong)
                except RuntimeError:
                    continue
            await env.reset()
            await env.step({"word": "again"})
        async with MCPToolClient(base_url=urls["tools"]) as env:
            await env.reset()
            await env.list_tools()
            await env.call_tool("echo", text="né")
        async with MCPToolClient(base_url=urls["tools"], mode="production") as env:
            await env.list_tools()
            await env.call_tool("echo", text="né")

    asyncio.run(use())
    return lines


if __name__ == "__main__":
    if sys.argv[1] == "record":
        for line in recorded():
            print(SESSION_ID.sub("SESSION", json.dumps(line, ensure_ascii=False)))
    else:
        clients = {name: TestClient(app, raise_server_exceptions=False) for name, app in apps().items()}
        answers, session = [], ""
        for text in sys.stdin:
            line = json.loads(text.replace("SESSION", session))
            answers.append(played(line, clients[line["app"]]))
            if "openenv/session/create" in text:
                session = SESSION_ID.findall(json.dumps(answers[-1]))[0]
        print(json.dumps({"openenv": openenv.__file__, "answers": answers}))
