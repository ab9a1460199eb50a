"""`SocketDoor`: base class of WebSockets with one session each: queues incoming frames, answers them in order."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from ..concurrency.queues import Inbox
from ..sessions.session import Session
from ..sessions.sessions import Sessions
from .asgi_extensions import Unread, answers_unread

log = logging.getLogger("errata.ws")

MAX_PIPELINED = 64
"""Frames read ahead of the one that runs. Beyond it, or beyond as many bytes as the largest frame may have, the socket
is not read, and TCP slows the sender down."""

GONE = (RuntimeError, OSError, WebSocketDisconnect)
"""Starlette's and uvicorn's words for a peer that is gone."""


async def accepted(websocket: WebSocket, subprotocol: str | None = None) -> bool:
    """Accept a socket; False if the peer left while it shook hands, which is no error of this side."""
    try:
        await websocket.accept(subprotocol=subprotocol)
    except GONE:
        return False
    return True


class SocketDoor(ABC):
    """One connection and the session it speaks for.

    Args:
        websocket: Not yet accepted.
        sessions: The environment's sessions.
        principal: Who opened the socket.
    """

    def __init__(self, websocket: WebSocket, sessions: Sessions, principal: str | None) -> None:
        self._websocket = websocket
        self._sessions = sessions
        self._principal = principal
        self._inbox = Inbox[dict[str, Any]](MAX_PIPELINED, sessions.runtime.settings.max_frame)

    async def serve(self) -> None:
        """Accept, open or attach a session, answer until the client leaves."""
        runtime = self._sessions.runtime
        answers_unread(self._websocket, runtime.settings.max_frame, runtime.quotas.unfinished(self._principal))
        if not await accepted(self._websocket):
            return
        try:
            session = await self._session()
        except Exception as error:
            await self._hang_up(self._refusal(error))
            return
        reader = asyncio.create_task(self._read(session))
        try:
            # One task for all requests, not one each: what runs is not cancelled with this socket's task.
            await asyncio.shield(self._sessions.tasks.start(self._answer_all(session)))
        finally:
            reader.cancel()
            await self._sessions.lifetime.detach(session, self)
            await self._close()

    async def _answer_all(self, session: Session) -> None:
        try:
            while (message := await self._inbox.take()) is not None and session.attached is self:
                reply = await self._answer(session, message)
                if reply is None:
                    break
                await self._send(reply)
        except WebSocketDisconnect:
            pass

    async def _session(self) -> Session:
        """Return the session this socket speaks for, attached to it."""
        session = await self._sessions.open(principal=self._principal)
        self._sessions.lifetime.attach(session, self)
        return session

    @abstractmethod
    async def _answer(self, session: Session, message: dict[str, Any]) -> bytes | None:
        """Return the frame that answers ``message``, None to hang up. In a task that the sessions own."""

    @abstractmethod
    def _refusal(self, error: Exception) -> bytes:
        """Return the frame that says why no session was opened."""

    async def _read(self, session: Session) -> None:
        """Queue what the client sends. Reading on while a step runs shows at once when the client is gone.

        A given-out session is free for its next socket from that moment; the step that runs still commits.
        """
        limit = self._sessions.runtime.settings.max_frame
        try:
            while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
                size = _size(message)
                if size > limit:
                    message, size = {"unread": Unread(size, limit)}, 0
                await self._inbox.put(message, size)
            if session.given_out:
                await self._sessions.lifetime.detach(session, self)
        finally:
            self._inbox.end()

    async def _send(self, frame: bytes) -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            try:
                await self._websocket.send_text(frame.decode())
            except (RuntimeError, OSError) as error:  # starlette's and uvicorn's words for a peer that is gone
                raise WebSocketDisconnect(code=1006, reason=str(error)) from error

    async def _hang_up(self, frame: bytes) -> None:
        try:
            await self._send(frame)
        except WebSocketDisconnect:
            pass  # it left before it could get an answer
        await self._close()

    async def _close(self) -> None:
        try:
            await self._websocket.close()
        except (RuntimeError, WebSocketDisconnect):
            pass  # the peer closed first


def _size(message: dict[str, Any]) -> int:
    """Return how many bytes a frame took on the wire."""
    text = message.get("text")
    if text is None:
        return len(message.get("bytes") or b"")
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
