"""Messages whose end has not come are held within bounds, and told what became of them (PROTOCOL A6, D9)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from errata_protocol.mux import Allowance
from errata_server.app import create_fastapi_app
from errata_server.process import ServerProcess
from errata_server.runtime.runtime import Runtime
from errata_server.serve import uvicorn_protocols
from errata_server.serve.uvicorn_protocols import MessageBounds
from errata_server.settings import Settings

from .conftest import simulated, until
from .environments import CountAction, CountEnvironment, CountObservation

KIB, MIB = 1024, 1024**2
SMALL = Settings(max_frame=100 * KIB, max_unfinished_bytes=300 * KIB)
MUX = "openenv.mux.v1"
SID, KEY = "s" * 22, "k" * 22


class Client:
    """A WebSocket of bytes, so that its frames may be cut anywhere."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(
        cls,
        address: tuple[str, int],
        path: str = "/ws",
        protocol: str = "",
        token: str = "",
        *,
        early: tuple[asyncio.Event, bytes, asyncio.Event] | None = None,
    ) -> Client:
        reader, writer = await asyncio.open_connection(*address)
        more = (f"Sec-WebSocket-Protocol: {protocol}\r\n" if protocol else "") + (
            f"Authorization: Bearer {token}\r\n" if token else ""
        )
        key = base64.b64encode(b"0" * 16).decode()
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{more}"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        if early is not None:
            reached, data, gate = early
            await asyncio.wait_for(reached.wait(), 60)
            writer.write(data)
            await asyncio.sleep(0.05)
            gate.set()
        assert b" 101 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        return cls(reader, writer)

    async def send(self, data: bytes, *, opcode: int = 1, fin: bool = True, announced: int | None = None) -> None:
        """Send a frame, or the beginning of one that is longer."""
        self.writer.write(frame(data, opcode=opcode, fin=fin, announced=announced))
        await self.writer.drain()

    async def close_code(self) -> int:
        told = await asyncio.wait_for(self.reader.read(), 60)
        assert told[0] == 0x88, told
        return int.from_bytes(told[2:4])

    async def hear(self) -> Any:
        while True:
            first, data = await asyncio.wait_for(self.next_frame(), 60)
            if first == 0x81:
                return json.loads(data)
            assert first in (0x89, 0x8A), (first, data)

    async def next_frame(self) -> tuple[int, bytes]:
        first, size = await self.reader.readexactly(2)
        if size == 126:
            size = int.from_bytes(await self.reader.readexactly(2))
        elif size == 127:
            size = int.from_bytes(await self.reader.readexactly(8))
        return first, await self.reader.readexactly(size)

    async def answer_pings(self) -> None:
        """Answer pings until the socket ends, as clients do: on a slow machine the server would close it."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                first, data = await self.next_frame()
                if first == 0x89:
                    self.writer.write(bytes((0x8A, 0x80 | len(data))) + bytes(4) + data)


def frame(data: bytes, *, opcode: int = 1, fin: bool = True, announced: int | None = None) -> bytes:
    size = len(data) if announced is None else announced
    return bytes(((0x80 if fin else 0) | opcode, 0xFF)) + size.to_bytes(8) + bytes(4) + data


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, runtime: Runtime, door: type[uvicorn_protocols.BoundedSocket] = uvicorn_protocols.DetachableSocket
) -> AsyncIterator[tuple[str, int]]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=uvicorn_protocols.BoundedHttp, ws=door, log_config=None, lifespan="off",
        timeout_graceful_shutdown=1, ws_max_size=MIB, ws_per_message_deflate=False,
    )  # fmt: skip
    config.bounds = MessageBounds(runtime.settings.max_frame, runtime.quotas.unfinished)  # type: ignore[attr-defined]
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve([listening]))
    yield listening.getsockname()[:2]
    server.should_exit = True
    await running


def make_app(runtime: Runtime, **more: Any) -> FastAPI:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, max_concurrent_envs=64, runtime=runtime, **more
    )

    @app.websocket("/their/own")
    async def theirs(websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            await websocket.send_text(str(len(await websocket.receive_text())))

    return app


@pytest.fixture(params=[uvicorn_protocols.BoundedSocket, uvicorn_protocols.DetachableSocket])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[tuple[tuple[str, int], Runtime]]:
    runtime = simulated(SMALL)
    async with serving(make_app(runtime), runtime, request.param) as address:
        yield address, runtime


Server = tuple[tuple[str, int], Runtime]


def refusal(told: Any) -> tuple[str, Any]:
    """Return code and details of an error, however the door words it."""
    if "jsonrpc" in told:
        error = told["error"]
        return (error["data"] or {}).get("code", "PARSE"), error["data"] or {}
    return told["data"]["code"], told["data"]


DOORS = [("/ws", "", "FRAME_TOO_LARGE"), ("/ws", MUX, "FRAME_TOO_LARGE"), ("/mcp", "", "PARSE")]
GOOD = {
    ("/ws", ""): b'{"type":"capabilities"}',
    ("/ws", MUX): b'{"q":1,"type":"capabilities"}',
    ("/mcp", ""): b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}',
}


@pytest.mark.parametrize(("path", "protocol", "code"), DOORS)
@pytest.mark.parametrize("whole", [True, False])
async def test_a_message_over_max_frame_is_answered_at_its_end_and_not_kept(
    server: Server, path: str, protocol: str, code: str, whole: bool
) -> None:
    address, runtime = server
    client = await Client.connect(address, path, protocol)
    if whole:
        await client.send(b"a" * 150 * KIB, announced=200 * KIB)
        await asyncio.sleep(0.05)
        client.writer.write(b"a" * 50 * KIB)
    else:
        await client.send(b"a" * 90 * KIB, fin=False)
        await until(lambda: runtime.quotas.unfinished(None).held == 90 * KIB)
        await client.send(b"", opcode=9)  # a ping between fragments
        await client.send(b"a" * 90 * KIB, opcode=0, fin=False)
        await until(lambda: runtime.quotas.unfinished(None).held == 0)
        await client.send(b"a" * 20 * KIB, opcode=0)
    await client.send(GOOD[path, protocol])
    told = await client.hear()
    assert refusal(told)[0] == code and str(200 * KIB) in json.dumps(told) and str(SMALL.max_frame) in json.dumps(told)
    assert "error" not in json.dumps(await client.hear())[:20]


@pytest.mark.parametrize(("path", "protocol", "code"), DOORS)
async def test_a_message_beyond_what_its_principal_may_hold_is_refused_and_others_go_on(
    server: Server, path: str, protocol: str, code: str
) -> None:
    address, runtime = server
    held = runtime.quotas.unfinished(None)
    holding = [await Client.connect(address, path, protocol) for _ in range(4)]
    good = GOOD[path, protocol]
    for n, client in enumerate(holding):
        await client.send(good[:1], fin=False)
        await client.send(b" " * 80 * KIB, opcode=0, fin=False)
        if n < 3:
            await until(lambda n=n: held.held == (n + 1) * (80 * KIB + 1))
    other = await Client.connect(address, path, protocol)
    await other.send(good)
    assert "error" not in json.dumps(await other.hear())[:20], "what comes whole needs no room"
    await holding[3].send(good[1:], opcode=0)
    code_told, details = refusal(await holding[3].hear())
    assert code_told == "OVERLOADED" and details["retry_after"] > 0
    assert held.held == 3 * (80 * KIB + 1)
    for client in holding[:3]:
        await client.send(good[1:], opcode=0)
        assert "error" not in json.dumps(await client.hear())[:20], "it was there before, and goes on"
    assert held.held == 0
    await holding[3].send(good[:1], fin=False)
    await holding[3].send(good[1:], opcode=0)
    assert "error" not in json.dumps(await holding[3].hear())[:20], "the same message, later"


async def test_a_socket_that_is_gone_holds_nothing(server: Server) -> None:
    address, runtime = server
    for protocol in ("", MUX):
        client = await Client.connect(address, "/ws", protocol)
        await client.send(b"a" * 50 * KIB, announced=80 * KIB)
        await until(lambda: runtime.quotas.unfinished(None).held == 50 * KIB)
        client.writer.transport.abort()
        await until(lambda: runtime.quotas.unfinished(None).held == 0)


async def test_parts_of_messages_count_with_the_sockets_of_their_principal(server: Server) -> None:
    address, runtime = server
    held = runtime.quotas.unfinished(None)
    first, second = [await Client.connect(address, "/ws", MUX) for _ in range(2)]

    def part(n: int, id: int, size: int = 45 * KIB) -> bytes:
        data = {"n": n, "of": 9, "text": "a" * size}
        return json.dumps({"sid": SID, "id": id, "type": "part", "data": data}).encode()

    for n in (1, 2):
        await first.send(part(n, 1))
        await second.send(part(n, 1))
    await until(lambda: held.held == 4 * 45 * KIB)
    third = await Client.connect(address)
    await third.send(b"a" * 90 * KIB, fin=False)
    await until(lambda: held.held == 4 * 45 * KIB + 90 * KIB)
    fourth = await Client.connect(address, "/ws", MUX)
    await fourth.send(part(1, 1))
    told = await fourth.hear()
    assert (told["sid"], told["id"], told["data"]["code"]) == (SID, 1, "OVERLOADED")
    for client in (first, second, third, fourth):
        client.writer.transport.abort()
    await until(lambda: held.held == 0)


async def test_each_principal_has_its_own_room() -> None:
    runtime = simulated(Settings(token=SecretStr("one,two"), max_unfinished_bytes=100 * KIB))
    async with serving(make_app(runtime), runtime) as address:
        one = await Client.connect(address, token="one")
        await one.send(b" " * 100 * KIB, fin=False)
        again = await Client.connect(address, token="one")
        await again.send(b" " * 70 * KIB, fin=False)
        await again.send(b"{}", opcode=0)
        assert refusal(await again.hear())[0] == "OVERLOADED"
        two = await Client.connect(address, token="two")
        await two.send(b" " * 70 * KIB, fin=False)
        await two.send(GOOD["/ws", ""], opcode=0)
        assert (await two.hear())["type"] == "capabilities"


@pytest.mark.parametrize(("size", "times", "code"), [(120 * KIB, 1, 1009), (90 * KIB, 4, 1013)])
async def test_a_door_that_is_not_ours_is_closed_at_once(server: Server, size: int, times: int, code: int) -> None:
    address, runtime = server
    clients = [await Client.connect(address, "/their/own") for _ in range(times)]
    for n, client in enumerate(clients, 1):
        await client.send(b"a" * 10, fin=False)
        await client.send(b"a" * (size - 20), opcode=0, fin=False)
        if n < times:
            await until(lambda n=n: runtime.quotas.unfinished(None).held == n * (size - 10))
    assert await clients[-1].close_code() == code
    if times > 1:
        await clients[0].send(b"a" * 10, opcode=0)
        assert await clients[0].hear() == size


async def test_beyond_the_largest_message_on_the_wire_the_socket_is_closed(server: Server) -> None:
    address, _ = server
    for protocol in ("", MUX):
        for announced in (MIB + 1, 2**40):
            client = await Client.connect(address, "/ws", protocol)
            await client.send(b"", announced=announced)
            assert await client.close_code() == 1009
        client = await Client.connect(address, "/ws", protocol)
        await client.send(b"a" * 600 * KIB, fin=False)
        await client.send(b"", opcode=0, announced=500 * KIB)
        assert await client.close_code() == 1009


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(b"a", fin=False) + frame(b"b"), 1002),  # a message begins within another
        (frame(b"b", opcode=0), 1002),
        (frame(b"\xc3", fin=False) + frame(b"(", opcode=0), 1007),
        (b"\xf1\xff" + (MIB).to_bytes(8), 1002),  # reserved bits: told before its payload is there
        (b"\x0b\xff" + (MIB).to_bytes(8), 1002),
        (b"\x89\xff" + (MIB).to_bytes(8), 1002),
        (b"\x81\x7f" + (MIB).to_bytes(8), 1002),
        (frame(b"a", fin=False) + b"\x88\x82\0\0\0\0\x03\xe8", 1002),
    ],
)
async def test_what_breaks_the_websocket_protocol_closes_the_socket(server: Server, sent: bytes, code: int) -> None:
    address, _ = server
    for protocol in ("", MUX):
        client = await Client.connect(address, "/ws", protocol)
        client.writer.write(sent)
        assert await client.close_code() == code


async def test_text_in_fragments_is_one_text(server: Server) -> None:
    address, _ = server
    client = await Client.connect(address)
    sent = '{"type":"nö"}'.encode()
    for byte in (sent[:10], sent[10:11]):  # a code point on both sides of a boundary
        await client.send(byte, opcode=1 if byte == sent[:10] else 0, fin=False)
    await client.send(sent[11:], opcode=0)
    assert "nö" in (await client.hear())["data"]["message"]
    await client.send(sent, opcode=2)
    assert "nö" in (await client.hear())["data"]["message"]


@pytest.mark.parametrize("protocol", ["", MUX])
async def test_what_is_sent_before_the_handshake_is_answered_is_not_lost(protocol: str) -> None:
    runtime = simulated(SMALL)
    app, reached, gate = make_app(runtime), asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        reached.set()
        await gate.wait()
        await app(scope, receive, send)

    async with serving(slow, runtime) as address:
        good = frame(GOOD["/ws", protocol])
        for cut in (1, 8, len(good) - 1, len(good)):
            reached.clear()
            gate.clear()
            client = await Client.connect(address, "/ws", protocol, early=(reached, good[:cut], gate))
            client.writer.write(good[cut:] + good)
            told: list[Any] = []
            while len(told) < 2:
                heard = await client.hear()  # an array, of a multiplexed socket, if they leave together
                told += heard if isinstance(heard, list) else [heard]
            assert [one["type"] for one in told] == ["capabilities"] * 2


def test_an_allowance_counts_what_is_held() -> None:
    room = Allowance(10)
    assert room.take(10) and not room.take(1) and room.take(0)
    room.give(4)
    assert not room.take(5) and room.take(4) and room.held == 10


# -- memory ---------------------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * KIB


async def fragments(client: Client) -> None:
    await client.send(b"a", fin=False)
    for _ in range(62):
        await client.send(b"a" * MIB, opcode=0, fin=False)


async def small_fragments(client: Client) -> None:
    await client.send(b"a", fin=False)
    one = b"\x00\x88\0\0\0\0" + b"a" * 8
    for _ in range(40):  # 800,000 fragments: 6.4 MB of text
        client.writer.write(one * 20_000)
        await client.writer.drain()


async def one_frame(client: Client) -> None:
    await client.send(b"a", announced=63 * MIB)
    for _ in range(62):
        client.writer.write(b"a" * MIB)
        await client.writer.drain()


async def one_frame_within_max_frame(client: Client) -> None:
    await client.send(b"a" * 15 * MIB, announced=16 * MIB)


async def parts(client: Client) -> None:
    for n in range(1, 60):
        data = {"n": n, "of": 60, "text": "a" * 256 * KIB}
        await client.send(json.dumps({"sid": SID, "id": 1, "type": "part", "data": data}).encode())


@pytest.mark.parametrize(
    ("protocol", "attack"),
    [("", fragments), ("", small_fragments), ("", one_frame), ("", one_frame_within_max_frame), (MUX, fragments),
     (MUX, one_frame_within_max_frame), (MUX, parts)],
    ids=lambda value: getattr(value, "__name__", value or "plain"),
)  # fmt: skip
async def test_ten_sockets_that_finish_nothing_cost_less_than_40_mb(
    tmp_path: Path, protocol: str, attack: Callable[[Client], Coroutine[Any, Any, None]]
) -> None:
    with ServerProcess("tests.server.environments:CountEnvironment", tmp_path) as process:
        host, port = process.url.removeprefix("http://").split(":")
        address = (host, int(port))
        first = await Client.connect(address, "/ws", protocol)
        await first.send(GOOD["/ws", protocol])
        assert (await first.hear())["type"] == "capabilities"
        before = resident_bytes(process.process.pid)
        clients = [await Client.connect(address, "/ws", protocol) for _ in range(10)]
        answering = [asyncio.create_task(client.answer_pings()) for client in clients]
        await asyncio.gather(*map(attack, clients))
        another = await Client.connect(address, "/ws", protocol)
        await another.send(GOOD["/ws", protocol])
        assert (await another.hear())["type"] == "capabilities"
        grown = resident_bytes(process.process.pid) - before
        print(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {grown / 1e6:.1f} MB")
        assert grown <= (48e6 if attack is parts else 40e6)  # parts are whole frames, some of which wait to be read
        for client in clients:
            client.writer.transport.abort()
        await asyncio.gather(*answering)
