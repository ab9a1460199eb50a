"""Peers that are slow or never read, on the protocols that ``errata serve`` runs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from openenv.core.env_server.http_server import HTTPEnvServer
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Host, Mount, Router, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from errata_server import adopt
from errata_server.app import create_fastapi_app
from errata_server.doors.mux.socket import MuxSocket
from errata_server.doors.plain_socket import PlainSocket
from errata_server.serve import uvicorn_protocols
from errata_server.serve.connections import Connections
from errata_server.serve.server import Bind, _config
from errata_server.settings import Settings
from tests.garbage import no_collections

from .conftest import simulated, until
from .environments import CountAction, CountEnvironment, CountObservation

PING = b"\x89\xfd\0\0\0\0" + b"x" * 125
STEP = b"\x81\x8f\0\0\0\0" + b'{"type":"stat"}'
ENOUGH = 64 * 2**20
"""Bytes after which a server that would read for ever is found out; socket buffers hold far less."""


def make_app(settings: Settings | None = None) -> FastAPI:
    return create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, max_concurrent_envs=4, runtime=simulated(settings)
    )


@contextlib.asynccontextmanager
async def serving(
    app: Starlette, door: type[uvicorn_protocols.BoundedSocket] = uvicorn_protocols.DetachableSocket
) -> AsyncIterator[tuple[str, int]]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=uvicorn_protocols.BoundedHttp, ws=door, log_config=None, lifespan="off",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve([listening]))
    yield listening.getsockname()[:2]
    server.should_exit = True
    await running


@pytest.fixture(params=[uvicorn_protocols.BoundedSocket, uvicorn_protocols.DetachableSocket])
async def address(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, int]]:
    """Where a server answers that gives 0.3 s for a request's headers."""
    monkeypatch.setattr(uvicorn_protocols, "HEADERS_S", 0.3)
    async with serving(make_app(), request.param) as where:
        yield where


@pytest.mark.parametrize(
    "start", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nX-Slow: ", b"POST /mcp HTTP/1.1\r\nHos"]
)
async def test_a_request_that_never_comes_is_hung_up_on(address: tuple[str, int], start: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(start)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_a_second_request_that_never_comes_is_hung_up_on(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"}"), 60)).startswith(b"HTTP/1.1 200")
    writer.write(b"GET /health HTTP/1.1\r\nX-")
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


