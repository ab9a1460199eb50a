"""One multiplexed WebSocket on ``/ws``; it is not read while its send buffer is full (PROTOCOL D9)."""

from __future__ import annotations

import asyncio
import logging

from starlette.websockets import WebSocket, WebSocketState

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import ErrataError
from errata_protocol.mux import ServerConnection

from ..asgi_extensions import TOGETHER, Unread
from ..session_socket import GONE, accepted
from .multiplexer import Multiplex

log = logging.getLogger("errata.mux")

IN_A_ROW_BYTES = 64 * 1024
"""Size of the frames of one socket that are taken before others get a turn; each counts for `FRAME_BYTES` at least."""

FRAME_BYTES = 1024

WRITTEN_AT_ONCE = 1 << 20
"""Bytes that are handed to the socket before it is asked whether it keeps up."""

READS_AT_ONCE = 8
"""Reads of one socket that are looked up together: each may be as large as a payload."""

TRY_AGAIN_LATER = 1013


def asks_for_mux(websocket: WebSocket) -> bool:
    """Say whether the client offered the subprotocol."""
    return PROTOCOL_NAME in websocket.scope.get("subprotocols", ())


class MuxSocket:
    """One connection of many sessions.

    Args:
        websocket: Not yet accepted.
        multiplex: The environment's multiplexed sessions.
        principal: Who opened the socket.
    """

    def __init__(self, websocket: WebSocket, multiplex: Multiplex, principal: str | None) -> None:
        self._websocket = websocket
        self._multiplex = multiplex
        self._principal = principal
        self._connection: ServerConnection | None = None
        self._woken = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self.reading = asyncio.Semaphore(READS_AT_ONCE)
        """Reads that are looked up together."""

    async def room(self) -> None:
        """Return when the socket takes more."""
        if self._connection is not None and not self._connection.accepts_input:
            self._drained.clear()
            await self._drained.wait()

    def wake(self) -> None:
        """There is something to send."""
        self._woken.set()

    async def serve(self) -> None:
        """Accept, and take and send frames until the client leaves."""
        together = self._websocket.scope.get("extensions", {}).get(TOGETHER)
        if together is not None:
            together()
        self._multiplex.bound(self._websocket, self._principal)
        if not await accepted(self._websocket, PROTOCOL_NAME):
            return
        try:
            connection = self._connection = self._multiplex.connect(self._principal, self)
        except ErrataError as error:
            await self._websocket.close(TRY_AGAIN_LATER, error.message[:120])
            return
        writing = asyncio.create_task(self._write(connection))
        try:
            await self._read(connection)
        finally:
            self._multiplex.disconnect(connection)
            writing.cancel()
            await asyncio.wait([writing])
            await self._close()

    async def _read(self, connection: ServerConnection) -> None:
        receive, taken = self._websocket.receive, 0
        while (message := await receive())["type"] != "websocket.disconnect":
            frames = message.get("messages")
            if frames is None:
                frames = (next(message[kind] for kind in ("text", "bytes", "unread") if message.get(kind) is not None),)
            for frame in frames:
                if type(frame) is Unread:
                    self._multiplex.unread(connection, frame.error())
                    taken += FRAME_BYTES
                else:
                    self._multiplex.receive(connection, frame)
                    taken += max(len(frame), FRAME_BYTES)
                if taken >= IN_A_ROW_BYTES:
                    taken = 0
                    await asyncio.sleep(0)
                if not connection.accepts_input:
                    await self.room()

    async def _write(self, connection: ServerConnection) -> None:
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                while connection.has_data:
                    for frame in connection.data_to_send(WRITTEN_AT_ONCE):
                        await self._websocket.send_text(frame.decode())
                    if connection.accepts_input:
                        self._drained.set()
                        if connection.holds_back:
                            self._multiplex.drained(connection)
                connection.data_to_send()  # nothing left: the machine says anew when there is
        except GONE as error:
            log.debug("a multiplexed socket is gone: %s", error)
        finally:
            self._connection = None  # nobody empties it any more: who waits for room has to hear that the peer is gone
            self._drained.set()

    async def _close(self) -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            try:
                await self._websocket.close()
            except GONE:
                pass  # the peer closed first


__all__ = ["MuxSocket", "asks_for_mux"]
