"""Plays the exchanges of a proposal to a patched OpenEnv server, and prints the text with what the server answers.

Run by the Python and with the ``PYTHONPATH`` of the OpenEnv to be looked at; imports nothing of ours::

    python exchanges.py < proposal.md

A block of code with the name ``exchange`` has a line for each message: ``>`` what the client sends, ``<`` what it
receives, ``# socket: PATH`` opens a socket (SESSION is the session's id), ``# lost`` closes it, with what was not yet
received. Other lines that begin with ``#`` are comments. All sockets of a block are in one session.
"""

from __future__ import annotations

import itertools
import re
import secrets
import sys
from typing import Any

from fastapi.testclient import TestClient
from openenv.core.env_server import Action, Environment, Observation, State, create_app


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


def played(block: str, client: TestClient) -> str:
    """Return a block with the server's answers in place of those that it has."""
    numbers = itertools.count(1)
    secrets.token_hex = lambda nbytes=None: f"ep-{next(numbers)}"  # names of episodes: the same in each run
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
    session_id = client.post("/mcp", json=rpc).json()["result"]["session_id"]
    said: list[str] = []
    socket: Any = None
    for line in block.splitlines():
        if line.startswith("< "):
            said.append("< " + socket.receive_text())
            continue
        said.append(line)
        if line.startswith("> "):
            socket.send_text(line[2:])
        elif line.startswith("# socket: "):
            socket = client.websocket_connect(line[10:].split()[0].replace("SESSION", session_id)).__enter__()
        elif line.startswith("# lost"):
            socket.__exit__(None, None, None)
    if socket is not None:
        socket.__exit__(None, None, None)
    return "\n".join(said) + "\n"


if __name__ == "__main__":
    app = create_app(TallyEnvironment, TallyAction, TallyObservation, env_name="tally", max_concurrent_envs=8)
    with TestClient(app) as served:
        block = re.compile(r"(?<=```exchange\n).*?(?=```)", re.S)
        sys.stdout.write(block.sub(lambda found: played(found[0], served), sys.stdin.read()))
