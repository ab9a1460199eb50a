"""rfcs/reference/client.py against our server, through a proxy that cuts connections."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from errata_server.process import ServerProcess

CLIENT = Path(__file__).parents[1] / "rfcs" / "reference" / "client.py"
STEPS = 60


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ServerProcess("tests.protocol_exchanges:TallyEnvironment", tmp_path_factory.mktemp("data")) as server:
        yield server.url


async def used(address: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the client as a program; return what it prints."""
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(sys.executable, str(CLIENT), address, stdin=pipe, stdout=pipe)
    async with asyncio.timeout(60):
        out, _ = await client.communicate("".join(json.dumps(line) + "\n" for line in requests).encode())
    assert client.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


class CuttingProxy:
    """Forwards TCP, and aborts each of the first connections after a drawn number of bytes from either side."""

    def __init__(self, url: str, draws: random.Random, cuts: int) -> None:
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.draws, self.left, self.cut = draws, cuts, 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection(self.host, self.port)
        budget = [self.draws.randrange(600, 8000) if self.left > 0 else -1]
        self.left -= 1
        ways = [asyncio.create_task(self.copy(*way, budget)) for way in ((reader, out), (there, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for one in ways:
            one.cancel()
        for end in (out, writer):
            end.transport.abort()

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: list[int]) -> None:
        while data := await reader.read(400):
            if budget[0] >= 0:
                budget[0] -= len(data)
                if budget[0] < 0:
                    self.cut += 1
                    return
            writer.write(data)
            await writer.drain()


def test_it_imports_nothing_of_ours_and_is_short() -> None:
    text = CLIENT.read_text()
    modules = {a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module or "" for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    assert {m.partition(".")[0] for m in modules} - set(sys.stdlib_module_names) == {"websockets"}
    assert len(text.splitlines()) <= 450


@pytest.mark.parametrize("seed", range(3))
async def test_each_step_takes_effect_once_over_cut_connections(url: str, seed: int) -> None:
    proxy = CuttingProxy(url, random.Random(seed), cuts=12)
    names = ("a", "b", "c")
    requests = [{"session": name, "type": "reset"} for name in names]
    requests += [{"session": name, "type": "step", "data": {"n": 1}} for _ in range(STEPS) for name in names]
    async with await asyncio.start_server(proxy.accept, "127.0.0.1", 0) as served:
        host, port = served.sockets[0].getsockname()[:2]
        replies = await used(f"ws://{host}:{port}/ws", requests)
    assert proxy.cut >= 5
    for name in names:
        own = [reply for reply in replies if reply["session"] == name]
        assert [reply["id"] for reply in own] == list(range(1, STEPS + 2))
        assert [reply["data"]["observation"]["total"] for reply in own] == list(range(STEPS + 1))
        assert [reply["t"] for reply in own] == list(range(STEPS + 1))
        assert len({reply["eid"] for reply in own}) == 1


async def test_reads_errors_and_deadlines_are_answered(url: str) -> None:
    replies = await used(
        url,
        [
            {"session": "a", "type": "reset"},
            {"session": "a", "type": "step", "data": {"do": "fail"}},
            {"session": "a", "type": "step", "data": {"n": 2}, "deadline_ms": 0},
            {"session": "a", "type": "step", "data": {"n": 2}, "if": {"t": 7}},
            {"session": "a", "type": "capabilities"},
            {"session": "a", "type": "close"},
        ],
    )
    numbered = [reply for reply in replies if "id" in reply]
    assert [reply["data"].get("code") for reply in numbered] == [
        None,
        "EXECUTION_ERROR",
        "TIMEOUT",
        "PRECONDITION_FAILED",
        None,
    ]
    assert numbered[-1]["type"] == "closed"
    assert [reply["type"] for reply in replies if "q" in reply] == ["capabilities"]
