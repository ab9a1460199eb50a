"""Reads ``GET /episodes/events`` of an application on this event loop, as a browser's EventSource does."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, Self

from starlette.types import ASGIApp

from errata_protocol.replay import EpisodeEvent


class EventReader:
    """One connection that reads events.

    Args:
        app: The application.
        query: After the question mark.
        cursor: Sent as ``Last-Event-ID``; None for none.
        headers: More headers.

    Attributes:
        status: Status of the answer.
        received: Bytes of the answer so far.
        cursor: Id of the last message, as a browser keeps it.
        comments: Times at which a comment came, of this loop.
        ended: Whether the answer ended as it should.
        reads: Cleared while the client takes nothing: what the server sends then waits.
        blocked: How many sends had to wait so.
    """

    def __init__(
        self, app: ASGIApp, query: str = "", cursor: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self._app, self._query = app, query
        given = {"host": "testserver", **(headers or {})}
        if cursor is not None:
            given["last-event-id"] = cursor
        self._headers = [(name.encode(), value.encode()) for name, value in given.items()]
        self.cursor = cursor
        self.status = 0
        self.received = b""
        self.comments: list[float] = []
        self.ended = False
        self.reads = asyncio.Event()
        self.reads.set()
        self.blocked = 0
        self._asked = False
        self._gone = asyncio.Event()
        self._started = asyncio.Event()
        self._messages: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": "/episodes/events", "raw_path": b"/episodes/events", "root_path": "",
            "query_string": self._query.encode(), "headers": self._headers, "client": ("testclient", 1),
            "server": ("testserver", 80), "state": {}, "extensions": {},
        }  # fmt: skip
        self._task = asyncio.create_task(self._app(scope, self._receive, self._send))  # type: ignore[arg-type]
        await self._started.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gone.set()
        self.reads.set()
        await self._task

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        self.blocked += not self.reads.is_set()
        await self.reads.wait()
        self.received += message.get("body", b"")
        for text in message.get("body", b"").decode().split("\n\n") if self.status == 200 else ():
            self._take(text)
        self.ended = not message.get("more_body", False)
        if self.ended:
            self._messages.put_nowait(("end", None))
        self._started.set()

    def _take(self, text: str) -> None:
        fields = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith(":"))
        if text.startswith(":"):
            self.comments.append(asyncio.get_running_loop().time())
        self.cursor = fields.get("id", self.cursor)
        if "data" in fields:
            self._messages.put_nowait((fields["event"], json.loads(fields["data"])))

    async def next(self) -> tuple[str, Any]:
        """Return the next message: its event and its data."""
        async with asyncio.timeout(600):
            return await self._messages.get()

    async def episode(self) -> EpisodeEvent:
        """Return the next message, which has to be of an episode."""
        event, data = await self.next()
        assert event == "episode", (event, data)
        return EpisodeEvent.model_validate(data)

    async def told_to_list(self) -> str:
        """Return why the reader has to list, which the next message has to say."""
        event, data = await self.next()
        assert event == "list", (event, data)
        return str(data["reason"])

    def is_silent(self) -> bool:
        """Return whether no message waits to be read."""
        return self._messages.empty()
