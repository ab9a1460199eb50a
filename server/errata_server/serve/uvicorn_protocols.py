"""uvicorn's protocols with a header timeout, backpressure, batched receive and detached sockets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp
from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from errata_protocol.mux import Allowance

from ..concurrency.queues import Arrivals, Gate
from ..doors.asgi_extensions import BATCHED_RECEIVE, DETACHED, MESSAGE_BOUNDS, Serve, Unread
from .connections import Connections
from .ws_frames import ClientFrames, Other

if TYPE_CHECKING:
    # uvicorn types its choice as asyncio.Protocol; the two that it chooses from have what is used here in common.
    from uvicorn.protocols.http.h11_impl import H11Protocol as AutoHTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

READ_AHEAD_BYTES = 256 * 1024
"""Size of batched messages in memory from which the socket is not read any more."""

SWITCHING_PROTOCOLS = 101
MESSAGE_TOO_BIG, TRY_AGAIN_LATER = 1009, 1013

CLOSE_S = 20.0
"""Time for what was sent to reach the peer of a socket that is being closed, seconds; then it is cut."""

HEADERS_S = 20.0
"""Timeout for a request's headers in seconds, from its first byte; for the first one from the connection's start."""


_TOO_MANY_SOCKETS_TEXT = b"all places for WebSockets are taken: try again later; GET /ready says why\n"
TOO_MANY_SOCKETS = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 5\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_TOO_MANY_SOCKETS_TEXT), _TOO_MANY_SOCKETS_TEXT)
)
"""Answer to a handshake when `Connections.full` is set."""


class BoundedHttp(AutoHTTPProtocol):
    """Closes a connection whose next request does not arrive within `HEADERS_S`, and counts it in `Connections`."""

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
            self.transport.write(TOO_MANY_SOCKETS)
            self.transport.close()
        else:
            self._counted.lost(self)
            super().handle_websocket_upgrade(*event)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:  # otherwise the next request has arrived already
            self._counted.request_answered(self)

    def _watch(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering:
            self._counted.request_received(self)
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
    """Limits for messages on sockets whose endpoint sets none.

    Args:
        max_bytes: Largest message, bytes.
        unfinished_of: Returns the allowance for unfinished messages of a principal.
    """

    max_bytes: int
    unfinished_of: Callable[[str | None], Allowance]

    @classmethod
    def of(cls, config: Any) -> MessageBounds | None:
        """Return the ``bounds`` attribute of a `uvicorn.Config`, None if it has none."""
        return getattr(config, "bounds", None)


class BoundedSocket(WebSocketsSansIOProtocol):
    """A WebSocket that limits the memory of received messages, and does not read while its peer does not read.

    `ClientFrames` reads data frames; uvicorn and websockets handle control frames and protocol errors. A message over a
    bound is passed to the door as `Unread` if the door asked for that (`asgi_extensions.MESSAGE_BOUNDS`); otherwise it
    closes the socket, with code 1009 or 1013. Without the pause in reading, pongs would pile up while the peer does not
    read (PROTOCOL D9).

    An application may call ``scope["extensions"][BATCHED_RECEIVE]()`` before it accepts: messages that arrived together
    are then one event, ``websocket.receive`` with a list of bytes under ``messages``. On a socket with thousands of
    small messages a second, the work done for each event costs more than its message.

    Memory for each socket is kept small: there is no asyncio.Queue, and headers are dropped after the handshake.
    """

    # uvicorn declares asyncio's classes, of which it calls no more than these have, and a scope without our extensions.
    queue: Arrivals[dict[str, Any]]  # type: ignore[assignment]
    writable: Gate  # type: ignore[assignment]
    scope: MutableMapping[str, Any]  # type: ignore[assignment]

    _frames: ClientFrames | None = None
    _early: tuple[bytes, ...] = ()
    _batched = False
    _reports_unread = False
    _waiting_bytes = 0
    _cut_timer: asyncio.TimerHandle | None = None

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.queue = Arrivals(self.loop)
        self.writable = Gate(self.loop)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        Connections.of(self.config).upgraded(self)

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == SWITCHING_PROTOCOLS and not self.conn.extensions:
            bounds = MessageBounds.of(self.config)
            self._frames = ClientFrames(self.config.ws_max_size, bounds.max_bytes if bounds is not None else None)
            self.scope["extensions"][BATCHED_RECEIVE] = self._batch_receive
            self.scope["extensions"][MESSAGE_BOUNDS] = self._set_bounds

    async def run_asgi(self) -> None:
        try:
            await super().run_asgi()
        finally:
            self.scope["extensions"].clear()  # bound methods, which would keep this object alive in a cycle
            self._cut_in(CLOSE_S)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._cut_in(0)

    def handle_close(self, event: Any) -> None:
        super().handle_close(event)
        self._cut_in(CLOSE_S)

    def shutdown(self) -> None:
        super().shutdown()
        self._cut_in(CLOSE_S)

    def _cut_in(self, seconds: float) -> None:
        """End the connection after this time if it still exists.

        ``transport.close()`` waits until everything that was sent has been taken, and a peer that is stopped, or whose
        machine is gone, takes nothing: its sessions would stay attached.
        """
        if not self.disconnected and self._cut_timer is None:
            self._cut_timer = self.loop.call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        Connections.of(self.config).lost(self)
        super().connection_lost(exc)
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        if self._frames is not None:
            self._frames.close()
        self._early = ()
        self.conn.parser.close()  # a suspended generator would keep itself and the connection alive
        refused: BaseException | None = self.conn.handshake_exc
        while refused is not None:  # and so would the traceback of a refused handshake
            refused.__traceback__ = None
            refused = refused.__context__

    def _batch_receive(self) -> None:
        self._batched = True

    def _set_bounds(self, max_bytes: int, unfinished: Allowance) -> None:
        self._reports_unread = True
        self._frames = ClientFrames(self.config.ws_max_size, max_bytes, unfinished)

    def data_received(self, data: bytes) -> None:
        if self._frames is None:
            super().data_received(data)
        elif self.handshake_complete:
            self._cut(self._frames, data)
        else:
            # Data before the answer to the handshake waits, because the answer decides the limits.
            self._early += (data,)
            self.transport.pause_reading()

    def _cut(self, frames: ClientFrames, data: bytes) -> None:
        messages: list[bytes | str | Unread] = []
        for piece in frames.cut(data):
            if type(piece) is Other:
                self._put(messages)
                messages = []
                super().data_received(piece.data)
            elif type(piece) is Unread and not self._reports_unread:
                self._put(messages)
                self._close_over_bound(piece)
                return
            else:
                messages.append(piece)
        self._put(messages)

    def _put(self, messages: list[bytes | str | Unread]) -> None:
        if not messages or self.close_sent:
            return
        if not self._batched:
            for message in messages:
                kind = "text" if type(message) is str else "unread" if type(message) is Unread else "bytes"
                self.queue.put_nowait({"type": "websocket.receive", kind: message})
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
            # The handshake was answered with a refusal; without this uvicorn logs that the application did not answer.
            self.handshake_complete = True

    def _accepted(self) -> None:
        frames = self._frames
        if frames is not None:
            unfinished = frames.allowance
            if unfinished is None and (bounds := MessageBounds.of(self.config)) is not None:
                unfinished = bounds.unfinished_of(self.scope.get("state", {}).get("principal"))
            frames.settle(unfinished, decode=not self._batched, in_place=self._reports_unread)
            early, self._early = self._early, ()
            for data in early:
                self._cut(frames, data)
            if early and not self.read_paused and not self.transport.is_closing():
                self.transport.resume_reading()
        self.request.headers.clear()  # the parser would keep them as long as the socket exists
        self.response.headers.clear()

    async def receive(self) -> Any:
        message: Any = await super().receive()
        if "messages" in message:
            self._waiting_bytes -= _size(message["messages"])
        if not self.writable.is_set():
            self.transport.pause_reading()
        return message


def _size(messages: list[bytes | str | Unread]) -> int:
    return sum(len(message) for message in messages if type(message) is not Unread)


KEPT_SCOPE_KEYS = ("type", "path", "query_string", "client", "subprotocols", "extensions")
"""Keys of the scope that the doors and uvicorn's log lines read."""


class DetachableSocket(BoundedSocket):
    """A WebSocket that can be served after its ASGI call has returned; see `asgi_extensions.serve_detached`.

    Middleware and routing keep about a dozen suspended coroutines for each socket until the endpoint returns. The
    endpoint may call ``scope["extensions"][DETACHED](serve)`` and return instead; ``serve`` is called after they have
    ended. The server uses this class only for an application that `allows_detached_sockets`.
    """

    _serve: Serve | None = None

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == SWITCHING_PROTOCOLS:
            self.scope["extensions"][DETACHED] = self._serve_detached

    def _serve_detached(self, serve: Serve) -> None:
        self._serve = serve

    async def run_asgi(self) -> None:
        app = self.app
        self.app = functools.partial(self._run, app)
        try:
            await super().run_asgi()
        finally:
            self.app = app

    async def _run(self, app: ASGIApp, scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        serve, self._serve = self._serve, None
        if serve is not None:
            self.scope = {name: scope[name] for name in KEPT_SCOPE_KEYS}
            del app, scope
            await serve(WebSocket(self.scope, receive, send))
