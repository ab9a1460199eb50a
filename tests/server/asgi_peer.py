"""A WebSocket client that speaks ASGI to an application on this event loop: no thread, no socket, ten times as fast."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, Self

from starlette.types import ASGIApp

REPLY_S = 20.0


class Peer:
    """One connection.

    Args:
        app: The application.
        path: Where its door is.
        headers: Of the handshake.
        query: After the question mark.
        subprotocols: That the client offers.
    """

    def __init__(
        self,
        app: ASGIApp,
        path: str = "/ws",
        *,
        headers: dict[str, str] | None = None,
        query: str = "",
        subprotocols: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        given = {"host": "testserver", **(headers or {})}
        self._scope: dict[str, Any] = {
            "type": "websocket",
            "asgi": {"version": "3.0"},
            "scheme": "ws",
            "http_version": "1.1",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
            "client": ("testclient", 50000),
            "server": ("testserver", 80),
            "subprotocols": list(subprotocols),
            "state": {},
            "extensions": {"websocket.http.response": {}},
        }
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._sent.put_nowait({"type": "websocket.connect"})
        self._task = asyncio.create_task(self._app(self._scope, self._sent.get, self.got.put))  # type: ignore[arg-type]
        self.answer = await asyncio.wait_for(self.got.get(), REPLY_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        await asyncio.wait_for(self._task, REPLY_S)

    def hang_up(self) -> None:
        """Disconnect, without waiting for the application to notice."""
        self._sent.put_nowait({"type": "websocket.disconnect", "code": 1000})

    def send(self, frame: str | bytes) -> None:
        """Send a frame."""
        self._sent.put_nowait({"type": "websocket.receive", "text" if isinstance(frame, str) else "bytes": frame})

    async def receive(self) -> dict[str, Any] | None:
        """Return the next reply, None where the door hung up."""
        message = await asyncio.wait_for(self.got.get(), REPLY_S)
        return json.loads(message["text"], parse_constant=_refuse) if message["type"] == "websocket.send" else None

    async def ask(self, frame: str | bytes | dict[str, Any]) -> dict[str, Any] | None:
        """Send a frame and return its reply."""
        self.send(json.dumps(frame) if isinstance(frame, dict) else frame)
        return await self.receive()


def _refuse(name: str) -> None:
    raise AssertionError(f"a reply holds {name}, which is not JSON")
