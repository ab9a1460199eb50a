"""Long messages are read at a bounded rate once some have been; short ones and those of others are not delayed.

All of it is in virtual time, which passes only where something waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_server.doors import long_messages
from errata_server.doors.long_messages import AT_ONCE, BYTES_PER_S, LONG, LongMessages
from errata_server.simulation import simulated as in_virtual_time

from .asgi_peer import Peer
from .test_json_values import send_in_parts, served

MIB = 1024**2
SID = "a" * 24


@in_virtual_time
async def test_senders_that_wait_share_the_rate() -> None:
    loop = asyncio.get_running_loop()
    messages = LongMessages(loop)
    began = loop.time()
    await messages.pay(AT_ONCE)
    assert loop.time() == began, "what comes after a pause is read at once"

    async def sender(size: int, times: int) -> float:
        for _ in range(times):
            await messages.pay(size)
        return loop.time() - began

    large = asyncio.gather(*(sender(16 * MIB, 2) for _ in range(4)))
    await asyncio.sleep(0)
    small = await sender(MIB, 4)
    took = await large
    assert small <= 5 * 4 * MIB / BYTES_PER_S, "a few messages do not wait for all that others have sent"
    assert max(took) >= 4 * 2 * 16 * MIB / BYTES_PER_S / 2
    await asyncio.sleep(AT_ONCE / BYTES_PER_S + max(took))
    later = loop.time()
    await messages.pay(AT_ONCE)
    assert loop.time() == later


async def mux(peer: Peer, size: int) -> None:
    """Send one message, which is answered with an error."""
    await peer.ask({"type": "step", "sid": SID, "id": 1, "data": {"note": "x" * size}})


async def parts(peer: Peer, size: int) -> None:
    """Send one message in parts that are no long messages themselves."""
    envelope = json.dumps({"type": "step", "sid": SID, "id": 1, "data": {"note": "x" * size}})
    await send_in_parts(peer, envelope, LONG // 2, sid=SID, id=1)
    await peer.receive()


async def plain(peer: Peer, size: int) -> None:
    await peer.ask({"type": "step", "data": {"n": 1, "metadata": {"note": "x" * size}}})


@pytest.mark.parametrize("door", [mux, parts, plain])
@in_virtual_time
async def test_a_socket_waits_after_long_messages_only(
    door: Callable[[Peer, int], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_messages, "AT_ONCE", MIB)
    monkeypatch.setattr(long_messages, "BYTES_PER_S", MIB)
    app = served()
    offered = () if door is plain else (PROTOCOL_NAME,)
    async with Peer(app, subprotocols=offered) as sender, Peer(app, subprotocols=offered) as other:
        assert await waited(door(sender, MIB)) == 0
        assert 0.8 <= await waited(door(sender, MIB), door(sender, 10)) <= 2.5
        assert 0.8 <= await waited(door(sender, MIB), door(sender, 10)) <= 2.5
        assert await waited(door(other, 10), door(other, 10)) == 0


@in_virtual_time
async def test_a_body_that_is_long_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_messages, "AT_ONCE", MIB)
    monkeypatch.setattr(long_messages, "BYTES_PER_S", MIB)
    transport = httpx.ASGITransport(served())
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as http:

        async def step(size: int) -> None:
            body: dict[str, Any] = {"action": {"n": 1, "metadata": {"note": "x" * size}}}
            assert (await http.post("/step", json=body)).status_code == 200

        assert await waited(step(MIB // 2)) == 0
        assert await waited(step(2 * MIB)) >= 1
        assert await waited(step(10)) == 0


async def waited(*work: Awaitable[None]) -> float:
    """Return the virtual seconds that work takes, one after the other."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for one in work:
        await one
    return loop.time() - began
