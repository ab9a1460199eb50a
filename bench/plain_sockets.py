"""Many plain sockets against a server in a process of its own: the client and the server handle of the benchmarks.

The client is one asyncio protocol a socket that writes one prepared frame and looks at the reply's first bytes, because
client and server share the machine: what the client burns the server does not get.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

from errata_server.process import ServerProcess

OBSERVATION = b'{"type":"observation"'


def serve_stock(app: Callable[[], Any]) -> None:
    """Be a stock server with the application that ``app`` makes; print the port."""
    config = uvicorn.Config(
        app(),
        host="127.0.0.1",
        port=0,
        loop="uvloop",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        access_log=False,
        log_level="warning",
        backlog=4096,
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn tells no other way
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class Peer:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    @classmethod
    def stock(cls, script: Path, *options: str) -> Peer:
        """Start ``script``, which calls `serve_stock` when it is given these options."""
        process = subprocess.Popen([sys.executable, str(script), *options], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return cls(process, int(process.stdout.readline()))

    @classmethod
    def errata(cls, target: str, data_dir: Path, *options: str) -> Peer:
        """Start ``errata serve`` with an environment that lies beside this file."""
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        server = ServerProcess(target, data_dir, *options, env={"PYTHONPATH": path})
        return cls(server.process, int(server.url.rsplit(":", 1)[1]))

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def status(self, key: str) -> int:
        """A number of its ``/proc`` status: ``VmRSS`` (KiB), ``Threads``."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
        raise KeyError(key)

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class PlainSocket(asyncio.Protocol):
    """A WebSocket client that sends one frame at a time and waits for its reply."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._seen = b""
        self._upgraded = False
        self.lost = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_reply: Callable[[bytes], None] = lambda reply: None

    @classmethod
    async def connect(cls, port: int) -> PlainSocket:
        """Return an open socket on ``/ws``."""
        _, socket = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        await socket.ready
        return socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        key = base64.b64encode(os.urandom(16)).decode()
        self._transport.write(
            "GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def data_received(self, data: bytes) -> None:
        self._seen = self._seen + data if self._seen else data
        if not self._upgraded:
            head, end, rest = self._seen.partition(b"\r\n\r\n")
            if not end:
                return
            self._upgraded, self._seen = True, rest
            if head.startswith(b"HTTP/1.1 101"):
                self.ready.set_result(None)
            else:
                self.ready.set_exception(ConnectionError(head.decode()))
        while (frame := self._frame()) is not None:
            opcode, payload = frame
            if opcode == 1:
                self.on_reply(payload)
            elif opcode == 8:
                cast(asyncio.Transport, self._transport).close()
            elif opcode == 9:
                self._write(0x8A, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def _frame(self) -> tuple[int, bytes] | None:
        seen = self._seen
        if len(seen) < 2:
            return None
        length, start = seen[1], 2
        if length >= 126:
            start = 4 if length == 126 else 10
            length = int.from_bytes(seen[2:start])
        if len(seen) < start + length:
            return None
        self._seen = seen[start + length :]
        return seen[0] & 15, seen[start : start + length]

    def send(self, frame: bytes) -> None:
        """Send a frame that `prepared` made."""
        assert self._transport is not None
        self._transport.write(frame)

    async def ask(self, message: dict[str, Any]) -> bytes:
        """Send a message and return its reply."""
        replied: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.on_reply = replied.set_result
        self.send(prepared(message))
        return await replied

    async def close(self) -> None:
        """Say so, and wait until the server has closed."""
        self._write(0x88, b"\x03\xe8")
        await self.lost

    def _write(self, first: int, payload: bytes) -> None:
        assert self._transport is not None
        self._transport.write(bytes((first, 0x80 | len(payload))) + bytes(4) + payload)


def prepared(message: dict[str, Any]) -> bytes:
    """Return a message as a masked text frame; a mask of zeros leaves it as it is."""
    payload = json.dumps(message).encode()
    length = len(payload)
    head = bytes((0x81, 0x80 | length)) if length < 126 else bytes((0x81, 0xFE)) + length.to_bytes(2)
    return head + bytes(4) + payload


async def step_for(peer: Peer, sessions: int, seconds: float, step: dict[str, Any]) -> dict[str, float]:
    """Open, reset, step back to back on every socket for a while, close; return the figures of this round."""
    gate = asyncio.Semaphore(64)
    before_kib = peer.status("VmRSS")

    async def open_one() -> PlainSocket:
        async with gate:
            socket = await PlainSocket.connect(peer.port)
            reply = await socket.ask({"type": "reset", "data": {}})
            assert reply.replace(b" ", b"").startswith(OBSERVATION), reply
            return socket

    started = time.perf_counter()
    sockets = await asyncio.gather(*(open_one() for _ in range(sessions)))
    opened_s = time.perf_counter() - started
    opened_kib, threads = peer.status("VmRSS"), peer.status("Threads")

    took: list[float] = []
    frame = prepared({"type": "step", "data": step})
    end = time.perf_counter() + seconds

    def drive(socket: PlainSocket) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent = time.perf_counter()

        def on_reply(reply: bytes) -> None:
            nonlocal sent
            now = time.perf_counter()
            took.append(now - sent)
            if not reply[:24].replace(b" ", b"").startswith(OBSERVATION):
                done.set_exception(AssertionError(reply))
            elif now < end:
                sent = now
                socket.send(frame)
            else:
                done.set_result(None)

        socket.on_reply = on_reply
        socket.send(frame)
        return done

    cpu, client, started = peer.cpu_s(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(drive(socket) for socket in sockets))
    elapsed, cpu, client = time.perf_counter() - started, peer.cpu_s() - cpu, time.process_time() - client
    threads = max(threads, peer.status("Threads"))
    await asyncio.gather(*(socket.close() for socket in sockets))
    took.sort()
    return {
        "steps": float(len(took)),
        "opens_per_s": sessions / opened_s,
        "steps_per_s": len(took) / elapsed,
        "p50_ms": took[len(took) // 2] * 1e3,
        "p99_ms": took[int(len(took) * 0.99)] * 1e3,
        "server_cpu_us_per_step": cpu / len(took) * 1e6,
        "client_cpu_us_per_step": client / len(took) * 1e6,
        "threads": float(threads),
        "kib_per_open_session": (opened_kib - before_kib) / sessions,
        "load_average": os.getloadavg()[0],
    }


def summary(found: dict[str, list[dict[str, float]]], ours: str) -> dict[str, Any]:
    """Return medians of both, and the ratio of ours to stock per round.

    Memory is that of the first round: a server keeps what an earlier round took.
    """
    result: dict[str, Any] = {}
    for which, figures in found.items():
        for key in figures[0]:
            kept = figures[:1] if key.startswith("kib") else figures
            result[f"{which}_{key}"] = round(statistics.median(f[key] for f in kept), 2)
    for key in ("steps_per_s", "opens_per_s", "server_cpu_us_per_step", "p99_ms"):
        ratios = [mine[key] / max(theirs[key], 1e-9) for mine, theirs in zip(found[ours], found["stock"], strict=True)]
        result[f"ratio_{key}_median_of_rounds"] = round(statistics.median(ratios), 3)
        result[f"ratio_{key}_rounds"] = [round(r, 3) for r in ratios]
    return result


def filesystem(directory: Path) -> str:
    """The kind of file system that ``directory`` lies on."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted, kind, *_ = line.split()
        if directory.resolve().is_relative_to(mounted) and len(mounted) >= len(best[0]):
            best = (mounted, kind)
    return best[1]
