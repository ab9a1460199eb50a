"""Proposals A and C: patched OpenEnv and Errata, as client and as server of each other (PROTOCOL A7)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from errata_client import ErrataClient

from ..server.local_server import LocalServer
from .trees import ROOT, apply, run, unpacked

pytestmark = [pytest.mark.upstream_patches, pytest.mark.timeout(300)]

PATCHES = ROOT / "rfcs" / "upstream"
STEPS = 60
PLAY = """
import asyncio, json, sys
from websockets.asyncio.client import ClientConnection
from openenv.core.generic_client import GenericEnvClient

url, cut_before, cut_after, steps = sys.argv[1], *(set(json.loads(one)) for one in sys.argv[2:4]), int(sys.argv[4])
sent, send = [], ClientConnection.send


async def cutting(self, text, *more, **named):
    if json.loads(text)["type"] not in ("reset", "step"):
        return await send(self, text, *more, **named)
    sent.append(json.loads(text))
    if len(sent) in cut_before:
        self.transport.abort()
    await send(self, text, *more, **named)
    if len(sent) in cut_after:
        await asyncio.sleep(0)
        self.transport.abort()


async def main():
    ClientConnection.send = cutting
    async with GenericEnvClient(base_url=url, recovery_timeout_s=120) as env:
        await env.reset()
        heard = [(await env.step({"n": n})).observation["n"] for n in range(1, steps + 1)]
        state = await env.state()
        count = state["step_count"] if isinstance(state, dict) else state.step_count
        print(json.dumps([heard, count, len(sent), [one.get("request_id") for one in sent]]))


asyncio.run(main())
"""


@pytest.mark.parametrize("letters", ["a", "ac"])
def test_a_patched_client_loses_and_repeats_nothing(letters: str, tmp_path: Path) -> None:
    tree = unpacked("wheel", tmp_path / "tree")
    for letter in letters:
        (patch,) = PATCHES.glob(f"{letter}-*.patch")
        apply(tree, patch)
    after = [3, 4, 9, 20, 21, 40]
    before = [12, 30, 31] if "c" in letters else []  # A alone repeats no request that did not arrive
    with LocalServer("tests.server.environments:CountEnvironment", tmp_path / "data") as server:
        done = run(tree, "-c", PLAY, server.url, json.dumps(before), json.dumps(after), str(STEPS))
    assert done.returncode == 0, done.stderr[-4000:]
    heard, count, sent, ids = json.loads(done.stdout.splitlines()[-1])
    assert heard == [n * (n + 1) // 2 for n in range(1, STEPS + 1)]
    assert count == STEPS
    if "c" in letters:
        assert sent >= STEPS + 1 + len(before)
        assert len({*ids}) == STEPS + 1 and None not in ids
    else:
        assert sent == STEPS + 1


SERVE = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Add(Action):
    n: int


class Sum(Observation):
    n: int = 0


class Adding(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.made = State(episode_id=None, step_count=0)
        self.n = 0

    def reset(self, seed=None, episode_id=None, **more):
        self.n, self.made = 0, State(episode_id=episode_id, step_count=0)
        return Sum(n=0)

    def step(self, action, timeout_s=None, **more):
        if action.n < 0:
            raise ValueError("n is negative")
        self.n += action.n
        self.made.step_count += 1
        return Sum(n=self.n)

    @property
    def state(self):
        return self.made


uvicorn.run(create_app(Adding, Add, Sum, max_concurrent_envs=4), fd=int(sys.argv[1]), log_level="warning")
"""


async def test_our_client_loses_and_repeats_nothing_on_a_patched_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = unpacked("wheel", tmp_path / "tree")
    for patch in sorted((*PATCHES.glob("a-*.patch"), *PATCHES.glob("c-*.patch"))):
        apply(tree, patch)
    sent: list[dict[str, Any]] = []
    send = ClientConnection.send

    async def cutting(self: ClientConnection, text: Any, *more: Any, **named: Any) -> None:
        message = json.loads(text)
        if message["type"] == "step":
            sent.append(message)
            if len(sent) in (6, 17, 18):
                self.transport.abort()
        await send(self, text, *more, **named)
        if message["type"] == "step" and len(sent) in (3, 4, 25):
            self.transport.abort()

    monkeypatch.setattr(ClientConnection, "send", cutting)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        command = [sys.executable, "-c", SERVE, str(number)]
        environment = {"PATH": "/usr/bin", "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(command, cwd=tree, env=environment, pass_fds=[number]) as server:
            try:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                client = ErrataClient[Any, Any, Any](url, durable=True, connect_timeout_s=60.0, message_timeout_s=60.0)
                await client.reset()
                heard = [(await client.step({"n": n})).observation["n"] for n in range(1, STEPS + 1)]
                with pytest.raises(RuntimeError, match="n is negative"):
                    await client.step({"n": -1})
                assert client.t == STEPS and len([one.t for one in await client.history()]) == STEPS + 1
                state = await client.state()
                await client.close()
            finally:
                server.terminate()
    assert heard == [n * (n + 1) // 2 for n in range(1, STEPS + 1)]
    assert (state["step_count"] if isinstance(state, dict) else state.step_count) == STEPS
    assert len(sent) > STEPS + 1 and len({one["request_id"] for one in sent}) == STEPS + 1
