"""One multiplexed WebSocket on ``/ws``; it is not read while its send buffer is full (PROTOCOL D9)."""

from __future__ import annotations

import asyncio
import logging

from starlette.websockets import WebSocket, WebSocketState

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import ErrataError
from errata_protocol.json_text import ValueCounter
from errata_protocol.mux import ServerConnection
from errata_protocol.mux.envelope import MAX_DEPTH

from ...runtime.fleet import SocketRelay
from ..asgi_extensions import BATCHED_RECEIVE, Unread
from ..json_values import exceeds, too_many
from ..long_messages import LONG, pay
from ..readers import Reader
from ..session_socket import GONE, accepted
from .multiplexer import Multiplexer

log = logging.getLogger("errata.mux")

BURST_BYTES = 64 * 1024
"""Bytes of frames of one socket that are read before others get a turn; a frame counts at least `FRAME_BYTES`."""

FRAME_BYTES = 1024
"""Least size that a frame counts for `BURST_BYTES`: handling a small frame costs as much as handling this one."""

COMMA_BYTES = 256
"""Least size that each comma of a frame counts: a short frame may have hundreds of elements."""

LARGE_FRAME = 512 * 1024
"""Characters of a frame above which its values are counted before it is decoded. Clients send more in parts. In parts,
and in shorter frames, each request is counted by itself, and its error names it."""

WRITTEN_AT_ONCE = 1 << 20
"""Bytes that are written to the socket before the task checks again whether input is accepted."""

READS_AT_ONCE = 8
"""Reads of one socket that run at the same time: each may hold a payload in memory."""

TRY_AGAIN_LATER = 1013
"""WebSocket close code of a socket that was refused."""


def asks_for_mux(websocket: WebSocket) -> bool:
    """Return whether the client offered the subprotocol of multiplexed sockets."""
    return PROTOCOL_NAME in websocket.scope.get("subprotocols", ())


class MuxSocket:
    """One connection of many sessions.

    Args:
        websocket: Not yet accepted.
        multiplexer: The environment's multiplexed sessions.
        reader: Who opened the socket.
        relay: Passes frames of other workers' sessions on; None in a server of one process.
    """

    def __init__(
        self, websocket: WebSocket, multiplexer: Multiplexer, reader: Reader, relay: SocketRelay | None = None
    ) -> None:
        self._websocket = websocket
        self._multiplexer = multiplexer
        self.reader = reader
        self._principal = reader.principal
        self._relay = relay
        self._connection: ServerConnection | None = None
        self._woken = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self.reads = asyncio.Semaphore(READS_AT_ONCE)
        """Bounds the reads of this socket that run at the same time."""

    async def writable(self) -> None:
        """Wait until the client has read enough of what was sent to accept more, or the socket is closed."""
        if self._connection is not None and not self._connection.accepts_input:
            self._drained.clear()
            await self._drained.wait()

    def wake(self) -> None:
        """Called when the connection has data to send."""
        self._woken.set()

    async def serve(self) -> None:
        """Accept the socket, then read and write frames until the client leaves."""
        receive_batched = self._websocket.scope.get("extensions", {}).get(BATCHED_RECEIVE)
        if receive_batched is not None:
            receive_batched()
        self._multiplexer.set_bounds(self._websocket, self._principal)
        if not await accepted(self._websocket, PROTOCOL_NAME):
            return
        self.reader.identify()
        try:
            connection = self._connection = self._multiplexer.connect(self._principal, self)
        except ErrataError as error:
            await self._close(TRY_AGAIN_LATER, error.message)
            return
        writing = asyncio.create_task(self._write(connection))
        try:
            await self._read(connection)
        finally:
            self._multiplexer.disconnect(connection)
            if self._relay is not None:
                await self._relay.close()
            writing.cancel()
            await asyncio.wait([writing])
            await self._close()

    async def _read(self, connection: ServerConnection) -> None:
        driver, receive, taken, relay = self._multiplexer.driver, self._websocket.receive, 0, self._relay
        while (message := await receive())["type"] != "websocket.disconnect":
            frames = message.get("messages")
            if frames is None:
                frames = (next(message[kind] for kind in ("text", "bytes", "unread") if message.get(kind) is not None),)
            for frame in frames:
                refusal, shallow = None, False
                known, held = connection.envelopes, connection.assembly.held
                if type(frame) is Unread:
                    refusal = frame.error()
                elif len(frame) > LARGE_FRAME:
                    values = ValueCounter(levels=MAX_DEPTH)
                    refusal = too_many() if await exceeds(values, frame) else None
                    shallow = not values.nests_too_deep
                if refusal is not None:
                    driver.frame_discarded(connection, refusal)
                    taken += FRAME_BYTES
                else:
                    commas = frame.count("," if isinstance(frame, str) else b",")
                    taken += max(len(frame), FRAME_BYTES, COMMA_BYTES * commas)
                    own = frame
                    if relay is not None:
                        try:
                            own = await relay.take(frame)
                        except ErrataError as error:
                            await self._close(TRY_AGAIN_LATER, error.message)
                            return
                    if own is not None:
                        driver.receive(connection, own, shallow=shallow and own is frame)
                if type(frame) is not Unread and len(frame) + held > LONG:
                    await pay(len(frame) - FRAME_BYTES * (connection.envelopes - known))
                if taken >= BURST_BYTES:
                    taken = 0
                    await asyncio.sleep(0)
                if not connection.accepts_input:
                    await self.writable()

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
                        if connection.has_waiting_replies:
                            self._multiplexer.driver.drained(connection)
                connection.data_to_send()  # returns nothing; after it the machine asks for a `wake` for the next data
        except GONE as error:
            log.debug("a multiplexed socket is gone: %s", error)
        finally:
            self._connection = None  # nothing sends its data any more, so `writable` must not wait for that
            self._drained.set()

    async def _close(self, code: int = 1000, reason: str = "") -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            try:
                await self._websocket.close(code, reason.encode()[:120].decode(errors="ignore"))  # of at most 123 bytes
            except GONE:
                pass  # the peer closed first


__all__ = ["MuxSocket", "asks_for_mux"]
