"""Load over plain sockets, one for each session, as OpenEnv's client uses them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from .factories import FactoryCheck
from .latencies import spread_ms
from .websocket import WebSocket, prepared

PING_S = 20.0
"""Interval in seconds of the pings of OpenEnv's client, and its time limit for a pong."""
CONNECT_S = 10.0
"""Time limit in seconds of OpenEnv's client for the handshake."""

STATE = b'{"type":"state"}'


def is_observation(text: bytes) -> bool:
    """Return whether a message is an observation, whatever white space its JSON has."""
    return text[:24].replace(b" ", b"").startswith(b'{"type":"observation"')


class PlainLoad:
    """Many plain sockets.

    Args:
        port: The server's.
        as_upstream: Offer compression and send pings, as OpenEnv's client does.
    """

    def __init__(self, port: int, *, as_upstream: bool = False) -> None:
        self._port = port
        self._as_upstream = as_upstream
        self._sockets: list[WebSocket] = []
        self._pinging: asyncio.Task[None] | None = None
        self._overdue = 0

    async def open(
        self,
        sessions: int,
        then: str = "reset",
        parallel: int = 64,
        reset: dict[str, Any] | None = None,
        counter: str | None = None,
    ) -> dict[str, float]:
        """Open sessions, ``parallel`` at a time.

        Args:
            sessions: Number of sessions.
            then: Request that has to be answered before a session counts as open: ``state``, ``reset``, or ``nothing``
                but the handshake, at which the environment's factory has not run yet.
            parallel: Number of sessions that are opened at a time.
            reset: Arguments of reset.
            counter: File in which instances are counted; see `FactoryCheck`.
        """
        check = FactoryCheck(counter)
        gate = asyncio.Semaphore(parallel)
        took: list[float] = []
        asked = _reset(reset) if then == "reset" else STATE

        async def one() -> WebSocket:
            async with gate:
                began = time.perf_counter()
                socket = await WebSocket.connect(self._port, deflate=self._as_upstream)
                if then != "nothing":
                    text = await socket.ask(prepared(asked, deflate=socket.deflated))
                    if then == "reset" and not is_observation(text):
                        raise RuntimeError(f"reset was answered {text[:300]!r}")
                    if then == "state" and b'"state"' not in text[:24]:
                        raise RuntimeError(f"state was answered {text[:300]!r}")
                took.append(time.perf_counter() - began)
                check.answered(len(took))
                return socket

        began, cpu = time.perf_counter(), time.process_time()
        self._sockets += await asyncio.gather(*(one() for _ in range(sessions)))
        elapsed = time.perf_counter() - began
        self._keep_alive()
        return {
            "opened": float(sessions),
            "factories_missing": check.missing,
            "opens_per_s": sessions / elapsed,
            "client_cpu_us": (time.process_time() - cpu) / sessions * 1e6,
            **spread_ms(took),
        }

    async def burst(self, sessions: int, timeout_s: float = CONNECT_S, retries: int = 1) -> dict[str, float]:
        """Open all sessions at once, each within a time limit; then reset those that are open.

        Args:
            sessions: Number of sessions.
            timeout_s: Time limit for connection and handshake, as OpenEnv's ``connect_timeout_s``.
            retries: Number of further attempts for sessions that failed; they are counted separately.
        """
        began = time.perf_counter()
        last = began

        async def one() -> WebSocket | None:
            nonlocal last
            try:
                async with asyncio.timeout(timeout_s):
                    socket = await WebSocket.connect(self._port, deflate=self._as_upstream)
            except (OSError, TimeoutError):
                return None
            last = time.perf_counter()
            return socket

        opened = [s for s in await asyncio.gather(*(one() for _ in range(sessions))) if s is not None]
        found = {"opened": float(len(opened)), "last_opened_s": last - began}
        for _ in range(retries):
            opened += [
                s for s in await asyncio.gather(*(one() for _ in range(sessions - len(opened)))) if s is not None
            ]
        found["opened_after_retry"] = float(len(opened))
        self._sockets += opened
        frame = _reset(None)

        async def usable(socket: WebSocket) -> bool:
            try:
                async with asyncio.timeout(60):
                    return is_observation(await socket.ask(prepared(frame, deflate=socket.deflated)))
            except (OSError, TimeoutError):
                return False

        found["usable"] = float(sum(await asyncio.gather(*(usable(socket) for socket in opened))))
        return found

    async def step(self, seconds: float, action: dict[str, Any], limit: int | None = None) -> dict[str, float]:
        """Step every session back to back.

        Args:
            seconds: Time after which no further step is sent.
            action: The action of each step.
            limit: Largest number of steps of each session.
        """
        message = json.dumps({"type": "step", "data": action}, separators=(",", ":")).encode()
        frames = {deflate: prepared(message, deflate=deflate) for deflate in (False, True)}
        took: list[float] = []
        began, cpu = time.perf_counter(), time.process_time()
        end = began + seconds
        await asyncio.gather(*(_drive(s, frames[s.deflated], end, limit, took) for s in self._sockets))
        elapsed = time.perf_counter() - began
        return {
            "steps": float(len(took)),
            "steps_per_s": len(took) / elapsed,
            "client_cpu_us": (time.process_time() - cpu) / len(took) * 1e6,
            "deflated": float(sum(socket.deflated for socket in self._sockets)),
            "pongs_overdue": float(self._overdue),
            **spread_ms(took),
        }

    def abandon(self) -> None:
        """Drop every socket after a failure, so that the other sessions stop stepping."""
        self._stop_pings()
        for socket in self._sockets:
            socket.cut()
        self._sockets = []

    async def close(self) -> dict[str, float]:
        """End every session."""
        self._stop_pings()
        began = time.perf_counter()
        sockets, self._sockets = self._sockets, []
        await asyncio.gather(*(socket.close() for socket in sockets))
        return {"closed": float(len(sockets)), "seconds": time.perf_counter() - began}

    def _keep_alive(self) -> None:
        if self._as_upstream and self._pinging is None:
            self._pinging = asyncio.create_task(self._ping())

    def _stop_pings(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None

    async def _ping(self) -> None:
        """Send the pings of all sockets, spread over `PING_S` as for sockets opened one after the other."""
        slices = 200
        while True:
            for part in range(slices):
                await asyncio.sleep(PING_S / slices)
                for socket in self._sockets[part::slices]:
                    self._overdue += socket.pongs_missing > 0
                    socket.ping()


def _reset(arguments: dict[str, Any] | None) -> bytes:
    return json.dumps({"type": "reset", "data": arguments or {}}, separators=(",", ":")).encode()


def _drive(socket: WebSocket, frame: bytes, end: float, limit: int | None, took: list[float]) -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sent = time.perf_counter()
    left = limit

    def on_message(text: bytes) -> None:
        nonlocal sent, left
        now = time.perf_counter()
        took.append(now - sent)
        if left is not None:
            left -= 1
        if not is_observation(text):
            done.set_exception(RuntimeError(f"a step was answered {text[:300]!r}"))
        elif now < end and left != 0:
            sent = now
            socket.send(frame)
        else:
            done.set_result(None)

    def on_lost(_: object) -> None:
        if not done.done():
            done.set_exception(ConnectionResetError("the server closed a socket between two steps"))

    socket.on_message = on_message
    socket.lost.add_done_callback(on_lost)
    done.add_done_callback(lambda _: socket.lost.remove_done_callback(on_lost))
    socket.send(frame)
    return done
