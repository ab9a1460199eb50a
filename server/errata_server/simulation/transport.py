"""A WebSocket between a client and an ASGI app without a socket, with delays, cuts and silence drawn from a seed.

    socket = SimulatedSocket(app, chance, on_frame=hear, on_lost=gone, subprotocols=("openenv.mux.v1",))
    socket.send(b"...")        # arrives later; frames of one direction keep their order
    socket.leave()             # the client gives it up; what it sent still arrives, and then the news

What the application sees is what it sees of uvicorn: ``websocket.connect``, frames as text, ``websocket.disconnect``;
its ``send`` waits while the peer does not read, and raises OSError once the peer is known to be gone.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]

KEEPALIVE_S = 40.0
"""When the server gives a silent peer up: uvicorn's ping interval and timeout of 20 s each."""

WINDOW_BYTES = 64 * 1024
"""What is on its way to a client before `send` waits, as it does for full socket buffers."""


class SimulatedSocket:
    """One connection, from its handshake on. Either end may be gone while the other does not know.

    Args:
        app: ASGI application.
        chance: Draws delays and what a broken connection loses.
        on_open: Called when the application accepted, with its ``websocket.accept``.
        on_frame: Takes a frame that arrived at the client.
        on_lost: Called once, when the client notices that the connection is gone; not after `leave`.
        latency_s: Least and greatest delay of a frame.
        window_bytes: See `WINDOW_BYTES`.
        scope: More of the ASGI scope, such as ``path`` and ``headers``.
        subprotocols: What the client offers.

    Attributes:
        task: The application's.
    """

    def __init__(
        self,
        app: App,
        chance: random.Random,
        *,
        on_open: Callable[[Message], None],
        on_frame: Callable[[str], None],
        on_lost: Callable[[], None],
        latency_s: tuple[float, float] = (0.0, 0.0),
        window_bytes: int = WINDOW_BYTES,
        scope: MutableMapping[str, Any] | None = None,
        subprotocols: Sequence[str] = (),
    ) -> None:
        self._chance = chance
        self._on_open = on_open
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._latency_s = latency_s
        self._window_bytes = window_bytes
        self._loop = asyncio.get_running_loop()
        self._up = _Direction(self._arrive)
        self._down = _Direction(self._deliver)
        self._inbox: deque[Message] = deque([{"type": "websocket.connect"}])
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._client_gone = self._server_gone = False  # each end's own knowledge
        self._paused: list[str] | None = None
        given: dict[str, Any] = {
            "type": "websocket",
            "asgi": {"version": "3.0"},
            "scheme": "ws",
            "http_version": "1.1",
            "path": "/ws",
            "raw_path": b"/ws",
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"testserver")],
            "client": ("127.0.0.1", 50000),
            "server": ("testserver", 80),
            "subprotocols": list(subprotocols),
            "state": {},
            "extensions": {},
        }
        self.task = self._loop.create_task(app(given | dict(scope or {}), self._receive, self._send))

    # -- the client's end -------------------------------------------------------------------------------------------

    def send(self, frame: bytes | str, *, cut_at: int | None = None) -> None:
        """Send a frame.

        Args:
            frame: The message.
            cut_at: What arrives is cut off there, as by a broken proxy.
        """
        text = frame if isinstance(frame, str) else frame.decode()
        self._put(self._up, {"type": "websocket.receive", "text": text if cut_at is None else text[:cut_at]})

    def leave(self, *, after_s: float = 0.0) -> None:
        """Give the connection up: nothing is heard any more. What was sent still arrives, and then that it is gone.

        Args:
            after_s: How much later than its last frame the server is told.
        """
        if not self._client_gone:
            self._client_gone = True
            self._down.stop()
            self._put(self._up, {"type": "websocket.disconnect", "code": 1001}, delay_s=after_s)

    def pause(self) -> None:
        """Let the client read nothing, until `unpause`."""
        if self._paused is None:
            self._paused = []

    def unpause(self) -> None:
        """Let it read on."""
        held, self._paused = self._paused or [], None
        for text in held:
            self._hear(text)

    # -- what becomes of the connection -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Break the connection: both ends are told, and of what was under way a part is lost, each from its end."""
        if self._up.closed:
            return  # it is silent or broken already
        self._up.lose_end(self._chance)
        self._down.lose_end(self._chance)
        self._put(self._up, {"type": "websocket.disconnect", "code": 1006})
        self._put(self._down, None)
        self._up.closed = self._down.closed = True

    def silence(self, *, client_notices_s: float = KEEPALIVE_S, server_notices_s: float = KEEPALIVE_S) -> None:
        """Let everything vanish from now on, and let each end find out by its own keepalive."""
        self._up.stop()
        self._down.stop()
        self._loop.call_later(server_notices_s, self._arrive, {"type": "websocket.disconnect", "code": 1006})
        self._loop.call_later(client_notices_s, self._deliver, None)

    def orphaned(self) -> list[str]:
        """Return what still reaches the client after the server died: the first of the frames under way.

        To be called when the event loop that both ran on is gone.
        """
        if self._client_gone:
            return []
        self._client_gone = True
        frames = [
            *(self._paused or ()),
            *(m["text"] for m in self._down.under_way() if m is not None and "text" in m),
        ]
        return frames[: self._chance.randint(0, len(frames))]

    # -- the application's end --------------------------------------------------------------------------------------

    async def _receive(self) -> Message:
        while not self._inbox:
            self._readable = self._loop.create_future()
            await self._readable
        message = self._inbox[0]
        if message["type"] != "websocket.disconnect":  # which is told again and again, as uvicorn does
            self._inbox.popleft()
        return message

    async def _send(self, message: Message) -> None:
        if self._server_gone:
            raise OSError("the peer is gone")
        if message["type"] == "websocket.close":
            self._server_gone = True
            self._put(self._down, None)
            return
        self._put(self._down, message, len(message.get("text") or message.get("bytes") or ""))
        while self._down.size_bytes > self._window_bytes and not self._server_gone:
            self._writable = self._loop.create_future()
            await self._writable

    def _arrive(self, message: Message | None) -> None:
        assert message is not None
        if self._server_gone:
            return
        self._inbox.append(message)
        if message["type"] == "websocket.disconnect":
            self._server_gone = True
            self._up.stop()
            _wake(self._writable)
        _wake(self._readable)

    def _deliver(self, message: Message | None) -> None:
        if self._client_gone:
            return
        if message is None:
            self._client_gone = True
            self._down.stop()
            self._on_lost()
        elif message["type"] == "websocket.accept":
            self._on_open(message)
        elif self._paused is not None:
            self._down.size_bytes += len(message["text"])  # it fills the buffers until it is read
            self._paused.append(message["text"])
        else:
            self._on_frame(message["text"])
        if self._down.size_bytes <= self._window_bytes:
            _wake(self._writable)

    def _hear(self, text: str) -> None:
        self._down.size_bytes -= len(text)
        if not self._client_gone:
            self._on_frame(text)
        if self._down.size_bytes <= self._window_bytes:
            _wake(self._writable)

    def _put(
        self, direction: _Direction, message: Message | None, size_bytes: int = 0, *, delay_s: float = 0.0
    ) -> None:
        least, greatest = self._latency_s
        latency_s = least if least == greatest else self._chance.uniform(least, greatest)
        direction.put(self._loop, message, size_bytes, latency_s + delay_s)


