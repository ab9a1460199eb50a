"""`RequestBodies`: ASGI middleware that refuses ambiguous message framing and cuts off bodies that nobody reads.

If a proxy and a server disagree on where a body ends, a client can smuggle a second request past the proxy (RFC 9112
section 6.3). And a server that answers before the end of a body would read and discard the rest for as long as its
client sends.
"""

from __future__ import annotations

import asyncio
import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errata_protocol.errors import InvalidRequest

REST_BYTES = 1024**2
"""How much of a body is read and discarded once its answer is known. A connection that is closed while data arrives is
reset, and the client may lose the answer."""

REST_S = 2.0
"""How long the rest of a body is read once its answer is known, seconds."""

_PASSED = "errata.request_bodies"


class RequestBodies:
    """Answers a request of ambiguous length with 400; closes connections whose body did not end soon after the answer.

    Args:
        app: The application to protect.
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
        receive: The ``receive`` of the ASGI call.
        send: The ``send`` of the ASGI call.
        awaited: The client waits for ``100 Continue``, which the first `receive` sends, before it sends the body.
    """

    def __init__(self, receive: Receive, send: Send, *, awaited: bool) -> None:
        self._receive = receive
        self._send = send
        self._awaited = awaited
        self._ended = False
        self._reading = 0
        self._start: Message | None = None  # the start of the answer, held until its first body message

    async def receive(self) -> Message:
        """Return the next message of the request; called by the application."""
        self._awaited = False
        self._reading += 1
        try:
            message = await self._receive()
        finally:
            self._reading -= 1
        self._ended = self._ended or not message.get("more_body", False)  # a disconnect is an end too
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the response; called by the application.

        While the request's body has not ended, the start of the response is held until its first body message. The rest
        of the request's body is then read, up to `REST_BYTES` and for `REST_S`. If it has not ended by then, the
        response gets ``Connection: close``. Nothing is read, and the response gets that header, if it is a stream, if
        the application is reading, or if the client waits for ``100 Continue``.
        """
        if message["type"] == "http.response.start" and not self._ended:
            self._start = message
            return
        start, self._start = self._start, None
        if start is not None:
            streams = message.get("more_body", False)  # the application may still read the body
            if not self._ended and (streams or not await self._ends_soon()):
                headers = [header for header in start.get("headers", ()) if header[0].lower() != b"connection"]
                start["headers"] = [*headers, (b"connection", b"close")]
            await self._send(start)
        await self._send(message)

    async def _ends_soon(self) -> bool:
        if self._awaited or self._reading:  # reading would ask the client for the body, or race the application
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
