"""Connections that keep the exact text of every message."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from ..exact import elements, encode, members
from ..results import Blocked, Broken, NoPlace
from .witness import FORM, Witness

MAX_HELD = 256 * 1024**2
"""Most characters of all messages that a connection keeps; it reads no more of a server that sends without end."""

_OVER = 2**53
"""Steps of an episode that is over, which no episode has."""


class Message:
    """One message from the server.

    Args:
        text: The message's exact text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.twice: str | None = None
        """A key that stands twice in one of its objects."""
        self.value: Any = json.loads(text, object_pairs_hook=self._pairs)
        self.at = time.monotonic()
        self.parts = 1

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            self.twice = next(name for name in names if names.count(name) > 1)
        return found

    def get(self, name: str) -> Any:
        """Return a field, or None."""
        return self.value.get(name) if isinstance(self.value, dict) else None

    @property
    def type(self) -> Any:
        """Its type."""
        return self.get("type")

    @property
    def data(self) -> Any:
        """The value of `data`."""
        return self.get("data")

    @property
    def payload(self) -> str:
        """The exact text of `data`."""
        return members(self.text).get("data", "")

    @property
    def code(self) -> str | None:
        """The code of an error, else None."""
        return str(self.data.get("code")) if self.type == "error" and isinstance(self.data, dict) else None

    def __repr__(self) -> str:
        return self.text if len(self.text) <= 300 else f"{self.text[:290]}… ({len(self.text)} characters)"


