"""Requests whose body has no one length are refused, and a body that nobody reads is cut off."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from errata_server.app import create_fastapi_app
from errata_server.doors import request_bodies
from errata_server.settings import Settings

from .conftest import simulated
from .environments import CountAction, CountEnvironment, CountObservation
from .test_wire import serving

ENOUGH = 64 * 2**20
"""Bytes after which a server that would read for ever is found out."""
NEXT = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNK = b"10000\r\n" + b"a" * 65536 + b"\r\n"

Address = tuple[str, int]


def make_app() -> FastAPI:
    settings = Settings(token=SecretStr("secret"), max_frame=300_000)
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, max_concurrent_envs=4, runtime=simulated(settings)
    )

    async def talk(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        message = await receive()
        await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})

    app.mount("/talk", talk)
    return app


@pytest.fixture
async def address() -> AsyncIterator[Address]:
    async with serving(make_app()) as where:
        yield where


async def send(address: Address, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(head.replace("\n", "\r\n").encode() + b"Host: localhost\r\n\r\n" + body)
    return reader, writer


async def everything(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), 60)


@pytest.mark.parametrize("token", ["Authorization: Bearer secret\n", ""])
@pytest.mark.parametrize(
    "framing",
    [
        "Transfer-Encoding: chunked\nContent-Length: 5\n",
        "Content-Length: 5\nTransfer-Encoding: chunked\n",
        "transfer-encoding: Chunked\ncontent-length: 0\n",
    ],
)
async def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_read(
    address: Address, framing: str, token: str
) -> None:
    reader, writer = await send(address, f"POST /reset HTTP/1.1\n{framing}{token}", b"2\r\n{}\r\n0\r\n\r\n" + NEXT)
    told = await everything(reader)
    assert told.startswith(b"HTTP/1.1 400") and told.count(b"HTTP/1.1") == 1 and b"connection: close" in told.lower()
    if find_spec("httptools") is not None:
        return  # uvicorn takes that parser where it is installed, and it refuses such a request in its own words
    body = json.loads(told.partition(b"\r\n\r\n")[2])
    assert body["code"] == "VALIDATION_ERROR" and "send one length" in body["message"]
    writer.close()


async def test_http_1_0_has_no_transfer_encoding(address: Address) -> None:
    reader, writer = await send(
        address,
        "POST /reset HTTP/1.0\nTransfer-Encoding: chunked\nAuthorization: Bearer secret\n",
        b"2\r\n{}\r\n0\r\n\r\n" + NEXT,
    )
    told = await everything(reader)
    assert told.startswith(b"HTTP/1.1 400") and told.count(b"HTTP/1.1") == 1
    writer.close()


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("POST /reset HTTP/1.1\n", b"401"),
        ("GET /health HTTP/1.1\n", b"200"),
        ("GET /episodes HTTP/1.1\nAuthorization: Bearer secret\n", b"200"),
        ("POST /nowhere HTTP/1.1\nAuthorization: Bearer secret\n", b"404"),
        ("POST /reset HTTP/1.1\nAuthorization: Bearer secret\n", b"413"),
        ("POST /mcp HTTP/1.1\nAuthorization: Bearer secret\n", b"200"),
    ],
)
@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked\n", "Content-Length: 1000000000\n"])
async def test_an_endless_body_is_cut_off_once_it_is_answered(
    address: Address, target: str, status: bytes, framing: str
) -> None:
    reader, writer = await send(address, target + framing)
    sent = 0
    answer = asyncio.create_task(everything(reader))
    with pytest.raises(OSError):
        while sent < ENOUGH:
            writer.write(CHUNK)
            await asyncio.wait_for(writer.drain(), 60)
            await asyncio.sleep(0)
            sent += len(CHUNK)
    assert sent < ENOUGH / 4, "of that most is in socket buffers"
    try:
        told = await answer
    except OSError:
        return  # reset: the answer was there, and its reader was not
    assert told.split()[1] == status and b"connection: close" in told.lower()


async def test_a_body_that_never_ends_is_not_waited_for_long(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "REST_S", 0.2)
    reader, writer = await send(address, "POST /reset HTTP/1.1\nContent-Length: 100\n", b"{")
    began = time.monotonic()
    told = await everything(reader)  # the body never ends: there is an end because the server makes one
    assert told.split()[1] == b"401" and time.monotonic() - began > 0.1
    writer.close()


async def test_a_client_that_waits_to_be_asked_for_its_body_is_not_asked(address: Address) -> None:
    reader, writer = await send(address, "POST /reset HTTP/1.1\nContent-Length: 100\nExpect: 100-continue\n")
    told = await everything(reader)
    assert told.split()[1] == b"401" and b"100 Continue" not in told
    writer.close()


async def test_a_refused_request_with_its_whole_body_keeps_the_connection(address: Address) -> None:
    for rest in (b"", b"a" * 200_000):
        reader, writer = await send(
            address, f"POST /reset HTTP/1.1\nContent-Length: {2 + len(rest)}\n", b"{}" + rest + NEXT
        )
        for status in (b"401", b"200"):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.split()[1] == status
            size = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(size.split()[1]))
        writer.close()


async def test_an_application_may_answer_while_it_reads(address: Address) -> None:
    reader, writer = await send(address, "POST /talk/ HTTP/1.1\nContent-Length: 10\nAuthorization: Bearer secret\n")
    head = await asyncio.wait_for(reader.readuntil(b"begun "), 60)
    assert b"connection: close" in head.lower()
    writer.write(b"a" * 10)
    assert b"10" in await everything(reader)
    writer.close()
