"""A simulated WebSocket between a client and an ASGI app, with delays and faults drawn from a seed.

    socket = SimulatedSocket(app, chance, on_open=..., on_frame=..., on_lost=..., subprotocols=("openenv.mux.v1",))
    socket.send(b"...")        # arrives later; frames of one direction keep their order
    socket.leave()             # the client disconnects; what it sent still arrives, then the disconnection

The application gets the events that uvicorn sends: ``websocket.connect``, frames as text, ``websocket.disconnect``. Its
``send`` waits while the peer does not read, and raises OSError after the disconnection.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from ..concurrency.queues import wake

Message = MutableMapping[str, Any]
App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]

KEEPALIVE_S = 40.0
"""Time after which the server disconnects a silent peer: uvicorn's ping interval plus its timeout, 20 s each."""

WINDOW_BYTES = 64 * 1024
"""Bytes in transit to a client above which the application's ``send`` waits, as with full socket buffers."""


class SimulatedSocket:
    """One connection, starting with its handshake. One end may be disconnected before the other notices.

    Args:
        app: The ASGI application.
        chance: Random numbers for delays and for what a broken connection loses.
        on_open: Called with the ``websocket.accept`` event when the application accepts.
        on_frame: Called with each frame that arrives at the client.
        on_lost: Called once, when the client notices that the connection is lost; not after `leave`.
        latency_s: Shortest and longest delay of a frame.
        window_bytes: See `WINDOW_BYTES`.
        scope: Further entries of the ASGI scope, such as ``path`` and ``headers``.
        subprotocols: Subprotocols that the client offers.
        server_loop: Event loop of the application; None where client and application have the same.

    Attributes:
        task: The application's task.
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
        server_loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._chance = chance
        self._on_open = on_open
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._latency_s = latency_s
        self._window_bytes = window_bytes
        self._loop = asyncio.get_running_loop()
        self._server_loop = server_loop or self._loop
        self._up = _Direction(self._server_loop, self._arrive)
        self._down = _Direction(self._loop, self._deliver)
        self._inbox: deque[Message] = deque([{"type": "websocket.connect"}])
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._client_gone = self._server_gone = False  # what each end knows of the connection
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
        self.task = self._server_loop.create_task(app(given | dict(scope or {}), self._receive, self._send))

    # -- the client's end -------------------------------------------------------------------------------------------

    def send(self, frame: bytes | str, *, cut_at: int | None = None) -> None:
        """Send a frame from the client.

        Args:
            frame: The frame.
            cut_at: Truncate the frame to this length on the way, as a broken proxy might.
        """
        text = frame if isinstance(frame, str) else frame.decode()
        self._put(self._up, {"type": "websocket.receive", "text": text if cut_at is None else text[:cut_at]})

    def leave(self, *, after_s: float = 0.0) -> None:
        """Disconnect the client: it gets nothing more; what it sent still arrives, followed by the disconnection.

        Args:
            after_s: Delay of the disconnection after the last frame.
        """
        if not self._client_gone:
            self._client_gone = True
            self._down.stop()
            self._put(self._up, {"type": "websocket.disconnect", "code": 1001}, delay_s=after_s)

    def pause(self) -> None:
        """Stop the client from reading, until `unpause`."""
        if self._paused is None:
            self._paused = []

    def unpause(self) -> None:
        """Let the client read again, beginning with the frames that arrived meanwhile."""
        held, self._paused = self._paused or [], None
        for text in held:
            self._hear(text)

    # -- faults of the connection -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Break the connection: both ends notice, and the last frames in transit are lost, a random number of them."""
        if self._up.closed:
            return  # silenced or broken already
        self._up.lose_end(self._chance)
        self._down.lose_end(self._chance)
        self._put(self._up, {"type": "websocket.disconnect", "code": 1006})
        self._put(self._down, None)
        self._up.closed = self._down.closed = True

    def silence(self, *, client_notices_s: float = KEEPALIVE_S, server_notices_s: float = KEEPALIVE_S) -> None:
        """Lose all frames in transit and later ones; each end notices after the given time, as by its keepalive."""
        self._up.stop()
        self._down.stop()
        if not self._server_gone:
            told = {"type": "websocket.disconnect", "code": 1006}
            self._server_loop.call_later(server_notices_s, self._arrive, told)
        self._loop.call_later(client_notices_s, self._deliver, None)

    def cut_off(self, *, client_notices_s: float) -> None:
        """Lose the server, whose machine crashed or was cut off: the first few frames in transit still arrive.

        Args:
            client_notices_s: Time after which the client notices.
        """
        self._server_gone = True
        self._up.stop()
        self._readable = self._writable = None
        if not self._down.closed:  # else it breaks already, and the client is about to notice
            self._down.lose_end(self._chance)
            self._put(self._down, None, delay_s=client_notices_s)
            self._down.closed = True

    def orphaned(self) -> list[str]:
        """Return the frames that still reach the client after the server crashed: the first few of those in transit.

        Called after the event loop of both has ended.
        """
        if self._client_gone:
            return []
        self._client_gone = True
        frames = [
            *(self._paused or ()),
            *(m["text"] for m in self._down.in_transit() if m is not None and "text" in m),
        ]
        return frames[: self._chance.randint(0, len(frames))]

    # -- the application's end --------------------------------------------------------------------------------------

    async def _receive(self) -> Message:
        """The application's ``receive``."""
        while not self._inbox:
            self._readable = self._server_loop.create_future()
            await self._readable
        message = self._inbox[0]
        if message["type"] != "websocket.disconnect":  # each further call returns a disconnection again, as in uvicorn
            self._inbox.popleft()
        return message

    async def _send(self, message: Message) -> None:
        """The application's ``send``; waits while more than a window is in transit."""
        if self._server_gone:
            raise OSError("the peer has disconnected")
        if message["type"] == "websocket.close":
            self._server_gone = True
            self._put(self._down, None)
            return
        self._put(self._down, message, len(message.get("text") or message.get("bytes") or ""))
        while self._down.size_bytes > self._window_bytes and not self._server_gone:
            self._writable = self._server_loop.create_future()
            await self._writable

    def _arrive(self, message: Message | None) -> None:
        """Deliver a message to the application."""
        assert message is not None
        if self._server_gone:
            return
        self._inbox.append(message)
        if message["type"] == "websocket.disconnect":
            self._server_gone = True
            self._up.stop()
            wake(self._writable)
        wake(self._readable)

    def _deliver(self, message: Message | None) -> None:
        """Deliver a message to the client; None is the loss of the connection."""
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
            wake(self._writable)

    def _hear(self, text: str) -> None:
        self._down.size_bytes -= len(text)
        if not self._client_gone:
            self._on_frame(text)
        if self._down.size_bytes <= self._window_bytes:
            wake(self._writable)

    def _put(
        self, direction: _Direction, message: Message | None, size_bytes: int = 0, *, delay_s: float = 0.0
    ) -> None:
        """Send a message in a direction with a drawn latency."""
        least, greatest = self._latency_s
        latency_s = least if least == greatest else self._chance.uniform(least, greatest)
        direction.put(message, size_bytes, latency_s + delay_s)


