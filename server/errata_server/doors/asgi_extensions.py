"""ASGI extensions of ``errata serve``: batched receive, bounds of messages, sockets that outlive their ASGI call.

`BoundedSocket` and `DetachableSocket` in `errata_server.serve.uvicorn_protocols` implement them. Doors work without
them, with more memory and CPU.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

from msgspec import Struct
from starlette.websockets import WebSocket

from errata_protocol.errors import FrameTooLarge, Overloaded
from errata_protocol.mux import Allowance

RETRY_AFTER_S = 1.0
"""``retry_after`` of the error for a message that did not fit in its principal's memory, seconds."""

BATCHED_RECEIVE = "errata.batched_receive"
"""Name of the extension that delivers messages which arrived together as one event; see `BoundedSocket`."""

DETACHED = "errata.detached"
"""Name of the extension that serves a socket after its ASGI call has returned; see `DetachableSocket`."""

MESSAGE_BOUNDS = "errata.message_bounds"
"""Name of the extension with which a door sets bounds for messages and receives an `Unread` for each message over them;
see `BoundedSocket`."""


@final
class Unread(Struct, frozen=True):
    """A message that exceeded a bound; its bytes were discarded as they arrived.

    A ``websocket.receive`` event holds it under ``unread``, or as one of its ``messages`` (`BATCHED_RECEIVE`).

    Args:
        size_bytes: Size of the message.
        limit_bytes: The bound that it exceeded.
        overloaded: True where that bound is the one on all unfinished messages of a principal, False where it is the
            one on a single message.
    """

    size_bytes: int
    limit_bytes: int
    overloaded: bool = False

    def error(self) -> FrameTooLarge | Overloaded:
        """Return the error to send to the client."""
        if self.overloaded:
            return Overloaded(
                f"a frame of {self.size_bytes} bytes was not kept: unfinished messages of your sockets hold the "
                f"{self.limit_bytes} bytes they may (ERRATA_MAX_UNFINISHED_BYTES); finish some, then send it again",
                retry_after=RETRY_AFTER_S,
            )
        return FrameTooLarge(
            f"a frame of {self.size_bytes} bytes is over the limit of {self.limit_bytes}: send less in one action"
        )


def set_message_bounds(websocket: WebSocket, max_bytes: int, unfinished: Allowance) -> None:
    """Set the bounds of a socket's messages; its endpoint then receives an `Unread` for each message over them.

    Call it before the socket is accepted. Does nothing where the server has no such extension.

    Args:
        websocket: The socket.
        max_bytes: Largest message.
        unfinished: Bounds the unfinished messages of all sockets of its principal together.
    """
    set_bounds = websocket.scope.get("extensions", {}).get(MESSAGE_BOUNDS)
    if set_bounds is not None:
        set_bounds(max_bytes, unfinished)


Serve = Callable[[WebSocket], Awaitable[None]]


async def serve_detached(websocket: WebSocket, serve: Serve) -> None:
    """Serve a socket after its ASGI call has returned, where the server can do that; else serve it within the call.

    Middleware and routing then need no memory while the socket is open. An exception that ``serve`` raises after the
    call is logged by the server; no exception handler of the application sees it.

    Args:
        websocket: The socket, not yet accepted.
        serve: Called with ``websocket``; after the call, with a copy whose scope has only path, query, subprotocols,
            peer and extensions.
    """
    serve_later = websocket.scope.get("extensions", {}).get(DETACHED)
    # FastAPI releases the dependencies of a route when its endpoint returns, and ``serve`` may use them.
    if serve_later is None or getattr(websocket.scope.get("route"), "dependencies", None):
        await serve(websocket)
    else:
        serve_later(serve)
