"""Idle connections of strangers, more than the server has descriptors: sandboxes, journal and ``/ready`` go on."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from errata_client import Connection, ErrataClient
from errata_protocol.errors import ServiceError
from errata_server.process import ServerProcess

pytestmark = [pytest.mark.chaos, pytest.mark.sandbox]

LIMIT, FLOOD, FLOODS = 1100, 1300, 5
SESSIONS = 6
TOKEN = "flooded"


def limited(tmp_path: Path, descriptors: int) -> Path:
    """Return an interpreter whose process can open so many files."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nulimit -n {descriptors}\nexec {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o755)
    return script


def ready(url: str) -> tuple[int, list[str]]:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10.0) as answer:
            return answer.status, json.loads(answer.read())["reasons"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["reasons"]


def descriptors_of(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def test_a_flood_of_idle_sockets_stops_no_sandbox(tmp_path: Path) -> None:
    stepped = dict.fromkeys(range(SESSIONS), 0)
    worst = 0
    env = {"ERRATA_TOKEN": TOKEN}
    python = limited(tmp_path, LIMIT)
    started = asyncio.to_thread(ServerProcess, "terminal", tmp_path / "data", env=env, python=python, start_s=120.0)
    with await started as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))

        async def step(client: ErrataClient, place: int, times: int) -> None:
            for _ in range(times):
                k = stepped[place] + 1
                async with asyncio.timeout(60.0):
                    said = await client.step({"command": "echo x >> f; wc -l < f"})
                assert said.observation["stdout"] == f"{k}\n", said
                stepped[place] = k

        async def until(client: ErrataClient, place: int, end: asyncio.Event) -> None:
            while not end.is_set():
                await step(client, place, 1)

        async with Connection(server.url, headers={"Authorization": f"Bearer {TOKEN}"}) as connection:
            clients = [ErrataClient(connection=connection, message_timeout_s=60.0) for _ in range(SESSIONS)]
            for client in clients:
                await client.reset()
            for _ in range(FLOODS):
                end = asyncio.Event()
                stepping = [asyncio.create_task(until(client, at, end)) for at, client in enumerate(clients)]
                idle: list[socket.socket] = []
                for n in range(FLOOD):
                    one = socket.socket()
                    one.setblocking(False)
                    one.connect_ex(address)
                    idle.append(one)
                    if n % 100 == 0:
                        await asyncio.sleep(0)
                        worst = max(worst, descriptors_of(server.process.pid))
                before = dict(stepped)
                while any(stepped[at] < before[at] + 3 for at in stepped):  # each goes on while all of them are open
                    assert not any(task.done() for task in stepping), [task for task in stepping if task.done()]
                    worst = max(worst, descriptors_of(server.process.pid))
                    assert await asyncio.to_thread(ready, server.url) == (200, [])
                end.set()
                await asyncio.gather(*stepping)
                for one in idle:
                    one.close()
            late = ErrataClient(connection=connection, message_timeout_s=60.0)
            await late.reset()
            stepped[SESSIONS] = 0
            await step(late, SESSIONS, 2)
        assert worst < LIMIT - 100
        log = "".join(server.log)
        assert "Too many open files" not in log and " CRITICAL " not in log and " ERROR " not in log, log[-4000:]
        assert "connections are open" in log
        assert server.stop() == 0


@pytest.mark.parametrize("target", ["terminal", "tests.chaos.environments:TaggedCounter"])
def test_too_low_a_limit_is_refused_at_start(tmp_path: Path, target: str) -> None:
    with pytest.raises(ServiceError, match=r"\(ulimit -n\) is 64, .* needs \d+ at least: raise it with ulimit -n 4096"):
        ServerProcess(target, tmp_path / "data", python=limited(tmp_path, 64))
