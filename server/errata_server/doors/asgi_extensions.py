"""Uses two ASGI extensions of ``errata serve``: batched receive, and serving a socket after its ASGI call returned.

`errata_server.serve.uvicorn_protocols` implements them; doors work without, only with more memory and CPU.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.websockets import WebSocket

TOGETHER = "errata.together"
"""Name of the extension that hands over messages which arrived together; see `uvicorn_protocols.BoundedSocket`."""

BY_ITSELF = "errata.by_itself"
"""Name of the extension that serves a socket after its ASGI call has returned; see `uvicorn_protocols.LoneSocket`."""

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
