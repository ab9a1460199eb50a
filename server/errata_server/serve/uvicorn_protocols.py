"""uvicorn's protocols with header timeout, backpressure, batched receive, and sockets that outlive their ASGI call."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from starlette.types import ASGIApp
from starlette.websockets import WebSocket
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ..concurrency.queues import Arrivals, Gate
from ..doors.asgi_extensions import BY_ITSELF, TOGETHER, Serve
from .connections import Connections
from .ws_frames import ClientFrames, Other

READ_AHEAD_BYTES = 256 * 1024
"""Messages that came together wait in memory up to this size; beyond it the socket is not read."""

SWITCHING_PROTOCOLS = 101

HEADERS_S = 20.0
"""How long a request's headers may take, from its first byte on; for the first request, from the connection's start."""


_NO_PLACE = b"all places for WebSockets are taken: try again later; GET /ready says why\n"
NO_PLACE = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 5\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_NO_PLACE), _NO_PLACE)
)
"""The answer to a handshake for which there is no place."""


class BoundedHttp(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes a connection whose next request is not there in time: each holds one of the process's descriptors.

    How many there may be, and which one is closed for another, is said in `connections`.
    """

    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._counted = Connections.of(self.config)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if not self._counted.made(self):
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._counted.lost(self)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, *event: Any) -> None:
        if self._counted.full:
            self._counted.refuse()
            self.transport.write(NO_PLACE)
            self.transport.close()
        else:
            self._counted.lost(self)
            super().handle_websocket_upgrade(*event)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:  # else the next request was here already
            self._counted.idle(self)

    def _watch(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._counted.busy(self)
        if answering or self.transport.is_closing() or self.transport.get_protocol() is not self:
            self._stop()  # also once it is a WebSocket
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class BoundedSocket(WebSocketsSansIOProtocol):
    """Reads nothing while its peer does not read: pongs would pile up without end (PROTOCOL D9).

    An application may call ``scope["extensions"][TOGETHER]()`` before it accepts: messages that came together are then
    one event, ``websocket.receive`` with a list of bytes under ``messages``. For a socket of thousands of small
    messages a second, what is done for each message costs more than the message.

    What it holds for each socket is small: no queue of asyncio's, no headers once they were answered.
    """

    _frames: ClientFrames | None = None
    _early = False
    _waiting_bytes = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.queue = Arrivals(self.loop)  # type: ignore[assignment]
        self.writable = Gate(self.loop)  # type: ignore[assignment]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        Connections.of(self.config).upgraded(self)

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == SWITCHING_PROTOCOLS:
            self.scope["extensions"][TOGETHER] = self._take_together

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            self.scope["extensions"].clear()  # methods of this object, which it would keep alive

    def connection_lost(self, exc: Exception | None) -> None:
        Connections.of(self.config).lost(self)
        super().connection_lost(exc)
        self.conn.parser.close()  # a generator that waits for more keeps itself alive, and all of its connection
        refused = self.conn.handshake_exc
        while refused is not None:  # likewise the frames in which a handshake was refused
            refused.__traceback__ = None
            refused = refused.__context__

    def _take_together(self) -> None:
        if not self._early and not self.conn.extensions and not self.handshake_complete:
            self._frames = ClientFrames(self.config.ws_max_size)

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            shaking_hands = not self.handshake_initiated
            super().data_received(data)
            # Frames that were sent before the answer to the handshake: where one of them ends is not known here.
            self._early = self._early or not shaking_hands or not data.endswith(b"\r\n\r\n")
            return
        messages: list[bytes] = []
        for piece in self._frames.cut(data):
            if type(piece) is Other:
                self._put_together(messages)
                messages = []
                super().data_received(piece.data)
            else:
                messages.append(piece)
        self._put_together(messages)

    def _put_together(self, messages: list[bytes]) -> None:
        if not messages or self.close_sent:
            return
        self.queue.put_nowait({"type": "websocket.receive", "messages": messages})
        self._waiting_bytes += sum(map(len, messages))
        if self._waiting_bytes >= READ_AHEAD_BYTES and not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.accept":
            self.request.headers.clear()  # the parser keeps them as long as the socket lives
            self.response.headers.clear()
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            # The handshake was answered, with a refusal: uvicorn would log it as an application that answered nothing.
            self.handshake_complete = True

    async def receive(self) -> Any:
        message = await super().receive()
        if "messages" in message:
            self._waiting_bytes -= sum(map(len, message["messages"]))
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message


KEPT_SCOPE = ("type", "path", "query_string", "client", "subprotocols", "extensions")
"""What our doors and uvicorn's log lines read of it."""


class LoneSocket(BoundedSocket):
    """Serves an endpoint without what was called before it: see `asgi_extensions.by_itself`.

    Middleware and routing are a dozen coroutines that wait for an endpoint to return, beneath each socket. Here one may
    call ``scope["extensions"][BY_ITSELF](serve)`` and return: ``serve`` runs when they are gone. That is for
    applications without middleware that wants to know how long a socket lives or what goes over it: `only_ours`.
    """

    _serve: Serve | None = None

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == SWITCHING_PROTOCOLS:
            self.scope["extensions"][BY_ITSELF] = self._serve_by_itself

    def _serve_by_itself(self, serve: Serve) -> None:
        self._serve = serve

    async def run_asgi(self) -> None:
        app = self.app
        self.app = functools.partial(self._run, app)  # type: ignore[assignment]
        try:
            await super().run_asgi()
        finally:
            self.app = app

    async def _run(self, app: ASGIApp, scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        serve, self._serve = self._serve, None
        if serve is not None:
            self.scope = {name: scope[name] for name in KEPT_SCOPE}  # type: ignore[misc]
            del app, scope
            await serve(WebSocket(self.scope, receive, send))
