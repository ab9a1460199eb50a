"""Write a conversation for tests/golden/conversations, with the Errata that PYTHONPATH names.

    git archive COMMIT | tar -x -C CHECKOUT
    cd CHECKOUT && PYTHONPATH=server:protocol:client:. python scripts/golden_conversation.py > COMMIT.jsonl

Its `ErrataClient` and `EnvPool` play `tests.server.environments:CountEnvironment`, served by its `errata serve`: plain
and multiplexed sockets, a lost socket, a failed and a marked step, reads, forks and a late reward. A line is a message
of a socket, the end of one, or an HTTP request with its answer, in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection

from errata_client import EnvPool, Episodes, ErrataClient
from errata_protocol.replay import RewardPost

SERVE = "import sys; from errata_server.cli import main; sys.argv[0] = 'errata'; main()"
SOCKETS: list[Any] = []


def record(line: dict[str, Any]) -> None:
    """Print a line."""
    print(json.dumps(line), flush=True)


def watch() -> None:
    """Record what clients send and receive from now on."""
    send, recv, close, ask = (
        ClientConnection.send,
        ClientConnection.recv,
        ClientConnection.close,
        httpx.AsyncClient.send,
    )

    def named(ws: Any) -> dict[str, Any]:
        if ws not in SOCKETS:
            record({"socket": len(SOCKETS), "path": ws.request.path, "subprotocol": ws.subprotocol})
            SOCKETS.append(ws)
        return {"socket": SOCKETS.index(ws)}

    async def sending(self: Any, message: Any, *more: Any, **named_more: Any) -> None:
        text = message if isinstance(message, str) else bytes(message).decode()
        record({**named(self), "sent": text})
        await send(self, message, *more, **named_more)

    async def receiving(self: Any, *more: Any, **named_more: Any) -> Any:
        message = await recv(self, *more, **named_more)
        text = message if isinstance(message, str) else bytes(message).decode()
        record({**named(self), "received": text})
        return message

    async def closing(self: Any, *more: Any, **named_more: Any) -> None:
        record({**named(self), "closed": True})
        await close(self, *more, **named_more)

    async def asking(self: Any, request: httpx.Request, **more: Any) -> httpx.Response:
        answer = await ask(self, request, **more)
        await answer.aread()
        body = request.content.decode() or None
        asked = {"method": request.method, "path": request.url.raw_path.decode(), "body": body}
        record({"http": asked, "status": answer.status_code, "answer": answer.text})
        return answer

    ClientConnection.send, ClientConnection.recv = sending, receiving  # type: ignore[method-assign, assignment]
    ClientConnection.close = closing  # type: ignore[method-assign]
    httpx.AsyncClient.send = asking  # type: ignore[method-assign, assignment]


async def play(url: str) -> None:
    """Do what clients do, on plain sockets, of sessions that end with them and others, and on a multiplexed one."""
    for kinds in ({"mux": False}, {"durable": True}, {"mux": True}):
        env = ErrataClient[Any, Any, Any](url, **kinds)  # type: ignore[arg-type]
        await env.reset(seed=3)
        for action in ({"n": 1}, {"n": 1, "do": "mark"}, {"n": 2}):
            await env.step(action)
        with contextlib.suppress(RuntimeError):
            await env.step({"n": 1, "do": "raise"})
        await env.state()
        for t in (0, 2):
            await env.state_at(t)
        await env.history()
        child = await env.fork(1)
        await child.step({"n": 40})
        await child.close()
        async with Episodes(url) as episodes:
            await episodes.post_rewards(env.eid, [RewardPost(t=2, value=0.5, source="judge", reward_id="r1")])
            await episodes.episode(env.eid)
        await env.rewards()
        if kinds != {"mux": False}:
            record({"socket": len(SOCKETS) - 1, "closed": True})
            SOCKETS[-1].transport.abort()
            await env.reattach()
            await env.step({"n": 8})
        await env.reset()
        await env.close()
    async with EnvPool(url, 3) as pool:
        await pool.reset_batch()
        for n in range(3):
            await pool.step_batch([{"n": n}] * 3)


def main() -> None:
    """Serve, and play."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as scratch:
        room = ["tests.server.environments:CountEnvironment", "--data-dir", str(Path(scratch) / "data")]
        port = url.rpartition(":")[2]
        command = [sys.executable, "-c", SERVE, "serve", *room, "--port", port]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                until = time.monotonic() + 60
                while not _answers(url):
                    assert time.monotonic() < until, "the server does not answer"
                    time.sleep(0.1)
                watch()
                asyncio.run(play(url))
            finally:
                server.terminate()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").is_success
    return False


if __name__ == "__main__":
    main()
