"""Parts of the load over multiplexed sockets: envelopes written by hand, sessions, and sockets with their sessions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from .websocket import MUX, WebSocket, prepared


class Envelope(Struct, gc=False):
    """The fields of a server's envelope that the load reads."""

    type: str
    sid: str | None = None
    id: int | None = None
    q: int | None = None
    t: int | None = None
    data: msgspec.Raw = msgspec.Raw(b"{}")


_ONE = msgspec.json.Decoder(Envelope)
_MANY = msgspec.json.Decoder(list[Envelope])


def envelopes(text: bytes) -> list[Envelope]:
    """Return the envelopes of a frame."""
    return _MANY.decode(text) if text[:1] == b"[" else [_ONE.decode(text)]


def framed(messages: Sequence[bytes], size: int) -> bytes:
    """Return messages in frames of at most ``size`` messages each, joined into one byte string."""
    if size == 1:
        return b"".join([prepared(message) for message in messages])
    return b"".join(
        [prepared(b"[" + b",".join(messages[start : start + size]) + b"]") for start in range(0, len(messages), size)]
    )


class Session:
    """One session: its id, the id of its next request, and the prepared parts of its envelopes."""

    __slots__ = ("delivered", "head", "id", "key", "left", "link", "sent", "sid")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sid = secrets.token_urlsafe(18)
        self.key = secrets.token_urlsafe(18)
        self.head = b'{"sid":"%s","id":' % self.sid.encode()
        self.id = 1
        self.delivered = 0
        self.sent = 0.0
        self.left = 0

    def opening(self) -> bytes:
        """Return the message that opens it."""
        return b'{"sid":"%s","type":"open","data":{"key":"%s"}}' % (self.sid.encode(), self.key.encode())

    def reading(self) -> bytes:
        """Return the message that reads its state."""
        return b'{"sid":"%s","q":1,"type":"state"}' % self.sid.encode()

    def entry(self) -> dict[str, object]:
        """Return the session's entry in a resume message."""
        return {"sid": self.sid, "key": self.key, "last": self.id - 1}

    def message(self, kind: bytes, data: bytes) -> bytes:
        """Return a request with the next id; the reply to it uses the id up."""
        return b'%s%d,"type":"%s","data":%s}' % (self.head, self.id, kind, data)


class Link:
    """One socket and its sessions.

    Attributes:
        take: Called with each envelope; a phase sets it.
        batch: Called after all envelopes that arrived together.
    """

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.ready: list[bytes] = []
        self.in_flight = 0
        self.frames = 0
        self.take: Callable[[Envelope], None] = lambda envelope: None
        self.batch: Callable[[], None] = lambda: None
        self.lost: Callable[[], None] = lambda: None
        self._socket: WebSocket | None = None

    async def connect(self, port: int) -> None:
        """Open the socket."""
        socket = self._socket = await WebSocket.connect(port, subprotocol=MUX)
        socket.on_message = self._message
        socket.on_batch = lambda: self.batch()
        socket.lost.add_done_callback(lambda _: self.lost())

    def _message(self, text: bytes) -> None:
        self.frames += 1
        take = self.take
        for envelope in envelopes(text):
            take(envelope)

    def send(self, frames: bytes) -> None:
        """Send what `framed` made."""
        assert self._socket is not None
        self._socket.send(frames)

    def flush(self, size: int) -> None:
        """Send the messages that fill frames; send the rest only if no awaited reply could fill the last frame."""
        ready = self.ready
        full = len(ready) - len(ready) % size if self.in_flight else len(ready)
        if full:
            self.in_flight += full
            self.send(framed(ready[:full] if full < len(ready) else ready, size))
            self.ready = ready[full:]

    def cut(self) -> None:
        """Drop the connection without a close handshake, and ignore what still arrives on it."""
        self.take, self.batch, self.lost = lambda envelope: None, lambda: None, lambda: None
        if self._socket is not None:
            self._socket.cut()

    async def close(self) -> None:
        """Close the socket with a handshake."""
        self.lost = lambda: None
        if self._socket is not None:
            await self._socket.close()


class Phase:
    """Waits until a number of sessions is done, or for the first error."""

    def __init__(self, links: Sequence[Link], sessions: int) -> None:
        self._left = sessions
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._links = links
        if not sessions:
            self._done.set_result(None)

    def one(self) -> None:
        """Count one session as done."""
        self._left -= 1
        if not self._left and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the phase with an error."""
        if not self._done.done():
            self._done.set_exception(error)

    def lost(self) -> None:
        """End the phase because a socket was closed."""
        self.fail(ConnectionResetError(f"the server closed a socket; {self._left} sessions waited for an answer"))

    def guard(self, take: Callable[[Envelope], None]) -> Callable[[Envelope], None]:
        """Return ``take`` such that an exception ends the phase: nothing catches one in a socket's callback."""

        def guarded(envelope: Envelope) -> None:
            try:
                take(envelope)
            except Exception as error:
                self.fail(error)

        return guarded

    async def over(self) -> None:
        """Wait for the end of the phase."""
        await self._done
