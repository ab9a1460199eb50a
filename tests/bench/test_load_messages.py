"""What the load generators say is what the protocols ask for, by other means than their own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.extensions.permessage_deflate import PerMessageDeflate
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader
from websockets.typing import ExtensionParameter

from errata_bench.load import Load, LoadFailed
from errata_bench.mux_link import Link, Session, envelopes, framed
from errata_bench.plain_load import PlainLoad
from errata_bench.websocket import WebSocket, prepared

ROOT = Path(__file__).parents[2]


def received(data: bytes, *, deflate: bool = False) -> list[str]:
    """Let the websockets library read what a client sent."""
    extensions = [PerMessageDeflate(False, False, 12, 12)] if deflate else None
    reader = StreamReader()
    reader.feed_data(data)
    frames: list[Frame] = []
    while reader.buffer:
        parsing = Frame.parse(reader.read_exact, mask=True, max_size=None, extensions=extensions)
        try:
            while True:
                next(parsing)
        except StopIteration as done:
            frames.append(done.value)
    assert all(frame.opcode is Opcode.TEXT and frame.fin for frame in frames)
    return [bytes(frame.data).decode() for frame in frames]


@pytest.mark.parametrize("length", [0, 1, 125, 126, 65_535, 65_536])
@pytest.mark.parametrize("deflate", [False, True])
def test_a_prepared_frame_is_one_text_message(length: int, deflate: bool) -> None:
    text = "x" * length
    assert received(prepared(text.encode(), deflate=deflate), deflate=deflate) == [text]


def test_a_compressed_frame_can_be_sent_again() -> None:
    frame = prepared(b'{"type":"step"}', deflate=True)
    assert received(frame * 3, deflate=True) == ['{"type":"step"}'] * 3


def schema(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((ROOT / "rfcs" / "schemas" / f"client.{name}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Open", lambda s: s.opening()),
        ("State", lambda s: s.reading()),
        ("Reset", lambda s: s.message(b"reset", b"{}")),
        ("Step", lambda s: s.message(b"step", b'{"text":"x"}')),
        ("Close", lambda s: s.message(b"close", b"{}")),
        ("Resume", lambda s: json.dumps({"type": "resume", "data": [s.entry()]}).encode()),
    ],
)
def test_an_envelope_by_hand_is_the_message_of_the_schema(name: str, message: Callable[[Session], bytes]) -> None:
    session = Session(Link())
    jsonschema.validate(json.loads(message(session)), schema(name))


def test_frames_hold_as_many_messages_as_they_are_said_to() -> None:
    messages = [b'{"type":"a%d"}' % n for n in range(5)]
    assert received(framed(messages, 1)) == [m.decode() for m in messages]
    sizes = [len(json.loads(text)) for text in received(framed(messages, 2))]
    assert sizes == [2, 2, 1]


def test_envelopes_of_the_golden_messages_are_read() -> None:
    golden = (ROOT / "tests" / "golden" / "mux" / "server.Observation.json").read_bytes()
    (one,) = envelopes(golden)
    many = envelopes(b"[" + golden + b"," + golden + b"]")
    assert (one.type, one.id, one.t) == ("observation", 1, 0)
    assert [envelope.sid for envelope in many] == [one.sid, one.sid]


def test_a_full_frame_is_waited_for_only_while_replies_can_fill_it() -> None:
    class Recorder(Link):
        def __init__(self) -> None:
            super().__init__()
            self.sent: list[int] = []

        def send(self, frames: bytes) -> None:
            self.sent += [len(json.loads(text)) for text in received(frames)]

    link = Recorder()
    link.ready = [b"{}"] * 70
    link.in_flight = 3
    link.flush(64)
    assert (link.sent, len(link.ready), link.in_flight) == ([64], 6, 67)
    link.in_flight = 0
    link.flush(64)
    assert (link.sent, link.ready, link.in_flight) == ([64, 6], [], 6)


async def test_a_socket_by_hand_speaks_to_the_websockets_library_compressed_and_not() -> None:
    async def answer(socket: ServerConnection) -> None:
        async for text in socket:
            await socket.send(f'{{"type":"observation","data":{text}}}')

    for deflate in (False, True):
        async with serve(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            socket = await WebSocket.connect(port, deflate=deflate)
            for said in ('{"a":1}', '{"a":"%s"}' % ("x" * 100_000)):
                text = await socket.ask(prepared(said.encode(), deflate=deflate))
                assert json.loads(text)["data"] == json.loads(said)
            assert socket.deflated is deflate
            socket.ping()
            await socket.ask(prepared(b"{}"))
            assert socket.pongs_missing == 0
            await socket.close()


async def test_a_load_whose_server_hangs_up_says_so() -> None:
    async def answer(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send('{"type":"observation","data":{}}')
        await socket.recv()

    async with serve(answer, "127.0.0.1", 0) as server, asyncio.timeout(60):
        load = PlainLoad(server.sockets[0].getsockname()[1])
        assert (await load.open(3))["opened"] == 3
        with pytest.raises(ConnectionResetError, match="closed a socket between two steps"):
            await load.step(1.0, {"text": "x"})


async def test_a_load_that_failed_lets_go_of_its_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "bench"), prepend=os.pathsep)
    open_sockets: set[ServerConnection] = set()
    all_gone = asyncio.Event()

    async def answer(socket: ServerConnection) -> None:
        open_sockets.add(socket)
        try:
            async for text in socket:
                refused = '{"type":"error","data":{"message":"no","code":"EXECUTION_ERROR"}}'
                await socket.send(refused if "step" in str(text) else '{"type":"observation","data":{}}')
        finally:
            open_sockets.discard(socket)
            if not open_sockets:
                all_gone.set()

    async with serve(answer, "127.0.0.1", 0) as server, asyncio.timeout(60):
        load = await Load.start("plain", server.sockets[0].getsockname()[1])
        try:
            await load.do("open", sessions=3)
            assert len(open_sockets) == 3
            with pytest.raises(LoadFailed, match=r"a step was answered .*EXECUTION_ERROR"):
                await load.do("step", seconds=5, action={"text": "x"})
            assert load.failed
            await all_gone.wait()
        finally:
            await load.stop()


def test_the_offered_parameters_are_those_of_the_websockets_client() -> None:
    from websockets.extensions.permessage_deflate import enable_client_permessage_deflate

    from errata_bench.websocket import DEFLATE

    (factory,) = enable_client_permessage_deflate(None)
    parameters: list[ExtensionParameter] = list(factory.get_request_params())
    told = "; ".join([factory.name, *(name if value is None else f"{name}={value}" for name, value in parameters)])
    assert told == DEFLATE
