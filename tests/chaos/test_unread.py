"""A client that sends steps and reads nothing: the server's memory is bounded, and others are served (PROTOCOL D9)."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from errata_client import Connection, ErrataClient
from errata_protocol.capabilities import PROTOCOL_NAME
from errata_server.process import ServerProcess

pytestmark = pytest.mark.chaos

SESSIONS, STEPS, SIZE = 512, 16, 1 << 18
"""Two GiB of observations, where nothing bounds it."""
GROWN_MIB = 400
"""The 1,024 requests in flight that a socket may have, and what is to be sent; half of it again for the allocator."""


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


async def test_memory_is_bounded_and_others_are_served(tmp_path: Path) -> None:
    target = "tests.chaos.environments:LoudEnvironment"
    with await asyncio.to_thread(ServerProcess, target, tmp_path, "--max-sessions", "1000") as server:
        async with Connection(server.url) as connection:
            other = ErrataClient(connection=connection)
            await other.reset()
            await other.step({"n": SIZE})
            before = rss_mib(server.process.pid)
            deaf = await connect(
                server.url.replace("http", "ws", 1) + "/ws",
                subprotocols=[Subprotocol(PROTOCOL_NAME)],
                compression=None,
                ping_interval=None,
                max_queue=1,
            )
            deaf.transport.pause_reading()
            deaf.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            sent = asyncio.create_task(_ask(deaf))
            try:
                for n in range(1, 60):
                    async with asyncio.timeout(20.0):
                        observation = (await other.step({"n": 100 + n})).observation
                    assert observation["n"] == 100 + n
                    await asyncio.wait([sent], timeout=0.1)
                grown = rss_mib(server.process.pid) - before
                print(f"grown by {grown:.0f} MiB; all sent: {sent.done()}")
                assert grown < GROWN_MIB
            finally:
                sent.cancel()
                await asyncio.gather(sent, return_exceptions=True)
                deaf.transport.abort()
            await other.end_session()


async def _ask(deaf: ClientConnection) -> None:
    for n in range(SESSIONS):
        sid = f"deaf-{n:04}-".ljust(24, "x")
        asked = [
            {"sid": sid, "type": "open", "data": {"key": "k" * 24}},
            {"sid": sid, "id": 1, "type": "reset", "data": {}},
            *({"sid": sid, "id": id, "type": "step", "data": {"n": SIZE}} for id in range(2, STEPS + 1)),
        ]
        await deaf.send(json.dumps(asked))
