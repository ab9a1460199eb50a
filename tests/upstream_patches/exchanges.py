"""Plays the exchanges of a proposal to a patched OpenEnv server, and prints the text with what the server answers.

Run by the Python and with the ``PYTHONPATH`` of the OpenEnv to be looked at; imports nothing of ours::

    python exchanges.py < proposal.md

A block of code with the name ``exchange`` has a line for each message: ``>`` what the client sends, ``<`` what it
receives, ``# socket: PATH`` opens a socket (SESSION is the session's id), ``# lost`` closes it, with what was not yet
received. Other lines that begin with ``#`` are comments. All sockets of a block are in one session.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import socket
import sys
import threading
import time
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from openenv.core.env_server import Action, Environment, HTTPEnvServer, Observation, State
from websockets.sync.client import connect


class TallyAction(Action):
    """Add ``n``."""

    n: int


class TallyObservation(Observation):
    """The sum so far."""

    total: int = 0


class TallyEnvironment(Environment[TallyAction, TallyObservation, State]):
    """Adds numbers, and refuses negative ones."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._total = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TallyObservation:
        self._total = 0
        self._state = State(episode_id=episode_id)
        return TallyObservation()

    def step(self, action: TallyAction, timeout_s: float | None = None, **kwargs: Any) -> TallyObservation:
        if action.n < 0:
            raise ValueError("n is negative")
        self._total += action.n
        self._state.step_count += 1
        return TallyObservation(total=self._total, reward=float(action.n))

    @property
    def state(self) -> State:
        return self._state


def played(block: str, env_server: HTTPEnvServer, address: str) -> str:
    """Return a block with the server's answers in place of those that it has."""
    numbers = itertools.count(1)
    secrets.token_hex = lambda nbytes=None: f"ep-{next(numbers)}"  # names of episodes: the same in each run
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
    session_id = httpx.post(f"http://{address}/mcp", json=rpc, trust_env=False).json()["result"]["session_id"]
    said: list[str] = []
    with contextlib.ExitStack() as sockets:
        ws: Any = None
        for line in block.splitlines():
            if line.startswith("< "):
                said.append("< " + str(ws.recv(30)))
                continue
            said.append(line)
            if line.startswith("> "):
                ws.send(line[2:])
            elif line.startswith("# socket: "):
                path = line[10:].split()[0].replace("SESSION", session_id)
                while session_id in env_server._session_websocket_attachments:
                    time.sleep(0.01)  # until the server is done with the socket that was lost
                ws = sockets.enter_context(connect(f"ws://{address}{path}", proxy=None))
            elif line.startswith("# lost"):
                ws.close()
    return "\n".join(said) + "\n"


def main() -> None:
    """Play standard input to a server of our own."""
    app = FastAPI()
    env_server = HTTPEnvServer(TallyEnvironment, TallyAction, TallyObservation, max_concurrent_envs=8)
    env_server.register_routes(app)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    block = re.compile(r"(?<=```exchange\n).*?(?=```)", re.S)
    sys.stdout.write(block.sub(lambda found: played(found[0], env_server, address), sys.stdin.read()))


if __name__ == "__main__":
    main()
