"""`RequestBodies`: ASGI middleware that refuses ambiguous message framing and cuts off bodies that nobody reads.

A body whose length two parsers may take for another hides a request in front of a proxy (RFC 9112 section 6.3). And a
server that has answered before a body's end would read and discard the rest for as long as its client sends.
"""

from __future__ import annotations

import asyncio
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errata_protocol.errors import InvalidRequest

REST_BYTES = 1024**2
"""How much of a body is read after its answer is known, so that its client is there to read it: a connection that is
closed while data arrives is reset, and the answer may be lost with it."""

REST_S = 2.0
"""Likewise how long."""

_PASSED = "errata.request_bodies"


class RequestBodies:
    """Closes the connection of a request whose body has no one length, or did not end soon after its answer.

    Args:
        app: What it guards.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _PASSED in scope:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        coded, length = b"transfer-encoding" in headers, headers.get(b"content-length", b"0")
        if coded and (b"content-length" in headers or scope["http_version"] == "1.0"):
            await _refuse(send)
        elif not coded and not length.strip(b"0"):
            await self._app(scope, receive, send)  # without a body
        else:
            body = _Body(receive, send, awaited=headers.get(b"expect", b"").lower() == b"100-continue")
            await self._app({**scope, _PASSED: True}, body.receive, body.send)


class _Body:
    """The body of one request.

    Args:
        receive: As ASGI has it.
        send: Likewise.
        awaited: The client sends it only when it is asked for: by the first `receive`.
    """

    def __init__(self, receive: Receive, send: Send, *, awaited: bool) -> None:
        self._receive = receive
        self._send = send
        self._awaited = awaited
        self._ended = False
        self._reading = 0
        self._start: Message | None = None  # of an answer, until its first byte

    async def receive(self) -> Message:
        """Return the next part, as the application asks for it."""
        self._awaited = False
        self._reading += 1
        try:
            message = await self._receive()
        finally:
            self._reading -= 1
        self._ended = self._ended or not message.get("more_body", False)  # also where the client is gone
        return message

    async def send(self, message: Message) -> None:
        """Send an answer; where it is whole and the body is not, look first whether that ends soon."""
        if message["type"] == "http.response.start" and not self._ended:
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            streams = message.get("more_body", False)  # its application may read on
            if not self._ended and (streams or not await self._ends_soon()):
                headers = [header for header in start.get("headers", ()) if header[0].lower() != b"connection"]
                start["headers"] = [*headers, (b"connection", b"close")]
            await self._send(start)
        await self._send(message)

    async def _ends_soon(self) -> bool:
        if self._awaited or self._reading:  # else it would be asked for, or somebody is reading it
            return False
        left = REST_BYTES
        try:
            async with asyncio.timeout(REST_S):
                while not self._ended and left > 0:
                    left -= len((await self.receive()).get("body", b""))
        except TimeoutError:
            pass
        return self._ended


async def _refuse(send: Send) -> None:
    error = InvalidRequest(
        "the request has Transfer-Encoding and Content-Length, or Transfer-Encoding in HTTP/1.0: send one length"
    )
    body = json.dumps(error.to_wire()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
