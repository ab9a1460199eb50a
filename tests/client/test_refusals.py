"""A refused handshake reaches the client with its reason."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator

import pytest
import websockets
from pydantic import SecretStr
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.http11 import Response

from errata_client import ErrataClient
from errata_client.connections.dialing import refusal_reason
from errata_protocol.errors import ErrataError
from errata_server.settings import Settings
from tests.server.local_server import LocalServer

LEDGER = "tests.environments.ledger:LedgerEnvironment"
ECHO = "tests.environments.asynchronous:AsyncEchoEnvironment"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of a server of one environment, one of two, and one with a token."""
    data = tmp_path_factory.mktemp("refusals")
    local = Settings(allowed_hosts=("localhost", "127.0.0.1"))
    token = Settings(token=SecretStr("one"))
    with (
        LocalServer(LEDGER, data / "one", local) as one,
        LocalServer([LEDGER, ECHO], data / "two", local) as two,
        LocalServer(LEDGER, data / "token", token) as protected,
    ):
        yield {"one": one.url, "two": two.url, "token": protected.url}


REFUSED = {
    "a mistyped name": (
        "one",
        "/Ledger",
        {},
        404,
        "nothing is at '/Ledger/.*'; environments are at /, /Ledger",
    ),
    "a mistyped name of several": ("two", "/Echo", {}, 404, "are at /LedgerEnvironment, /AsyncEchoEnvironment"),
    "a path below a name": (
        "two",
        "/LedgerEnvironment/one",
        {},
        404,
        "nothing is at '/LedgerEnvironment/one/.*/Asy",
    ),
    "0.0.0.0": ("one", "0.0.0.0", {}, 403, "0.0.0.0 is an address to listen on: connect to localhost or 127.0.0.1"),
    "a foreign page": ("one", "", {"Origin": "http://evil.example"}, 403, "set ERRATA_ALLOWED_ORIGINS"),
    "a proxy": ("one", "", {"X-Forwarded-For": "192.0.2.1"}, 403, "came through a proxy.*set ERRATA_TOKEN"),
    "no token": ("token", "", {}, 401, r"this server needs a token.*headers=\{\"Authorization\""),
    "another token": ("token", "", {"Authorization": "Bearer two"}, 401, "the token is not this server's"),
}


def address(servers: dict[str, str], which: str, where: str) -> str:
    url = servers[which]
    return url + where if where.startswith("/") or not where else url.replace("127.0.0.1", where)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("mux", [None, False], ids=["multiplexed", "plain"])
async def test_the_client_says_why_a_handshake_was_refused(
    case: str, mux: bool | None, servers: dict[str, str]
) -> None:
    which, where, headers, status, reason = REFUSED[case]
    client = ErrataClient(address(servers, which, where), mux=mux, headers=headers)
    with pytest.raises(ConnectionError, match=f"HTTP {status}: .*{reason}"):
        await client.reset()
    await client.close()


@pytest.mark.parametrize("case", REFUSED)
async def test_a_durable_client_says_why_its_first_request_was_refused(case: str, servers: dict[str, str]) -> None:
    which, where, headers, _, reason = REFUSED[case]
    client = ErrataClient(address(servers, which, where), durable=True, headers=headers)
    with pytest.raises(ErrataError, match=reason.partition(".*headers=")[0]):
        await client.reset()
    await client.close()


@pytest.mark.parametrize("case", REFUSED)
async def test_the_answer_to_a_refused_handshake_has_the_reason(case: str, servers: dict[str, str]) -> None:
    which, where, headers, status, _ = REFUSED[case]
    url = address(servers, which, where).replace("http", "ws", 1)
    with pytest.raises(InvalidStatus) as caught:
        await websockets.connect(f"{url}/ws", additional_headers=headers)
    assert caught.value.response.status_code == status
    stated = json.loads(caught.value.response.body or b"")
    assert stated["code"] == {401: "UNAUTHORIZED", 403: "FORBIDDEN", 404: "SESSION_ERROR"}[status]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, b"all places are taken: try again\n", ": all places are taken: try again"),
        (404, b'{"detail": "Not Found"}', ": Not Found"),
        (403, b"", ""),
        (403, b'{"message": 3}', ""),
        (502, b"[1, 2]", ""),
        (403, b"\x1b[2J\xff", ": \\x1b[2J\ufffd"),
        (502, b"x" * 5000, f": {'x' * 1000}... (4,000 more characters)"),
    ],
)
def test_a_reason_is_shown_as_one_line_of_text(status: int, body: bytes, reason: str) -> None:
    assert refusal_reason(InvalidStatus(Response(status, "", Headers(), body))) == reason
    assert refusal_reason(OSError("no route")) == ""


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("cut", [1, 2])
async def test_a_first_handshake_that_is_cut_off_is_begun_once_more(
    servers: dict[str, str], cut: int, reset: bool
) -> None:
    host, port = servers["one"].removeprefix("http://").split(":")
    seen = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        if seen < cut:
            seen += 1
            await reader.readuntil(b"\r\n\r\n")
            if reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            return
        there, here = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copied(reader, here), copied(there, writer))

    async def copied(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
        url = f"http://127.0.0.1:{between.sockets[0].getsockname()[1]}"
        client = ErrataClient(url)
        if cut == 1:
            async with client:
                await client.reset()
        else:
            with pytest.raises(ConnectionError, match="Failed to connect"):
                await client.reset()
            await client.close()
        assert seen == cut
