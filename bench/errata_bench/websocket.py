"""A WebSocket client written by hand, as cheap as Python allows: client and server share the measured machine.

Frames are prepared once and sent often, without a library. Their mask is zero, which changes no byte.
"""

from __future__ import annotations

import asyncio
import base64
import os
import zlib
from collections.abc import Callable
from typing import cast

MUX = "openenv.mux.v1"
DEFLATE = "permessage-deflate; client_max_window_bits"
"""The compression that the ``websockets`` client, and so OpenEnv's, offers by default."""


def prepared(text: bytes, *, deflate: bool = False) -> bytes:
    """Return a message as a masked text frame.

    Args:
        text: UTF-8 JSON.
        deflate: Compress it, without reference to earlier messages, so that the frame can be sent again.
    """
    first = 0x81
    if deflate:
        packer = zlib.compressobj(wbits=-12, memLevel=5)
        text = (packer.compress(text) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4]
        first |= 0x40
    length = len(text)
    if length < 126:
        head = bytes((first, 0x80 | length))
    elif length < 65536:
        head = bytes((first, 0xFE)) + length.to_bytes(2)
    else:
        head = bytes((first, 0xFF)) + length.to_bytes(8)
    return head + bytes(4) + text


_PING = b"\x89\x80" + bytes(4)
_CLOSE = b"\x88\x82" + bytes(4) + b"\x03\xe8"


class WebSocket(asyncio.Protocol):
    """One socket on ``/ws``.

    Attributes:
        on_message: Called with the text of each message.
        on_batch: Called after ``on_message`` was called with all messages that arrived together.
        lost: Done when either side has closed the socket.
        deflated: The server accepted the offer to compress.
        pongs_missing: Pings without an answer yet.
    """

    def __init__(self, *, subprotocol: str | None = None, deflate: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.on_message: Callable[[bytes], None] = lambda text: None
        self.on_batch: Callable[[], None] = lambda: None
        self.lost: asyncio.Future[None] = loop.create_future()
        self.deflated = False
        self.pongs_missing = 0
        self._subprotocol = subprotocol
        self._offer_deflate = deflate
        self._upgraded: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._inflate: zlib._Decompress | None = None

    @classmethod
    async def connect(cls, port: int, *, subprotocol: str | None = None, deflate: bool = False) -> WebSocket:
        """Return an open socket.

        Raises:
            OSError: The port does not listen, or the connection was lost in the handshake.
            ConnectionError: The server refused the upgrade or the subprotocol.
        """
        loop = asyncio.get_running_loop()
        transport, socket = await loop.create_connection(
            lambda: cls(subprotocol=subprotocol, deflate=deflate), "127.0.0.1", port
        )
        try:
            await socket._upgraded
        except BaseException:
            transport.abort()
            raise
        return socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's
        lines = [
            "GET /ws HTTP/1.1",
            "Host: 127.0.0.1",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
            "Sec-WebSocket-Version: 13",
        ]
        if self._subprotocol:
            lines.append(f"Sec-WebSocket-Protocol: {self._subprotocol}")
        if self._offer_deflate:
            lines.append(f"Sec-WebSocket-Extensions: {DEFLATE}")
        self._transport.write("\r\n".join([*lines, "", ""]).encode())

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        if not self._upgraded.done():
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                self._rest = head
                return
            self._upgrade(head.decode("latin-1"))
        at, end_at = 0, len(data)
        while end_at - at >= 2:
            first, length, start = data[at], data[at + 1], at + 2
            if length >= 126:
                start += 2 if length == 126 else 8
                length = int.from_bytes(data[at + 2 : start])  # short reads are caught below
            stop = start + length
            if stop > end_at or start > end_at:
                break
            self._frame(first, data[start:stop])
            at = stop
        self._rest = data[at:]
        self.on_batch()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._upgraded.done():
            self._upgraded.set_exception(exc or ConnectionResetError("closed in the handshake"))
            self._upgraded.exception()  # its waiter may have been cancelled
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, frames: bytes) -> None:
        """Send frames made by `prepared`, one or several joined."""
        assert self._transport is not None
        self._transport.write(frames)

    def ping(self) -> None:
        """Send a ping."""
        self.pongs_missing += 1
        self.send(_PING)

    def cut(self) -> None:
        """Drop the connection without a close handshake."""
        assert self._transport is not None
        self._transport.abort()

    async def close(self) -> None:
        """Send a close frame, and wait until the server has closed the connection."""
        if not self.lost.done():
            self.send(_CLOSE)
        await self.lost

    async def ask(self, frame: bytes) -> bytes:
        """Send one frame and return the next message.

        Raises:
            ConnectionError: The socket was closed instead.
        """
        replied: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.on_message = lambda text: None if replied.done() else replied.set_result(text)
        self.send(frame)
        await asyncio.wait((replied, self.lost), return_when=asyncio.FIRST_COMPLETED)
        if not replied.done():
            raise ConnectionResetError("the server closed the socket instead of answering")
        return replied.result()

    def _upgrade(self, head: str) -> None:
        status, *lines = head.split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if " 101 " not in status + " ":
            self._upgraded.set_exception(ConnectionError(f"the server refused the socket: {status}"))
        elif self._subprotocol and fields.get("sec-websocket-protocol") != self._subprotocol:
            self._upgraded.set_exception(ConnectionError(f"the server does not speak {self._subprotocol}"))
        else:
            extension = fields.get("sec-websocket-extensions", "")
            if "permessage-deflate" in extension:
                self.deflated = True
                self._inflate = zlib.decompressobj(wbits=-12 if "server_max_window_bits=12" in extension else -15)
            self._upgraded.set_result(None)

    def _frame(self, first: int, payload: bytes) -> None:
        match first & 15:
            case 1:
                if not first & 0x80:
                    raise NotImplementedError("the server sent a message in fragments")
                if first & 0x40:
                    assert self._inflate is not None, "compressed without having agreed to it"
                    payload = self._inflate.decompress(payload + b"\0\0\xff\xff")
                self.on_message(payload)
            case 8:
                assert self._transport is not None
                self._transport.close()
            case 9:
                self.send(bytes((0x8A, 0x80 | len(payload))) + bytes(4) + payload)
            case 10:
                self.pongs_missing -= 1
