"""The server that is checked."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from ..results import Blocked, Broken, NotSupported, NotTested
from .ledger import Ledger
from .probe import Probe
from .sockets import Message, Session, Wire
from .witness import Witness

MUX = "openenv.mux.v1"

MAX_BYTES = 64 * 1024**2
"""Largest body and largest WebSocket message that is read, bytes."""


WIRES: ContextVar[list[Wire]] = ContextVar("WIRES")
"""The connections of the running check, also those that are closed."""

WRONGS: ContextVar[list[Blocked]] = ContextVar("WRONGS")
"""What the messages of the running check break, whatever it waits for; see `witness`."""

PROBE_PATH = "/conformance/probe"
"""Where a server can offer a probe of its environment."""


class SeveralEnvironments(OSError):
    """A server's address at which each of its environments has an address of its own."""


@dataclass(frozen=True)
class Answer:
    """An answer of HTTP.

    Args:
        status: As 200.
        headers: By their lower-case names.
        body: Its bytes.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the value of the body.

        Raises:
            Broken: It is no JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise Broken(f"a body of JSON was expected, with status {self.status}: {self.body[:200]!r}") from None


@dataclass
class Target:
    """A server and what is known of it.

    Args:
        url: Its base URL, as ``http://127.0.0.1:8000``, or with the path that its routes have in common.
        probe: Actions for its environment.
        token: Sent as bearer token with every request and handshake.
        other_token: A token of another principal.
        production: The server runs in production mode.
        stop: A shell command that asks the server to stop, as SIGTERM does. It is started again with `start`.
        kill: A shell command that kills the server, as SIGKILL does.
        start: A shell command that starts the server again and returns.
        reply_s: How long a reply may take, in seconds.
        quiet_s: How long nothing comes until a check takes it that nothing will, in seconds.
    """

    url: str
    probe: Probe = field(default_factory=Probe)
    token: str | None = None
    other_token: str | None = None
    production: bool = False
    stop: str | None = None
    kill: str | None = None
    start: str | None = None
    reply_s: float = 15.0
    quiet_s: float = 0.3
    extensions: dict[str, int] = field(default_factory=dict)
    recovery: str = "none"
    limits: dict[str, Any] = field(default_factory=dict)
    shard: str | None = None
    """Name of the server's data directory, which ids have in them; None where it has none."""
    answers_capabilities: bool = False
    speaks_mux: bool = False
    schema: dict[str, Any] = field(default_factory=dict)
    offered: Any = None
    """The probe that the server itself offers, a JSON value; None if it offers none."""
    bears: int | None = None
    """How many steps an episode has, if fewer than a check makes."""
    refuses_reset: str = ""
    """Why no check can reset the environment; empty if they can."""
    reset_s: float = 0.0
    """How long a reset took at most, in seconds."""
    step_s: float = 0.0
    """How long a step took at most, in seconds."""
    ledger: Ledger = field(default_factory=Ledger)
    """What the server has delivered so far."""

    def steps(self, count: int) -> list[dict[str, Any]]:
        """Return so many actions that work, to be sent one after the other; fewer where episodes are shorter."""
        actions = self.probe.need("step")
        return [actions[n % len(actions)] for n in range(min(count, self.bears or count))]

    def turn(self, n: int) -> tuple[str, Any]:
        """Return kind and data of the n-th request after a reset, from 0: a step, or a reset where an episode ends."""
        t = self.turn_t(n)
        if t == 0:
            return "reset", None
        actions = self.probe.need("step")
        return "step", actions[(t - 1) % len(actions)]

    def turn_t(self, n: int) -> int:
        """Return the t of the delivery that answers `turn`."""
        return n + 1 if self.bears is None else (n + 1) % (self.bears + 1)

    @property
    def ws_url(self) -> str:
        """URL of ``/ws``."""
        return self.url.rstrip("/").replace("http", "ws", 1) + "/ws"

    def headers(self, token: str | None) -> dict[str, str]:
        """Return the header that carries a token."""
        return {"Authorization": f"Bearer {token}"} if token is not None else {}

    @asynccontextmanager
    async def connected(
        self, subprotocols: list[str] | None = None, query: str = "", token: str | None = None, bare: bool = False
    ) -> AsyncIterator[Wire]:
        """Open a WebSocket to ``/ws``; it is closed when the context ends.

        Args:
            subprotocols: Subprotocols to offer.
            query: Query string that is appended to the URL, with its ``?``.
            token: Bearer token to send instead of the target's.
            bare: Send no token.

        Raises:
            WebSocketException: The server refuses the handshake.
            OSError: The server cannot be reached, or does not answer within `reply_s`.
        """
        headers = {} if bare else self.headers(token or self.token)
        offered = [Subprotocol(one) for one in subprotocols] if subprotocols else None
        socket = await connect(
            self.ws_url + query,
            subprotocols=offered,
            additional_headers=headers,
            max_size=MAX_BYTES,
            compression=None,
            open_timeout=self.reply_s,
            ping_interval=None,
            close_timeout=2,
            proxy=None,
        )
        mux = socket.subprotocol == MUX
        witness = Witness(self.ledger, mux, query.partition("session_id=")[2] or None)
        wire = Wire(socket, self.reply_s, self.quiet_s, mux, witness, WRONGS.get([]))
        wire.reset, wire.bears = self.probe.reset or {}, self.bears
        WIRES.get([]).append(wire)
        try:
            yield wire
        finally:
            await wire.close()

    @asynccontextmanager
    async def plain(self, query: str = "", token: str | None = None) -> AsyncIterator[Wire]:
        """Open a plain socket: one session.

        Raises:
            Blocked: The server refuses it.
        """
        try:
            async with self.connected(query=query, token=token) as wire:
                yield wire
        except (WebSocketException, OSError) as error:
            raise Blocked("base.connect", f"a plain /ws{query}: {error}") from None

    @asynccontextmanager
    async def multiplexed(self, token: str | None = None) -> AsyncIterator[Wire]:
        """Open a multiplexed socket.

        Raises:
            NotSupported: The server names no subprotocol.
            Blocked: It refuses the handshake.
        """
        try:
            async with self.connected([MUX], token=token) as wire:
                if not wire.mux:
                    raise NotSupported(f"the server does not name {MUX} in its handshake")
                yield wire
        except (WebSocketException, OSError) as error:
            raise Blocked("R-016-2", f"/ws with {MUX} offered: {error}") from None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Open a multiplexed socket with one open session."""
        async with self.multiplexed() as wire:
            session = Session(wire)
            await session.open()
            yield session

    async def http(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, token: str | None = None
    ) -> Answer:
        """Send a request over HTTP; `body` is sent as JSON."""
        answer = await asyncio.to_thread(self._http, method, path, body, headers or {}, token or self.token)
        try:
            self.ledger.answered(method, path, body, answer.status, answer.headers.get("etag"), answer.body)
        except Blocked as wrong:
            WRONGS.get([]).append(wrong)
        return answer

    def _http(self, method: str, path: str, body: Any, headers: dict[str, str], token: str | None) -> Answer:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.reply_s)
        with ExitStack() as opened:
            opened.callback(connection.close)
            # `http.client` does not close an answer whose headers end too early: the stack does.
            connection.response_class = lambda *given, **named: opened.enter_context(  # type: ignore[assignment]
                http.client.HTTPResponse(*given, **named)
            )
            try:
                text = body if body is None or isinstance(body, str) else json.dumps(body)
                content = None if text is None else text.encode()
                all_headers = {
                    **({"Content-Type": "application/json"} if content is not None else {}),
                    **self.headers(token),
                    **headers,
                }
                connection.connect()
                # The connection's timeout is for each read, and an answer that comes byte by byte would never end. The
                # timer needs the socket itself: the connection drops it when the answer ends with the socket.
                deadline = threading.Timer(self.reply_s, _cut, [connection.sock])
                deadline.daemon = True
                opened.callback(deadline.cancel)
                deadline.start()
                connection.request(method, parts.path.rstrip("/") + path, content, all_headers)
                answer = connection.getresponse()
                body = answer.read(MAX_BYTES + 1)
                if len(body) > MAX_BYTES:
                    raise Broken(f"{method} {path}: the body has more than {MAX_BYTES:,} bytes")
                return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise Broken(f"{method} {path}: {type(error).__name__}: {error}") from None

    async def learn(self) -> None:
        """Ask the server what it offers.

        Raises:
            OSError: Nobody answers.
            SeveralEnvironments: The address is that of several environments.
        """
        try:
            answer = await self.http("GET", "/schema")
            found = answer.json() if answer.status == 200 else {}
            self.schema = found if isinstance(found, dict) else {}
        except Broken as error:
            raise OSError(str(error)) from None
        if answer.status == 404:
            await self._not_an_index()
        try:
            answer = await self.http("GET", PROBE_PATH)
            self.offered = answer.json() if answer.status == 200 else None
        except Broken:
            pass  # it offers none
        try:
            async with self.connected() as wire:
                reply = await wire.ask("capabilities")
                if reply.type == "capabilities" and isinstance(reply.data, dict):
                    self.answers_capabilities = True
                    self._offers(reply)
        except (Broken, NotTested, WebSocketException):
            pass  # the checks of plain sockets say what is wrong
        try:
            async with self.connected([MUX]) as wire:
                self.speaks_mux = wire.mux
                if wire.mux:
                    await wire.send({"q": 1, "type": "capabilities"})
                    self._offers(await wire.take(lambda m: m.get("q") == 1, "the reply to capabilities"))
        except (Broken, WebSocketException):
            pass

    async def _not_an_index(self) -> None:
        """Raise `SeveralEnvironments` if the address is that of several, which has no socket of its own."""
        try:
            answer = await self.http("GET", "/list_environments")
            names = answer.json() if answer.status == 200 else None
        except Broken:
            return
        if isinstance(names, list) and len(names) > 1 and all(isinstance(name, str) for name in names):
            places = ", ".join(f"{self.url}/{name}" for name in names[:20])
            raise SeveralEnvironments(f"it serves several environments: give the address of one, such as {places}")

    def _offers(self, reply: Message) -> None:
        data = reply.data if isinstance(reply.data, dict) else {}
        extensions = data.get("extensions")
        if isinstance(extensions, dict):
            self.extensions |= {k: v for k, v in extensions.items() if isinstance(v, int)}
        self.recovery = str(data.get("recovery", self.recovery))
        self.shard = str(data["shard"]) if "shard" in data else self.shard
        if isinstance(data.get("limits"), dict):
            self.limits |= data["limits"]

    def offers(self, extension: str) -> None:
        """Go on if the server names an extension.

        Raises:
            NotSupported: It does not.
        """
        if extension not in self.extensions:
            raise NotSupported(f"the server does not name `{extension}` in extensions")


def _cut(held: socket.socket) -> None:
    """End a request whose time is over: its next read finds the end of the connection."""
    with suppress(OSError):  # it is closed already
        held.shutdown(socket.SHUT_RDWR)
