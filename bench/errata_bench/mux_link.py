"""What load over multiplexed sockets is made of: envelopes by hand, a session's address, a socket with its sessions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from .websocket import MUX, WebSocket, prepared


class Envelope(Struct, gc=False):
    """What the server says, as far as load looks at it."""

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
    """Return messages in as few frames as ``size`` messages each allow, one after the other."""
    if size == 1:
        return b"".join([prepared(message) for message in messages])
    return b"".join(
        [prepared(b"[" + b",".join(messages[start : start + size]) + b"]") for start in range(0, len(messages), size)]
    )


class Session:
    """One session: its address, the id of its next request, the prepared halves of its envelopes."""

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
        """Return what a resume says of it."""
        return {"sid": self.sid, "key": self.key, "last": self.id - 1}

    def message(self, kind: bytes, data: bytes) -> bytes:
        """Return a request under the next id, which is used up by its reply."""
        return b'%s%d,"type":"%s","data":%s}' % (self.head, self.id, kind, data)


class Link:
    """One socket and its sessions.

    Attributes:
        take: What to do with each envelope, per phase.
        batch: What to do when everything that came at once was taken.
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
        """Send what is ready in full frames, the rest only when no reply is awaited that could fill it up."""
        ready = self.ready
        full = len(ready) - len(ready) % size if self.in_flight else len(ready)
        if full:
            self.in_flight += full
            self.send(framed(ready[:full] if full < len(ready) else ready, size))
            self.ready = ready[full:]

    def cut(self) -> None:
        """Drop the connection without a word, and take no notice of what it may still bring."""
        self.take, self.batch, self.lost = lambda envelope: None, lambda: None, lambda: None
        if self._socket is not None:
            self._socket.cut()

    async def close(self) -> None:
        """Say goodbye."""
        self.lost = lambda: None
        if self._socket is not None:
            await self._socket.close()


class Phase:
    """Waits for so many sessions, or for the first thing that goes wrong."""

    def __init__(self, links: Sequence[Link], sessions: int) -> None:
        self._left = sessions
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._links = links
        if not sessions:
            self._done.set_result(None)

    def one(self) -> None:
        """One more is done."""
        self._left -= 1
        if not self._left and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: Exception) -> None:
        """It has gone wrong."""
        if not self._done.done():
            self._done.set_exception(error)

    def lost(self) -> None:
        """A socket is gone."""
        self.fail(ConnectionResetError(f"the server closed a socket; {self._left} sessions waited for an answer"))

    def guard(self, take: Callable[[Envelope], None]) -> Callable[[Envelope], None]:
        """Return ``take``, whose exceptions end the phase: the socket's callbacks have nobody to raise to."""

        def guarded(envelope: Envelope) -> None:
            try:
                take(envelope)
            except Exception as error:
                self.fail(error)

        return guarded

    async def over(self) -> None:
        """Wait."""
        await self._done
