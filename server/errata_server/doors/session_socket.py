"""`SocketDoor`: base class of WebSockets with one session each; queues incoming frames and answers them in order."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from errata_protocol.json_text import MAX_VALUES

from ..concurrency.queues import Inbox
from ..sessions.session import Session
from ..sessions.sessions import Sessions
from .asgi_extensions import Unread, set_message_bounds
from .json_values import excess
from .labels import LabelHeaders, read_labels
from .long_messages import LONG, pay

log = logging.getLogger("errata.ws")

MAX_PIPELINED = 64
"""Frames that may wait while one runs. With more, or with more bytes than ``max_frame``, the socket is not read, so
that TCP slows the sender down."""

GONE = (RuntimeError, OSError, WebSocketDisconnect)
"""What starlette and uvicorn raise when the peer has disconnected."""


async def accepted(websocket: WebSocket, subprotocol: str | None = None) -> bool:
    """Accept a socket; return False where the peer disconnected during the handshake."""
    try:
        await websocket.accept(subprotocol=subprotocol)
    except GONE:
        return False
    return True


class SocketDoor(ABC):
    """A connection and its session.

    Args:
        websocket: Not yet accepted.
        sessions: The environment's sessions.
        principal: Who opened the socket.
        labels: Headers of its handshake with labels, for the session that it makes.
    """

    def __init__(
        self, websocket: WebSocket, sessions: Sessions, principal: str | None, labels: LabelHeaders = ()
    ) -> None:
        self._websocket = websocket
        self._sessions = sessions
        self._principal = principal
        self._labels = labels
        self._inbox = Inbox[Message](MAX_PIPELINED, sessions.runtime.settings.max_frame)

    async def serve(self) -> None:
        """Accept the socket, open or attach its session, and answer frames until the client disconnects.

        A session that cannot be opened is answered with `_refusal`, and the socket closed.
        """
        runtime = self._sessions.runtime
        set_message_bounds(self._websocket, runtime.settings.max_frame, runtime.quotas.unfinished(self._principal))
        if not await accepted(self._websocket):
            return
        try:
            session = await self._session()
        except Exception as error:
            await self._send_and_close(self._refusal(error))
            return
        reader = asyncio.create_task(self._read(session))
        try:
            # A task of the sessions, for all requests: cancelling this socket's task cancels no request that runs.
            await asyncio.shield(self._sessions.tasks.start(self._answer_all(session)))
        finally:
            reader.cancel()
            await self._sessions.lifetime.detach(session, self)
            await self._close()

    async def _answer_all(self, session: Session) -> None:
        try:
            while (message := await self._inbox.take()) is not None and session.attached is self:
                reply = await self._answer(session, await _bounded(message))
                if reply is None:
                    break
                await self._send(reply)
                if (size := len(_text(message))) > LONG:
                    await pay(size)
        except WebSocketDisconnect:
            pass

    async def _session(self) -> Session:
        """Open a session and attach this socket to it."""
        session = await self._sessions.open(principal=self._principal, labels=read_labels(self._labels))
        self._sessions.lifetime.attach(session, self)
        return session

    @abstractmethod
    async def _answer(self, session: Session, message: Message) -> bytes | None:
        """Return the frame that answers ``message``; None to close the socket."""

    @abstractmethod
    def _refusal(self, error: Exception) -> bytes:
        """Return the error frame for a session that could not be opened or attached."""

    async def _read(self, session: Session) -> None:
        """Queue incoming frames until the client disconnects.

        This goes on while a request runs, to notice a disconnect at once: a session whose id was given out is then
        free for another socket. The request that runs is still committed.
        """
        limit = self._sessions.runtime.settings.max_frame
        try:
            while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
                size = _size(message)
                if size > limit:
                    message, size = {"unread": Unread(size, limit)}, 0
                await self._inbox.put(message, size)
            if session.resumable:
                await self._sessions.lifetime.detach(session, self)
        finally:
            self._inbox.end()

    async def _send(self, frame: bytes) -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            try:
                await self._websocket.send_text(frame.decode())
            except (RuntimeError, OSError) as error:  # raised when the peer has disconnected
                raise WebSocketDisconnect(code=1006, reason=str(error)) from error

    async def _send_and_close(self, frame: bytes) -> None:
        try:
            await self._send(frame)
        except WebSocketDisconnect:
            pass  # the peer disconnected first
        await self._close()

    async def _close(self) -> None:
        try:
            await self._websocket.close()
        except (RuntimeError, WebSocketDisconnect):
            pass  # the peer closed first


async def _bounded(message: Message) -> Message:
    """Return a message, or the error to answer if it has too many values."""
    error = await excess(_text(message)) if len(_text(message)) > MAX_VALUES else None
    return message if error is None else {"refused": error}


def _text(message: Message) -> str | bytes:
    """Return the payload of a message; nothing where it was discarded."""
    return message.get("text") or message.get("bytes") or b""


def _size(message: Message) -> int:
    """Return the size of a frame's payload on the wire, bytes."""
    text = message.get("text")
    if text is None:
        return len(message.get("bytes") or b"")
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
