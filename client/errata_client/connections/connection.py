"""`Connection`: a multiplexed connection to a server (PROTOCOL D), shared by the sessions of many clients."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any, Self

import msgspec
from websockets.asyncio.client import ClientConnection

from errata_protocol.errors import ErrataError, InvalidRequest, LocalProtocolError
from errata_protocol.mux import Answered, ClientSession
from errata_protocol.mux.records import ReadKind

from . import background
from .dialing import Backoff, Dial, is_list, ws_url_of
from .driver import ConnectionDriver, ReadOutcome
from .waiting import Waits, waits_at

_log = logging.getLogger("errata.client")


class Connection(ConnectionDriver):
    """A connection for the sessions of many clients: ``ErrataClient(url, connection=connection)``.

    It belongs to the event loop that first uses it; blocking clients share the process's background loop. It opens its
    socket at its first use, and again whenever the socket is lost.

    Args:
        base_url: Base URL of one environment, as for `ErrataClient`.
        headers: Sent with each handshake, e.g. the token.
        connect_timeout_s: Timeout of one handshake, seconds.
        websocket_ping_interval_s: Seconds between pings; None sends none, and a half-open socket is not noticed.
        websocket_ping_timeout_s: Seconds until an unanswered ping means that the socket is lost.
        max_message_size_mb: Largest incoming message, MiB.
        backoff: Waits between attempts to connect, and when to give up.
        group: Name of 21 to 128 characters ``A-Z a-z 0-9 _ -`` under which sessions are opened, so that any process
            that knows it can end them all with `close_group`; random by default.

    Raises:
        InvalidRequest: The address is that of a list of members.

    Attributes:
        waits: Where callers that wait are noted; set by `enter`.
    """

    waits: Waits

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 10.0,
        websocket_ping_interval_s: float | None = 20.0,
        websocket_ping_timeout_s: float | None = 20.0,
        max_message_size_mb: float = 100.0,
        backoff: Backoff | None = None,
        group: str | None = None,
    ) -> None:
        if is_list(base_url):
            raise InvalidRequest("a connection is to one server: give ErrataClient or EnvPool the address of a list")
        dial = Dial(
            ws_url_of(base_url),
            Dial.header_items(headers),
            connect_timeout_s,
            websocket_ping_interval_s,
            websocket_ping_timeout_s,
            int(max_message_size_mb * 1024 * 1024),
        )
        super().__init__(dial, backoff or Backoff())
        self.base_url = base_url.rstrip("/")
        self.group = group or secrets.token_urlsafe(24)
        self._forks = background.forks()
        self._closing = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a connection in another process needs to open a socket of its own."""
        return {name: getattr(self, name) for name in ("base_url", "dial", "backoff", "group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a connection that is not open."""
        self.__init__(state["base_url"], backoff=state["backoff"], group=state["group"])  # type: ignore[misc]
        self.dial = state["dial"]

    @property
    def sessions(self) -> int:
        """How many sessions use this connection."""
        return len(self._listeners)

    async def connect(self) -> Self:
        """Open a socket, unless there is one, and read the server's capabilities.

        Raises:
            ConnectionError: The server cannot be reached.
            NotSupported: The server does not speak the multiplexed protocol.
        """
        self.enter()
        while not self.is_open:
            self._start()
            assert self._loop is not None and self._connected is not None
            if self._connected.done():  # it was for the last socket, and no session needs the next one
                self._connected = self._loop.create_future()
            await asyncio.shield(self._connected)
        if not self._knows_server:  # another member may have got the socket, whose name new sids are to have
            await self.read("capabilities")
        return self

    @classmethod
    def to(cls, base_url: str, dial: Dial) -> Connection:
        """Return a connection of the running loop that opens its first socket when it is needed.

        Args:
            base_url: The server's base URL.
            dial: Opens the sockets.
        """
        connection = cls("")
        connection.base_url, connection.dial = base_url, dial
        connection.enter()
        return connection

    @classmethod
    def on(cls, base_url: str, dial: Dial, socket: ClientConnection) -> Connection:
        """Return a connection whose first socket is open already.

        Args:
            base_url: The server's base URL.
            dial: Opens further sockets.
            socket: A socket of the running loop whose server accepted the multiplexed protocol.
        """
        connection = cls.to(base_url, dial)
        connection._first_socket = socket
        connection._start()
        return connection

    async def aclose(self) -> None:
        """Close the connection for good: end the sessions that end with their clients, then close the socket.

        Ending the sessions takes two seconds at most; the server ends the others when they expire.
        """
        if self._closing:
            return
        self._closing = True
        if self._loop is None or background.forks() != self._forks:
            self._closed = True
            return
        try:
            async with asyncio.timeout(2.0):
                await self._end_sessions()
        except (TimeoutError, ErrataError, OSError) as error:
            _log.debug("sessions were left to the server: %r", error)
        finally:
            self._closed = True
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.cancel()
                await asyncio.gather(runner, return_exceptions=True)
            await self._stop_suspecting()
            if self._first_socket is not None:
                self._close_socket(self._first_socket)
            self._fail(ConnectionError("the connection was closed: make another Connection"))
            if self._timer is not None:
                self._timer.cancel()
            await asyncio.gather(*self._closing_sockets, return_exceptions=True)

    def close(self) -> None:
        """Do `aclose` from another thread than the event loop's, e.g. in blocking code.

        Raises:
            LocalProtocolError: It was called in the connection's own event loop, which it would block.
        """
        try:
            in_own_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:  # no loop runs in this thread
            in_own_loop = False
        if in_own_loop and not self._closing:
            raise LocalProtocolError("close() would wait for the event loop that it is called in: use aclose()")
        if (
            self._loop is not None
            and not in_own_loop
            and not self._loop.is_closed()
            and background.forks() == self._forks
        ):
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result()
        self._closed = True

    async def __aenter__(self) -> Self:
        """Connect."""
        return await self.connect()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        """Return the connection; its first blocking client connects it."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def close_group(self, group: str) -> int:
        """End all sessions that were opened under ``group``, on this connection or others.

        Returns:
            How many sessions were ended.
        """
        answer = await self.read("close_group", data=msgspec.json.encode({"group": group}))
        found: dict[str, Any] = msgspec.json.decode(answer.payload)
        return int(found["closed"])

    def enter(self) -> None:
        """Check that the connection may be used by the caller; the first call binds it to the running loop.

        Raises:
            LocalProtocolError: It is closed, belongs to another event loop, or was made before ``os.fork``.
        """
        if background.forks() != self._forks:
            raise LocalProtocolError(
                "this connection was opened before os.fork() and belongs to the parent process: open another here; "
                "a session is handed over by client.ticket() and ErrataClient.resume()"
            )
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise LocalProtocolError("this connection belongs to another event loop: make one for each loop")
            self._loop = loop
            self.waits = waits_at(self.base_url)
        if self._closed:
            raise LocalProtocolError("this connection is closed: make another")

    async def read(
        self, kind: ReadKind, session: ClientSession | None = None, data: bytes = b"{}", most_s: float = math.inf
    ) -> Answered:
        """Send a read and return its answer; it is sent again on the next socket when one is lost.

        Args:
            kind: Type of the read.
            session: The session to read; None for reads of the server.
            data: Its ``data``, JSON.
            most_s: How long the caller waits, seconds; only for the log.

        Raises:
            ErrataError: The answer is an error.
            ConnectionError: There was no socket for `Backoff.give_up_s`.
        """
        self.enter()
        answered: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()

        def settle(outcome: ReadOutcome) -> None:
            if answered.done():
                return
            if isinstance(outcome, Exception):
                answered.set_exception(outcome)
            elif outcome.error is not None:
                answered.set_exception(outcome.error)
            else:
                answered.set_result(outcome)

        read = self.machine.read(kind, session, data)
        self._reads[read] = settle
        self.schedule_send()
        try:
            with self.waits.on(f"the answer to a {kind} read", most_s):
                return await answered
        finally:
            if self._reads.pop(read, None) is not None:  # the caller was cancelled
                self.machine.drop(read)

    async def _end_sessions(self) -> None:
        """End the sessions that end with their clients: all by their group, or one by one where others are to stay."""
        ending = [listener for listener in self._listeners.values() if listener.ends]
        if not ending or not self.is_open:
            return
        if len(ending) == len(self._listeners):
            await self.close_group(self.group)
        else:
            await asyncio.gather(*(listener.end() for listener in ending))
