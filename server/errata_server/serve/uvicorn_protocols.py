"""uvicorn's protocols with header timeout, backpressure, batched receive, and sockets that outlive their ASGI call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp
from starlette.websockets import WebSocket
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from errata_protocol.mux import Allowance

from ..concurrency.queues import Arrivals, Gate
from ..doors.asgi_extensions import ANSWERS_UNREAD, BY_ITSELF, TOGETHER, Serve, Unread
from .connections import Connections
from .ws_frames import ClientFrames, Other

READ_AHEAD_BYTES = 256 * 1024
"""Messages that came together wait in memory up to this size; beyond it the socket is not read."""

SWITCHING_PROTOCOLS = 101
MESSAGE_TOO_BIG, TRY_AGAIN_LATER = 1009, 1013

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


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """Bounds of the messages on sockets whose doors set none.

    Args:
        max_bytes: Largest message.
        unfinished_of: Returns what bounds the unfinished messages of a principal.
    """

    max_bytes: int
    unfinished_of: Callable[[str | None], Allowance]

    @classmethod
    def of(cls, config: Any) -> MessageBounds | None:
        """Return those of a server with this `uvicorn.Config`; None where nobody gave it any."""
        return getattr(config, "bounds", None)


class BoundedSocket(WebSocketsSansIOProtocol):
    """Holds no more of a client's messages than their bounds, and reads nothing while its peer does not read.

    Data frames are read by `ClientFrames`, control frames and whatever breaks the protocol by uvicorn and websockets.
    A message over a bound is answered by the door where it says that it does so (`asgi_extensions.ANSWERS_UNREAD`);
    else the socket is closed, with 1009 or 1013. Pongs would pile up without end while the peer does not read
    (PROTOCOL D9).

    An application may call ``scope["extensions"][TOGETHER]()`` before it accepts: messages that came together are then
    one event, ``websocket.receive`` with a list of bytes under ``messages``. For a socket of thousands of small
    messages a second, what is done for each message costs more than the message.

    What it holds for each socket is small: no queue of asyncio's, no headers once they were answered.
    """

    _frames: ClientFrames | None = None
    _early: tuple[bytes, ...] = ()
    _together = False
    _answers_unread = False
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
        if self.response.status_code == SWITCHING_PROTOCOLS and not self.conn.extensions:
            bounds = MessageBounds.of(self.config)
            self._frames = ClientFrames(self.config.ws_max_size, bounds.max_bytes if bounds is not None else None)
            self.scope["extensions"][TOGETHER] = self._take_together
            self.scope["extensions"][ANSWERS_UNREAD] = self._leave_unread

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            self.scope["extensions"].clear()  # methods of this object, which it would keep alive

    def connection_lost(self, exc: Exception | None) -> None:
        Connections.of(self.config).lost(self)
        super().connection_lost(exc)
        if self._frames is not None:
            self._frames.close()
        self._early = ()
        self.conn.parser.close()  # a generator that waits for more keeps itself alive, and all of its connection
        refused = self.conn.handshake_exc
        while refused is not None:  # likewise the frames in which a handshake was refused
            refused.__traceback__ = None
            refused = refused.__context__

    def _take_together(self) -> None:
        self._together = True

    def _leave_unread(self, max_bytes: int, unfinished: Allowance) -> None:
        self._answers_unread = True
        self._frames = ClientFrames(self.config.ws_max_size, max_bytes, unfinished)

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            super().data_received(data)
        elif self.handshake_complete:
            self._cut(self._frames, data)
        else:
            # Sent before the answer to the handshake, which says who may send how much.
            self._early += (data,)
            self.transport.pause_reading()

    def _cut(self, frames: ClientFrames, data: bytes) -> None:
        messages: list[bytes | str | Unread] = []
        for piece in frames.cut(data):
            if type(piece) is Other:
                self._put(messages)
                messages = []
                super().data_received(piece.data)
            elif type(piece) is Unread and not self._answers_unread:
                self._put(messages)
                self._close_over_bound(piece)
                return
            else:
                messages.append(piece)  # type: ignore[arg-type]
        self._put(messages)

    def _put(self, messages: list[bytes | str | Unread]) -> None:
        if not messages or self.close_sent:
            return
        if not self._together:
            for message in messages:
                kind = "text" if type(message) is str else "unread" if type(message) is Unread else "bytes"
                self.queue.put_nowait({"type": "websocket.receive", kind: message})  # type: ignore[typeddict-item,misc]
            self._pause()
            return
        self.queue.put_nowait({"type": "websocket.receive", "messages": messages})
        self._waiting_bytes += _size(messages)
        if self._waiting_bytes >= READ_AHEAD_BYTES:
            self._pause()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _close_over_bound(self, unread: Unread) -> None:
        if not self.close_sent:
            self.conn.fail(TRY_AGAIN_LATER if unread.overloaded else MESSAGE_TOO_BIG, unread.error().message[:120])
            self.handle_parser_exception()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused and not self._early:
            self.transport.resume_reading()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._accepted()
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            # The handshake was answered, with a refusal: uvicorn would log it as an application that answered nothing.
            self.handshake_complete = True

    def _accepted(self) -> None:
        frames = self._frames
        if frames is not None:
            unfinished = frames.allowance
            if unfinished is None and (bounds := MessageBounds.of(self.config)) is not None:
                unfinished = bounds.unfinished_of(self.scope.get("state", {}).get("principal"))
            frames.settle(unfinished, decode=not self._together, in_place=self._answers_unread)
            early, self._early = self._early, ()
            for data in early:
                self._cut(frames, data)
            if early and not self.read_paused and not self.transport.is_closing():
                self.transport.resume_reading()
        self.request.headers.clear()  # the parser keeps them as long as the socket lives
        self.response.headers.clear()

    async def receive(self) -> Any:
        message = await super().receive()
        if "messages" in message:
            self._waiting_bytes -= _size(message["messages"])
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message


def _size(messages: list[bytes | str | Unread]) -> int:
    return sum(len(message) for message in messages if type(message) is not Unread)  # type: ignore[arg-type]


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
