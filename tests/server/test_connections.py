"""More connections than there are descriptors for: silent ones are closed for those that ask."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fastapi import FastAPI

from errata_os import descriptors
from errata_protocol.errors import InvalidRequest
from errata_server.serve.connections import Connections
from errata_server.serve.server import Bind, _config, listen
from errata_server.settings import Settings

from .conftest import until
from .test_wire import make_app

MOST = 12
SOCKETS = 9

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A server with few places, and its clients."""

    def __init__(self, app: FastAPI) -> None:
        self.connections = Connections(MOST)
        self.app = app
        self.peers: list[Peer] = []
        self.address = ("", 0)

    async def connect(self) -> Peer:
        peer = await asyncio.open_connection(*self.address)
        self.peers.append(peer)
        return peer

    async def get(self, path: str = "/ready", peer: Peer | None = None) -> tuple[int, str]:
        reader, writer = peer or await self.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().lower()
        size = int(head.split("content-length: ")[1].split("\r\n")[0])
        return int(head.split()[1]), (await reader.readexactly(size)).decode()

    async def websocket(self) -> tuple[int, Peer]:
        reader, writer = await self.connect()
        key = base64.b64encode(b"0" * 16).decode()
        writer.write(
            "GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        return int(head.split()[1]), (reader, writer)

    async def until(self, count: int) -> None:
        await until(lambda: len(self.connections) == count)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    app = make_app(Settings())
    made = Served(app)
    made.app.state.errata.runtime.readiness.add(made.connections.trouble)
    bind = Bind(port=0)
    listening = listen(bind)
    made.address = listening.getsockname()[:2]
    server = uvicorn.Server(_config(app, bind, made.connections))
    running = asyncio.create_task(server._serve([listening]))
    yield made
    for _, writer in made.peers:
        writer.transport.abort()
    server.should_exit = True
    await running


async def closed(peer: Peer) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(peer[0].read(1), 60) == b""
    return True


async def test_a_silent_connection_is_closed_for_a_new_one_the_oldest_first(served: Served) -> None:
    silent = [await served.connect() for _ in range(3 * MOST)]
    assert await served.get() == (200, '{"status":"ready","reasons":[]}')
    for peer in silent[: 2 * MOST + 1]:
        assert await closed(peer)
    await served.until(MOST)
    assert not any(peer[0].at_eof() for peer in silent[2 * MOST + 1 :])
    assert served.connections.closed == 2 * MOST + 1


async def test_a_request_that_is_written_slowly_is_a_silent_connection(served: Served) -> None:
    slow = await served.connect()
    slow[1].write(b"GET /ready HTTP/1.1\r\nX-Slow: ")
    for _ in range(MOST):
        await served.connect()
    assert await closed(slow)


async def test_connections_between_two_requests_go_after_those_that_never_asked(served: Served) -> None:
    kept = await served.connect()
    assert (await served.get(peer=kept))[0] == 200
    silent = [await served.connect() for _ in range(MOST)]
    assert await closed(silent[0])
    assert (await served.get(peer=kept))[0] == 200
    for _ in range(MOST):  # each takes the place of a silent one, at the end that of the one that asked longest ago
        assert (await served.get())[0] == 200
    assert await closed(kept)


async def test_websockets_leave_places_for_requests_and_ready_says_why_they_are_refused(served: Served) -> None:
    sockets = [await served.websocket() for _ in range(SOCKETS)]
    assert [status for status, _ in sockets] == [101] * SOCKETS
    assert len(served.connections) == SOCKETS == served.connections.max_sockets
    status, answer = await served.get()
    assert status == 503 and "all 9 places for WebSockets are taken" in json.loads(answer)["reasons"][0]
    status, refused = await served.websocket()
    assert status == 503 and b"GET /ready" in await asyncio.wait_for(refused[0].read(), 60)
    for _ in range(3 * MOST):
        await served.connect()
    assert (await served.get("/health"))[0] == 200
    writer = sockets[0][1][1]
    writer.write(b"\x81\x8f\0\0\0\0" + b'{"type":"stat"}')  # they are open, all of them
    assert await asyncio.wait_for(sockets[0][1][0].read(1), 60) == b"\x81"
    writer.transport.abort()
    await served.until(MOST - 1)
    assert (await served.get())[0] == 200
    assert (await served.websocket())[0] == 101


async def test_connections_that_end_give_their_places_back(served: Served) -> None:
    for _ in range(3 * MOST):
        _, writer = await served.connect()
        writer.close()
        status, (_, socket) = await served.websocket()
        assert status == 101
        socket.transport.abort()
        await served.until(0)
    assert served.connections.closed == 0


# -- how descriptors are divided ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [256, 1024, 1100, 4096, 20_000, 65_536])
@pytest.mark.parametrize("commands", [0, 48, 2400])
def test_what_is_divided_is_less_than_the_limit(limit: int, commands: int) -> None:
    budget = descriptors.checked(limit, commands)
    left = limit - budget.commands - budget.connections
    assert left >= descriptors.JOURNAL_AND_LOOP + limit // descriptors.ENVIRONMENTS
    assert budget.commands <= commands
    assert budget.connections >= descriptors.LEAST_CONNECTIONS
    assert budget.commands >= min(commands, descriptors.LEAST_FOR_COMMANDS * 3 // 4)


@pytest.mark.parametrize("commands", [0, 2400])
def test_the_least_limit_is_the_least(commands: int) -> None:
    least = descriptors.least(commands)
    descriptors.checked(least, commands)
    with pytest.raises(InvalidRequest, match=rf"\(ulimit -n\) is {least - 1}, .* needs {least} at least: raise it"):
        descriptors.checked(least - 1, commands)


@pytest.mark.parametrize(("connections", "commands"), [(10_000, 2400), (100, 0), (50_000, 2400)])
def test_the_limit_that_is_enough_is_enough(connections: int, commands: int) -> None:
    budget = descriptors.budget(descriptors.enough(connections, commands), commands)
    assert budget.commands == commands
    assert budget.connections in (connections, connections + 1)