class _Direction:
    """The frames in transit in one direction, in order, with a timer for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[Message | None], None]) -> None:
        self.size_bytes = 0
        self._loop = loop
        self._arrived = arrived
        self._frames: deque[tuple[Message | None, int, asyncio.TimerHandle]] = deque()
        self._last_s = 0.0
        self.closed = False
        """Frames sent from now on are lost; those in transit still arrive."""

    def put(self, message: Message | None, size_bytes: int, delay_s: float) -> None:
        """Send a message, which arrives after ``delay_s`` and after all earlier ones."""
        if self.closed:
            return
        self._last_s = max(
            math.nextafter(self._last_s, math.inf), self._loop.time() + delay_s
        )  # timers with equal times have no defined order
        self._frames.append((message, size_bytes, self._loop.call_at(self._last_s, self._first)))
        self.size_bytes += size_bytes

    def _first(self) -> None:
        message, size_bytes, _ = self._frames.popleft()
        self.size_bytes -= size_bytes
        self._arrived(message)

    def in_transit(self) -> list[Message | None]:
        return [message for message, _, _ in self._frames]

    def lose_end(self, chance: random.Random) -> None:
        """Lose a random number of the last frames in transit."""
        for _ in range(chance.randint(0, len(self._frames))):
            _, size_bytes, timer = self._frames.pop()
            self.size_bytes -= size_bytes
            timer.cancel()

    def stop(self) -> None:
        """Lose all frames in transit and all later ones."""
        self.closed = True
        self.size_bytes = 0
        for _, _, timer in self._frames:
            timer.cancel()
        self._frames.clear()