class _Direction:
    """Frames on their way, in order; one timer for each."""

    def __init__(self, arrived: Callable[[Message | None], None]) -> None:
        self.size_bytes = 0
        self._arrived = arrived
        self._frames: deque[tuple[Message | None, int, asyncio.TimerHandle]] = deque()
        self._last_s = 0.0
        self.closed = False
        """What is sent from now on vanishes; what is under way arrives."""

    def put(self, loop: asyncio.AbstractEventLoop, message: Message | None, size_bytes: int, delay_s: float) -> None:
        if self.closed:
            return
        self._last_s = max(math.nextafter(self._last_s, math.inf), loop.time() + delay_s)  # equal timers have no order
        self._frames.append((message, size_bytes, loop.call_at(self._last_s, self._first)))
        self.size_bytes += size_bytes

    def _first(self) -> None:
        message, size_bytes, _ = self._frames.popleft()
        self.size_bytes -= size_bytes
        self._arrived(message)

    def under_way(self) -> list[Message | None]:
        return [message for message, _, _ in self._frames]

    def lose_end(self, chance: random.Random) -> None:
        for _ in range(chance.randint(0, len(self._frames))):
            _, size_bytes, timer = self._frames.pop()
            self.size_bytes -= size_bytes
            timer.cancel()

    def stop(self) -> None:
        """Lose everything, and take nothing more."""
        self.closed = True
        self.size_bytes = 0
        for _, _, timer in self._frames:
            timer.cancel()
        self._frames.clear()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