@pytest.mark.parametrize("protocol", ["", "openenv.mux.v1"])
async def test_a_refused_handshake_is_answered_and_no_error_of_the_server(
    caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    app = make_app(Settings(token=SecretStr("secret")))
    async with serving(app) as (host, port):
        subprotocols = [Subprotocol(protocol)] if protocol else None
        with caplog.at_level("INFO"), pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://{host}:{port}/ws", subprotocols=subprotocols):
                pass
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["code"] == "UNAUTHORIZED"
    assert [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


async def _websocket(
    address: tuple[str, int], *, mux: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address, limit=1024)
    key = base64.b64encode(b"0" * 16).decode()
    protocol = "Sec-WebSocket-Protocol: openenv.mux.v1\r\n" if mux else ""
    writer.write(
        f"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{protocol}"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    assert b" 101 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    return reader, writer


async def test_a_socket_outlives_the_time_for_its_headers(address: tuple[str, int]) -> None:
    reader, writer = await _websocket(address)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 1.0)
    writer.write(STEP)
    assert (await asyncio.wait_for(reader.read(1), 60)) == b"\x81"
    writer.close()


@pytest.mark.parametrize("frames", [PING * 1000, STEP * 1000, (STEP + PING * 50) * 100], ids=["pings", "steps", "both"])
async def test_who_never_reads_is_not_read_either(address: tuple[str, int], frames: bytes) -> None:
    _, writer = await _websocket(address)
    sent = 0
    with pytest.raises(TimeoutError):
        while sent < ENOUGH:
            writer.write(frames)
            await asyncio.wait_for(writer.drain(), 2.0)
            sent += len(frames)
    assert sent < ENOUGH
    writer.transport.abort()


def _frame(message: str) -> bytes:
    return bytes((0x81, 0x80 | len(message))) + bytes(4) + message.encode()


def _read(q: int) -> bytes:
    return _frame(f'{{"q":{q},"type":"capabilities"}}')


@pytest.mark.parametrize("full", [False, True], ids=["idle", "with_full_buffers"])
async def test_sessions_of_a_silent_peer_are_detached_by_the_ping(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    sockets: list[uvicorn_protocols.BoundedSocket] = []
    made = uvicorn_protocols.BoundedSocket.connection_made
    monkeypatch.setattr(
        uvicorn_protocols.BoundedSocket,
        "connection_made",
        lambda new, transport: (sockets.append(new), made(new, transport)),
    )

    def figure(name: str) -> str:
        lines = app.state.errata.runtime.metrics.text().decode().splitlines()
        return next(line.split()[1] for line in lines if line.startswith(name))

    async with serving(app) as address:
        _, writer = await _websocket(address, mux=True)
        writer.transport.pause_reading()  # as if its machine were gone
        for number in range(2):
            key = f"n4Jr6Lm8Po0Qs2Tu4Vw6X{number}"
            writer.write(_frame(f'{{"sid":"{number + 1:032x}","type":"open","data":{{"key":"{key}"}}}}'))
        await until(lambda: figure("errata_sessions_active") == "2.0")
        assert figure("errata_sessions_detached") == "0.0"
        if full:
            writer.write(_read(1) * 100_000)
            await until(lambda: sockets[0].transport.get_write_buffer_size() > 0)
        sockets[0].keepalive_timeout()  # uvicorn calls it 20 s after a ping, which it sends every 20 s
        await until(lambda: figure("errata_sessions_detached") == "2.0")
        assert figure("errata_sessions_active") == "2.0", "their instances are kept"
        writer.transport.abort()


async def test_a_peer_that_takes_nothing_is_cut_when_its_socket_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocols, "CLOSE_S", 0.2)
    lost: list[object] = []
    monkeypatch.setattr(Connections, "lost", lambda connections, gone: lost.append(gone))

    async def send_much(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_bytes(bytes(2**24))

    async with serving(Starlette(routes=[WebSocketRoute("/ws", send_much)])) as address:
        _, writer = await _websocket(address)
        writer.transport.pause_reading()
        await until(lambda: len(lost) == 1)
        writer.transport.abort()


async def _answered(reader: asyncio.StreamReader, reads: int) -> list[int]:
    answered: list[int] = []
    while len(answered) < reads:
        head = await asyncio.wait_for(reader.readexactly(2), 60)
        size = int.from_bytes(await reader.readexactly(2)) if head[1] == 126 else head[1]
        told = await reader.readexactly(size)
        if head[0] == 0x81:
            found = json.loads(told)
            answered += [one["q"] for one in (found if isinstance(found, list) else [found])]
    return sorted(answered)


@pytest.mark.parametrize("cut", [0, 1, 9, 40], ids=lambda cut: f"cut_after_{cut}")
async def test_messages_that_come_together_are_answered_each(address: tuple[str, int], cut: int) -> None:
    reader, writer = await _websocket(address, mux=True)
    sent = _read(1) + PING + _read(2) + _read(3)
    writer.write(sent[:cut])
    await writer.drain()
    writer.write(sent[cut:] + _read(4))
    assert await _answered(reader, 4) == [1, 2, 3, 4]
    writer.close()


async def test_text_that_is_no_utf8_closes_a_multiplexed_socket_too(address: tuple[str, int]) -> None:
    reader, writer = await _websocket(address, mux=True)
    writer.write(_read(1) + b"\x81\x81" + bytes(4) + b"\xff")
    told = await asyncio.wait_for(reader.read(), 60)
    assert (1007).to_bytes(2) in told
    writer.close()


async def test_who_never_reads_its_replies_is_not_read_either(address: tuple[str, int]) -> None:
    _, writer = await _websocket(address, mux=True)
    sent, frames = 0, _read(1) * 1000
    with pytest.raises(TimeoutError):
        while sent < ENOUGH:
            writer.write(frames)
            await asyncio.wait_for(writer.drain(), 2.0)
            sent += len(frames)
    assert sent < ENOUGH
    writer.transport.abort()


@pytest.mark.parametrize("protocol", ["", "openenv.mux.v1"])
@pytest.mark.parametrize("door", [uvicorn_protocols.BoundedSocket, uvicorn_protocols.DetachableSocket])
async def test_a_socket_that_is_gone_leaves_nothing_to_the_garbage_collector(
    door: type[uvicorn_protocols.BoundedSocket], protocol: str
) -> None:
    subprotocols = [Subprotocol(protocol)] if protocol else None
    of_a_socket = (uvicorn_protocols.BoundedSocket, ServerProtocol, PlainSocket, MuxSocket)

    def alive() -> list[str]:
        return [type(found).__name__ for found in gc.get_objects() if issubclass(type(found), of_a_socket)]

    async with serving(make_app(), door) as (host, port):
        gc.collect()
        before = alive()
        with no_collections():
            for _ in range(3):
                async with connect(f"ws://{host}:{port}/ws", subprotocols=subprotocols) as client:
                    await client.send('{"type":"reset","data":{}}')  # a multiplexed socket is closed for it
                    with contextlib.suppress(ConnectionClosedError):
                        await client.recv()
            await until(lambda: alive() == before)


class Watching:
    """Middleware that wants to know how long a socket lives."""

    def __init__(self, app: ASGIApp, lived: list[str]) -> None:
        self.app, self.lived = app, lived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
        self.lived.append(scope["type"])


async def test_a_socket_is_served_when_what_was_called_before_it_is_gone() -> None:
    lived: list[str] = []
    app = Watching(make_app(), lived)
    for door, before in ((uvicorn_protocols.BoundedSocket, []), (uvicorn_protocols.DetachableSocket, ["websocket"])):
        async with serving(app, door) as (host, port), connect(f"ws://{host}:{port}/ws") as client:
            await client.send('{"type":"reset","data":{}}')
            assert json.loads(await client.recv())["type"] == "observation"
            assert lived == before
        assert lived == ["websocket"]
        lived.clear()


async def test_what_a_socket_depends_on_is_there_as_long_as_it_lives() -> None:
    held: list[str] = []

    async def lock() -> AsyncIterator[None]:
        held.append("lock")
        yield
        held.clear()

    app = FastAPI(dependencies=[Depends(lock)])
    HTTPEnvServer(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=4).register_routes(app)
    app = adopt(app, runtime=simulated(), max_concurrent_envs=4)
    async with (
        serving(app, uvicorn_protocols.DetachableSocket) as (host, port),
        connect(f"ws://{host}:{port}/ws") as client,
    ):
        await client.send('{"type":"reset","data":{}}')
        assert json.loads(await client.recv())["type"] == "observation"
        assert held == ["lock"]


def test_only_where_nothing_wants_to_know_of_it() -> None:
    def of(app: Starlette) -> type:
        return _config(app, Bind()).ws  # type: ignore[return-value]

    class Other(FastAPI):
        pass

    ours, watched, rebuilt, with_mount, itself = (make_app() for _ in range(5))
    ours.mount("/static", StaticFiles(directory="."))
    ours.include_router(APIRouter())
    watched.add_middleware(Watching, lived=[])
    rebuilt.build_middleware_stack = lambda: Watching(ours, [])  # type: ignore[method-assign]
    inner = APIRouter()
    inner.mount("/a", Watching(ours, []))
    with_mount.include_router(inner)
    itself.mount("/again", itself)
    # Old versions of FastAPI leave a router's mounts out when they include it.
    mounted = TestClient(with_mount).get("/a/health").status_code == 200
    for app in (ours, itself, Starlette(routes=[Mount("/a", ours)]), Starlette(routes=[Mount("/a", Router())])):
        assert of(app) is uvicorn_protocols.DetachableSocket
    for app in (
        watched,
        rebuilt,
        *([with_mount] if mounted else []),
        Other(),
        Starlette(routes=[Mount("/a", watched)]),
        Starlette(routes=[Mount("/a", Watching(ours, []))]),
        Starlette(routes=[Mount("/a", ours, middleware=[Middleware(Watching, lived=[])])]),
        Starlette(routes=[Mount("/a", Router(middleware=[Middleware(Watching, lived=[])]))]),
        Starlette(routes=[Host("a", ours)]),
        Starlette(routes=[Mount("/a", ours)], middleware=[Middleware(Watching, lived=[])]),
    ):
        assert of(app) is uvicorn_protocols.BoundedSocket


@pytest.mark.parametrize("door", [uvicorn_protocols.BoundedSocket, uvicorn_protocols.DetachableSocket])
async def test_a_refused_handshake_leaves_nothing_either(door: type[uvicorn_protocols.BoundedSocket]) -> None:
    def alive() -> int:
        return sum(
            issubclass(type(found), (uvicorn_protocols.BoundedSocket, ServerProtocol)) for found in gc.get_objects()
        )

    async with serving(make_app(), door) as address:
        gc.collect()
        before = alive()
        with no_collections():
            for version in ("12", "13"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(
                    "GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    f"Sec-WebSocket-Version: {version}\r\n\r\n".encode()
                )
                assert b" 4" in await asyncio.wait_for(reader.read(), 60)
                writer.close()
            await until(lambda: alive() == before)


@pytest.mark.parametrize("door", [uvicorn_protocols.BoundedSocket, uvicorn_protocols.DetachableSocket])
async def test_who_leaves_while_replies_pile_up_is_not_served_any_longer(
    door: type[uvicorn_protocols.BoundedSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[MuxSocket] = []
    serve = MuxSocket.serve

    async def seen(self: MuxSocket) -> None:
        served.append(self)
        await serve(self)
        served.remove(self)

    monkeypatch.setattr(MuxSocket, "serve", seen)
    body = b"[" + b",".join([b"1"] * 250) + b"]"  # each is told to be wrong
    frame = b"\x81\xfe" + len(body).to_bytes(2, "big") + b"\0\0\0\0" + body
    async with serving(make_app(), door) as address:
        _, writer = await _websocket(address, mux=True)
        await until(lambda: len(served) == 1)
        sending = asyncio.create_task(_send_for_ever(writer, frame * 100))
        await until(lambda: not served[0]._drained.is_set())
        await asyncio.sleep(0.2)
        sending.cancel()
        writer.transport.abort()
        await until(lambda: not served)


async def _send_for_ever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()
