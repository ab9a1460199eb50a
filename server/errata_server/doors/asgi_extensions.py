"""ASGI extensions of ``errata serve``: batched receive, unread messages, sockets that outlive their ASGI call.

`errata_server.serve.uvicorn_protocols` implements them; doors work without, only with more memory and CPU.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import Struct
from starlette.websockets import WebSocket

from errata_protocol.errors import FrameTooLarge, Overloaded
from errata_protocol.mux import Allowance

RETRY_AFTER_S = 1.0
"""``retry_after`` of a message for which there was no memory, seconds."""

TOGETHER = "errata.together"
"""Name of the extension that hands over messages which arrived together; see `uvicorn_protocols.BoundedSocket`."""

BY_ITSELF = "errata.by_itself"
"""Name of the extension that serves a socket after its ASGI call has returned; see `uvicorn_protocols.LoneSocket`."""

ANSWERS_UNREAD = "errata.answers_unread"
"""Name of the extension by which a door sets bounds for messages, and answers those over them (`Unread`) itself; see
`uvicorn_protocols.BoundedSocket`."""


class Unread(Struct, frozen=True):
    """A message that was read to its end and not kept.

    In ``websocket.receive`` it stands under ``unread``, or between the ``messages`` that came together.

    Args:
        size_bytes: Its size.
        limit_bytes: The bound that it went over.
        overloaded: That bound is of all unfinished messages of its principal; else of one message.
    """

    size_bytes: int
    limit_bytes: int
    overloaded: bool = False

    def error(self) -> FrameTooLarge | Overloaded:
        """Return the error that its sender gets."""
        if self.overloaded:
            return Overloaded(
                f"a frame of {self.size_bytes} bytes was not kept: unfinished messages of your sockets hold the "
                f"{self.limit_bytes} bytes they may (ERRATA_MAX_UNFINISHED_BYTES); finish some, then send it again",
                retry_after=RETRY_AFTER_S,
            )
        return FrameTooLarge(
            f"a frame of {self.size_bytes} bytes is over the limit of {self.limit_bytes}: send less in one action"
        )


def answers_unread(websocket: WebSocket, max_bytes: int, unfinished: Allowance) -> None:
    """Set the bounds of a socket whose endpoint answers what is over them; before it is accepted.

    Args:
        websocket: What the endpoint got.
        max_bytes: Largest message.
        unfinished: Bounds the messages of its principal whose end has not come.
    """
    take = websocket.scope.get("extensions", {}).get(ANSWERS_UNREAD)
    if take is not None:
        take(max_bytes, unfinished)


Serve = Callable[[WebSocket], Awaitable[None]]


async def by_itself(websocket: WebSocket, serve: Serve) -> None:
    """Serve a socket that is not yet accepted: by itself where the server can do that, else in here.

    By itself, an exception out of ``serve`` is the server's to log, not an exception handler's to answer.

    Args:
        websocket: What the endpoint got.
        serve: Is called with it, or with another of which only path, query, subprotocols and peer are known.
    """
    take = websocket.scope.get("extensions", {}).get(BY_ITSELF)
    # What the route depends on is given back when the endpoint returns.
    if take is None or getattr(websocket.scope.get("route"), "dependencies", ()):
        await serve(websocket)
    else:
        take(serve)
