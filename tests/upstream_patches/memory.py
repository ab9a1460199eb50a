"""Plays many episodes over one attached socket to a patched OpenEnv server, and prints what it holds of them as JSON.

Run by the Python and with the ``PYTHONPATH`` of the OpenEnv to be looked at; imports nothing of ours::

    python memory.py EPISODES STEPS SIZE
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server import Action, Environment, HTTPEnvServer, Observation, State
from websockets.sync.client import connect

EPISODES, STEPS, SIZE = map(int, sys.argv[1:])


class TextObservation(Observation):
    """Something to keep."""

    text: str = ""


class TextEnvironment(Environment[Action, TextObservation, State]):
    """Answers with a text of a fixed size."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        return TextObservation(text="x" * SIZE)

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return TextObservation(text="x" * SIZE)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


app = FastAPI()
env_server = HTTPEnvServer(TextEnvironment, Action, TextObservation, max_concurrent_envs=4)
env_server.register_routes(app)
rpc = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
session_id = TestClient(app).post("/mcp", json=rpc).json()["result"]["session_id"]
listening = socket.create_server(("127.0.0.1", 0))
server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()

most_bytes = delivered = 0
early = 0
with connect(f"ws://127.0.0.1:{listening.getsockname()[1]}/ws?session_id={session_id}", compression=None) as ws:
    ws.send('{"type":"capabilities"}')
    assert "request_id" in json.loads(ws.recv())["data"]["extensions"]
    (log,) = env_server._session_deliveries.values()
    for episode in range(EPISODES):
        for t in range(STEPS + 1):
            kind = "step" if t else "reset"
            ws.send(f'{{"type":"{kind}","data":{{}},"request_id":"{episode:04}-{t:02}"}}')
            delivered += f'"t":{t}' in ws.recv(decode=True)[:120]
            kept = {id(frame): len(frame) for frame in (log._frame, log._reply)}  # one frame, held twice
            most_bytes = max(most_bytes, sum(kept.values()))
        if episode == 9:
            early = most_bytes

print(
    json.dumps(
        {
            "deliveries": delivered,
            "most_bytes": most_bytes,
            "most_bytes_after_10_episodes": early,
        }
    )
)