class Wire:
    """A WebSocket to the server.

    Args:
        socket: The connected socket.
        reply_s: Time limit for a reply, in seconds.
        quiet_s: Time without a message after which a check concludes that none will come, in seconds.
        mux: Whether it is a multiplexed socket.
        witness: Holds each message against what came before.
        wrongs: List to which the statements are added that the socket's messages break.
    """

    def __init__(
        self,
        socket: ClientConnection,
        reply_s: float,
        quiet_s: float,
        mux: bool,
        witness: Witness,
        wrongs: list[Blocked],
    ) -> None:
        self.socket, self.reply_s, self.quiet_s, self.mux = socket, reply_s, quiet_s, mux
        self.witness, self.wrongs = witness, wrongs
        self.messages: list[Message] = []
        self.closed: ConnectionClosed | None = None
        self.reset: dict[str, Any] = {}
        """Arguments that the environment needs in each reset."""
        self.bears: int | None = None
        """How many steps an episode of the environment has; None if more than a check makes."""
        self.overplayed = False
        """Whether the environment refused a step after the end of an episode."""
        self.refused_reset = False
        """Whether the environment refused a reset."""
        self.full = False
        """Whether the server had no place for another session."""
        self._asked: dict[tuple[Any, Any], str] = {}
        self._sent = self._answered = 0
        self._steps: dict[Any, int] = {}
        """Steps of the running episode, by session; `_OVER` after its end."""
        self.unreadable: str | None = None
        self._parts: dict[tuple[Any, ...], list[str]] = {}
        self._news = asyncio.Condition()
        self._held = 0
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for frame in self.socket:
                self._held += len(frame)
                if self._held > MAX_HELD:
                    raise ValueError(f"the server sends more than {MAX_HELD:,} characters")
                text = frame if isinstance(frame, str) else frame.decode()
                for one in elements(text) if self.mux else [text]:
                    self._arrived(Message(one))
                async with self._news:
                    self._news.notify_all()
        except ConnectionClosed:
            pass
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            self.unreadable = f"{type(error).__name__}: {error}"
            self.socket.transport.abort()
        finally:
            try:
                await self.socket.wait_closed()
            finally:
                self.closed = self.socket.protocol.close_exc if self.socket.protocol.state.name == "CLOSED" else None
                async with self._news:
                    self._news.notify_all()

    def _arrived(self, message: Message) -> None:
        if not self.mux or message.type != "part":
            self._heed(message)
            self._held_against(message)
            self.messages.append(message)
            return
        address = tuple(message.get(name) for name in ("sid", "id", "q", "seq"))
        n, of, text = (message.data.get(name) for name in ("n", "of", "text"))
        held = self._parts.setdefault(address, [])
        if message.twice is not None or set(message.value) - {"sid", "id", "q", "seq", "type", "data"}:
            self.wrongs.append(Blocked("R-016-33", f"a part of another form: {message}"))
        if n != len(held) + 1 or not isinstance(of, int) or n > of:
            self.wrongs.append(Blocked("R-016-33", f"part {n} of {of} after {len(held)} parts of {address}"))
        held.append(text)
        if len(held) == of:
            whole = Message("".join(self._parts.pop(address)))
            whole.parts = of
            if tuple(whole.get(name) for name in ("sid", "id", "q", "seq")) != address:
                self.wrongs.append(Blocked("R-016-33", f"parts of {address} are the envelope {whole}"))
            self._heed(whole)
            self._held_against(whole)
            self.messages.append(whole)

    def _held_against(self, message: Message) -> None:
        try:
            self.witness.came(message)
        except Blocked as wrong:
            self.wrongs.append(wrong)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            self.wrongs.append(Blocked(FORM, f"a message of another form: {type(error).__name__}: {error}: {message}"))

    def _note(self, message: Any) -> None:
        """Remember what a message asks for: on a plain socket by its place in the order, else by sid and id."""
        for one in message if isinstance(message, list) else [message]:
            kind = one.get("type") if isinstance(one, dict) else None
            key = (one.get("sid"), one.get("id")) if self.mux and isinstance(one, dict) else (None, self._sent)
            self._sent += not self.mux
            if kind in ("reset", "step"):
                self._asked[key] = kind

    def _heed(self, message: Message) -> None:
        """Follow the episodes of the socket's sessions."""
        self.full = self.full or message.code == "CAPACITY_REACHED"
        sid, id = message.get("sid"), message.get("id")
        if isinstance(sid, list | dict) or isinstance(id, list | dict):
            return  # a wrong server's; the checks say so
        kind = self._asked.get((sid, id) if self.mux else (None, self._answered))
        self._answered += not self.mux
        steps = self._steps.get(sid, 0)
        if message.type == "observation":
            over = isinstance(message.data, dict) and message.data.get("done") is True
            self._steps[sid] = _OVER if over else steps + 1 if kind == "step" else 0
        elif message.code not in ("EXECUTION_ERROR", "VALIDATION_ERROR"):
            return
        elif kind == "reset":
            self.refused_reset = True
        elif kind == "step":
            bound = _OVER if self.bears is None else self.bears
            self.overplayed = self.overplayed or steps >= bound

    async def send(self, *messages: Any) -> None:
        """Send each message as a frame; a string is sent as it is."""
        for message in messages:
            self._note(message)
            frame = message if isinstance(message, str | bytes) else encode(message)
            self.witness.sent(frame if isinstance(frame, str) else frame.decode(errors="replace"))
            try:
                await self.socket.send(frame)
            except ConnectionClosed as error:
                raise Broken(f"the server closed the connection: {error}") from None

    async def take(self, match: Callable[[Message], bool], what: str, within: float | None = None) -> Message:
        """Wait for a message that matches, remove it from those received, and return it.

        Raises:
            Broken: None came in time.
        """
        deadline = time.monotonic() + (self.reply_s if within is None else within)
        async with self._news:
            while True:
                for i, message in enumerate(self.messages):
                    if match(message):
                        return self.messages.pop(i)
                left = deadline - time.monotonic()
                if left <= 0 or self.closed is not None:
                    came = f", but these: {self.messages[-3:]}" if self.messages else ""
                    ended = f"; the connection was closed: {self.closed}" if self.closed is not None else ""
                    if self.unreadable is not None:
                        ended = f"; a frame that cannot be read came before: {self.unreadable}"
                    raise Broken(f"{what} did not come{came}{ended}")
                try:
                    await asyncio.wait_for(self._news.wait(), left)
                except TimeoutError:
                    continue

    async def next(self, what: str = "a reply", within: float | None = None) -> Message:
        """Remove and return the next message, of any kind."""
        return await self.take(lambda _: True, what, within)

    async def quiet(self, for_s: float | None = None) -> list[Message]:
        """Wait for some time; remove and return the messages that came."""
        await asyncio.sleep(self.quiet_s if for_s is None else for_s)
        came, self.messages[:] = list(self.messages), []
        return came

    async def ended(self, within: float | None = None) -> int | None:
        """Wait until the connection is closed, for ``within`` seconds at most (by default ``reply_s``).

        Returns:
            The close code of the server; 1006 if the connection ended without a close frame; None if it is still open.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self._reader), self.reply_s if within is None else within)
        except TimeoutError:
            return None
        return self.socket.protocol.close_code

    async def lose(self) -> None:
        """End the connection without a close, as a network does, and give the server time to notice."""
        self.socket.transport.abort()
        await asyncio.wait([self._reader], timeout=5)
        await asyncio.sleep(self.quiet_s / 2)

    async def close(self) -> None:
        """Close the connection."""
        try:
            await asyncio.wait_for(self.socket.close(), 5)
        except TimeoutError:
            self.socket.transport.abort()
        self._reader.cancel()

    # A plain socket: one request, one reply.

    async def ask(self, kind: str, data: Any = None, **more: Any) -> Message:
        """Send a message of the plain socket and return the next message that arrives.

        Args:
            kind: The message's ``type``.
            data: The message's ``data``; left out if None.
            **more: Further top-level fields.

        Raises:
            NoPlace: The server replied CAPACITY_REACHED.
            Broken: The connection is closed, or no reply came in time.
        """
        if kind == "reset":
            data = {**self.reset, **(data or {})}
        message = {"type": kind, **({} if data is None else {"data": data}), **more}
        await self.send(message)
        reply = await self.next(f"the reply to {encode(message)[:120]}")
        if reply.code == "CAPACITY_REACHED":
            raise NoPlace(f"the server has no place for another session: {reply}")
        return reply

    async def ask_text(self, frame: str | bytes) -> Message:
        """Send a frame unchanged and return the next message that arrives, whatever its code.

        Raises:
            Broken: The connection is closed, or no reply came in time.
        """
        await self.send(frame)
        return await self.next(f"the reply to {frame!r}")

    async def works(self, kind: str, data: Any = None) -> Message:
        """Send a plain message that has to work as in any OpenEnv server.

        Raises:
            Blocked: It does not.
        """
        try:
            reply = await self.ask(kind, data)
        except Broken as error:
            raise Blocked("base.exchange", str(error)) from None
        wanted = {"reset": "observation", "step": "observation"}.get(kind, kind)
        if reply.type != wanted:
            raise Blocked("base.exchange", f"{kind} {encode(data)[:120]} was answered with {reply}")
        return reply


def name() -> str:
    """Return a new sid, key or group: 144 random bits."""
    return secrets.token_urlsafe(18)


class Session:
    """One session of a multiplexed socket.

    Args:
        wire: The socket that speaks for it.
        sid: Its id, or None for a new one.
        key: Its key, or None for a new one.
    """

    def __init__(self, wire: Wire, sid: str | None = None, key: str | None = None) -> None:
        self.wire, self.sid, self.key = wire, sid or name(), key or name()
        self.id = 0
        self.q = 0

    def envelope(self, kind: str, data: Any = None, **more: Any) -> dict[str, Any]:
        """Return an envelope of this session."""
        if kind == "reset" and self.wire.reset:
            data = {**self.wire.reset, **(data or {})}
        return {"sid": self.sid, **more, "type": kind, **({} if data is None else {"data": data})}

    def numbered(self, kind: str, data: Any = None, **more: Any) -> dict[str, Any]:
        """Return an envelope with the next id."""
        self.id += 1
        return self.envelope(kind, data, id=self.id, **more)

    def mine(self, match: Callable[[Message], bool] = lambda _: True) -> Callable[[Message], bool]:
        """Return a condition: a message of this session that matches."""
        return lambda message: message.get("sid") == self.sid and match(message)

    async def reply(self, id: int | None = None, within: float | None = None) -> Message:
        """Wait for the reply to a numbered request, the last one by default."""
        wanted = self.id if id is None else id
        return await self.wire.take(
            self.mine(lambda m: m.get("id") == wanted), f"the reply to id {wanted} of the session", within
        )

    async def opened(self, **data: Any) -> Message:
        """Open the session and return the answer, whatever it is."""
        await self.wire.send(self.envelope("open", {"key": self.key, **data}))
        answer = await self.wire.take(
            self.mine(lambda m: m.type in ("opened", "error") and m.get("id") is None), "the answer to open"
        )
        if answer.code == "CAPACITY_REACHED":
            raise NoPlace(f"the server has no place for another session: {answer}")
        return answer

    async def open(self, **data: Any) -> Message:
        """Open the session.

        Raises:
            Blocked: It does not open.
        """
        try:
            answer = await self.opened(**data)
        except Broken as error:
            raise Blocked("R-016-7", str(error)) from None
        if answer.type != "opened":
            raise Blocked("R-016-7", f"open was answered with {answer}")
        return answer

    async def resumed(self, **entry: Any) -> Message:
        """Resume the session on its wire and return the first answer, whatever it is."""
        await self.wire.send({"type": "resume", "data": [{"sid": self.sid, "key": self.key, **entry}]})
        return await self.wire.take(
            self.mine(lambda m: m.type in ("resumed", "error") and m.get("id") is None), "the answer to resume"
        )

    async def request(self, kind: str, data: Any = None, **more: Any) -> Message:
        """Send a numbered request and return its reply."""
        await self.wire.send(self.numbered(kind, data, **more))
        reply = await self.reply()
        if reply.code == "CAPACITY_REACHED":
            raise NoPlace(f"the server has no place for another session: {reply}")
        return reply

    async def works(self, kind: str, data: Any = None) -> Message:
        """Send a numbered request that has to work.

        Raises:
            Blocked: It does not.
        """
        try:
            reply = await self.request(kind, data)
        except Broken as error:
            raise Blocked("R-016-15", f"{kind} with the next id: {error}") from None
        wanted = {"reset": "observation", "step": "observation", "close": "closed", "fork": "forked"}.get(kind, kind)
        if reply.type != wanted:
            raise Blocked("R-016-15", f"{kind} with the next id {self.id} was answered with {reply}")
        return reply

    async def read(self, kind: str, data: Any = None, within: float | None = None) -> Message:
        """Send a read and return its reply."""
        self.q += 1
        q = self.q
        await self.wire.send(self.envelope(kind, data, q=q))
        return await self.wire.take(self.mine(lambda m: m.get("q") == q), f"the reply to {kind}, q {q}", within)
