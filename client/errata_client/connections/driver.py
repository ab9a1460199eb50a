"""`ConnectionDriver`: runs the client's mux state machine on an event loop, over a socket that it opens again.

    run ---- open a socket; after a failure wait, each time longer ------+
     |                                                                    |
     +-- read: frames -> state machine -> events -> the session's listener |   until closed, given up, or no session
     +-- write: frames of all requests of one turn of the loop            |   and no read is left
     +-- tick: timers of the state machine                                |
     +----- socket lost, goaway, or the server broke the protocol --------+

Requests survive a lost socket: the state machine resumes every session on the next one and resends the requests that
the server had not accepted. Callers keep waiting until their own timeout, or `Backoff.give_up_s` without a socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from errata_protocol.capabilities import PROTOCOL_NAME, Capabilities
from errata_protocol.errors import ErrataError, LocalProtocolError, Misdirected, NotSupported, RemoteProtocolError
from errata_protocol.fleet import EXTENSION
from errata_protocol.mux import (
    Answered,
    ClientEvent,
    ClientProtocol,
    ClientRead,
    ClientSession,
    Failed,
    GoneAway,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
)
from errata_protocol.names import SHARD
from errata_protocol.shards import shard_of

from ..fleet.members import Members, lost_error
from .dialing import Backoff, ConnectRefused, Dial
from .outcome import copy_of, taken_over_error
from .stats import ConnectionStats
from .waiting import waits_at

WRITE_BYTES = 1 << 20
"""Most bytes that are taken from the state machine at a time, so that replies are read while much is sent."""
GOAWAY_TIMEOUT_S = 10.0
"""How long a socket stays open for replies after the server asked to reconnect, seconds."""
PROTOCOL_ERRORS = 5
"""Waiting requests fail when the server broke the protocol on so many sockets in a row, on each within `STEADY_S`."""
STEADY_S = 30.0
"""A socket that was open for so long is not counted by `PROTOCOL_ERRORS`, seconds."""
SHORT_S = 1.0
"""A socket that was open for less counts as a failed attempt to connect, seconds: a server may accept and close it."""

_log = logging.getLogger("errata.client")

ReadOutcome = Answered | Exception
"""The answer to a read, or why there is none."""


class Listener(Protocol):
    """What a connection calls about one session."""

    ends: bool
    """Whether the session ends with its client."""

    def receive(self, event: ClientEvent) -> None:
        """Called with each event of the session, in order."""

    async def end(self) -> None:
        """End the session on the server."""

    def unreachable(self, error: Exception) -> None:
        """Called when there is no connection for now: waiting callers get ``error``, the session goes on."""


class ConnectionDriver:
    """Runs an `errata_protocol.mux.ClientProtocol` on one event loop.

    Args:
        dial: How sockets are opened.
        backoff: Waits between attempts to connect, and when to give up.

    Attributes:
        machine: The state machine. Call `schedule_send` after each call that makes it send something.
        stats: Counters.
        capabilities: The server's capabilities; None before the first socket.
        members: The members of the server, where it has several or another connection has read them; None until then.
    """

    def __init__(self, dial: Dial, backoff: Backoff) -> None:
        self.dial = dial
        self.backoff = backoff
        self.stats = ConnectionStats()
        self.capabilities: Capabilities | None = None
        self.machine = ClientProtocol()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: asyncio.Task[None] | None = None
        self._ws: ClientConnection | None = None
        self._first_socket: ClientConnection | None = None  # opened by `Connection.on`, the first to be used
        self._writable: asyncio.Event = asyncio.Event()
        self._connected: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._listeners: dict[str, Listener] = {}
        self._reads: dict[ClientRead, Callable[[ReadOutcome], None]] = {}
        self._closing_sockets: set[asyncio.Task[None]] = set()
        self.members: Members | None = None
        self._own_members: Members | None = None
        self._reading_members: asyncio.Task[object] | None = None
        self._place: Dial | None = None  # how the last socket was opened, or the next one is to be
        self._placed_by = dial
        self._suspects: dict[str, str] = {}  # shards of sessions that may be lost, by sid
        self._suspecting: asyncio.Task[None] | None = None
        self._knows_server = False  # `capabilities` are those of the socket that is open now
        self._resume_after_s = 0.0
        self._no_socket_because: Exception | None = None
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a socket now."""
        return self._ws is not None

    @property
    def member(self) -> str | None:
        """Name of the member that has the sockets, as far as is known: the one that has the sessions, since another one
        passes each frame on to it, or refuses them. Without sessions it is the one that had the last socket."""
        for sid in self.machine.sessions:
            if (shard := shard_of(sid)) is not None and self._has_fleet:
                return shard
        found = self.capabilities
        if found is not None and self._has_fleet and SHARD.matches(found.shard):
            return found.shard
        return self.dial.shard

    @property
    def _has_fleet(self) -> bool:
        """Whether the server may have several members."""
        found = self.capabilities
        return self.dial.shard is not None or (found is not None and found.offers(EXTENSION))

    def _next_place(self) -> Dial:
        """Return how the next socket is opened: as the last one, unless the member or `dial` is another."""
        if self._placed_by is not self.dial:
            self._place, self._placed_by = None, self.dial
        place, shard = self._place or self.dial, self.member
        if place.shard != shard:
            known = self.members.known(shard) if self.members is not None else None
            place = self.dial.at(known) if known is not None else replace(self.dial, shard=shard, member_url=None)
        return place

    def attach(self, session: ClientSession, listener: Listener) -> None:
        """Pass the events of ``session``, which was just added to the machine, to ``listener``."""
        self._listeners[session.sid] = listener
        self.schedule_send()

    def forget(self, session: ClientSession) -> None:
        """Remove a session from this connection. It stays on the server; reads that wait for an answer fail."""
        self._fail_reads(session, LocalProtocolError("the session was left while a read was waiting"))
        self.machine.forget(session)
        self._listeners.pop(session.sid, None)
        self.schedule_send()

    def schedule_send(self) -> None:
        """Send the machine's frames once the current turn of the event loop is over; connect first if necessary."""
        self._writable.set()
        if self._runner is None and self._is_needed():
            self._start()

    # -- the socket --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._runner is None and not self._closed:
            assert self._loop is not None
            self._connected = self._loop.create_future()
            self._runner = self._loop.create_task(self._run(), name="errata-connection")
            self._runner.add_done_callback(self._run_ended)

    def _run_ended(self, runner: asyncio.Task[None]) -> None:
        error = None if runner.cancelled() else runner.exception()
        if error is not None:  # a defect of the client: callers must not wait forever because of it
            _log.error("unexpected error in a connection", exc_info=error)
            self._fail(error if isinstance(error, Exception) else ConnectionError(repr(error)))

    async def _run(self) -> None:
        assert self._loop is not None and self._connected is not None
        loop = self._loop
        closed = ""
        broken = short = 0  # sockets in a row on which the server broke the protocol; that were open for a short time
        without_since = loop.time()
        try:
            while self._first_socket is not None or self._is_needed() or not self._connected.done():
                ws = await self._next_socket(short, without_since + self.backoff.give_up_s, closed)
                since = loop.time()
                try:
                    await self._serve(ws)
                except ConnectionClosed as error:
                    self.stats.sockets_lost += 1
                    closed = f": {error}"
                    _log.info("a socket to %s was lost: %s", self.dial.ws_url, error)
                except RemoteProtocolError as error:
                    if (wait_s := error.details.get("retry_after")) is not None:  # the server had no memory for a frame
                        self.stats.overloaded += 1
                        _log.info("%s", error)
                        await asyncio.sleep(wait_s)
                        short, without_since = 0, loop.time()
                        continue
                    self.stats.protocol_errors += 1
                    broken = broken + 1 if loop.time() - since < STEADY_S else 1
                    _log.warning("%s", error)
                    if broken >= PROTOCOL_ERRORS:
                        raise
                    await asyncio.sleep(self.backoff.delay(broken))
                    short, without_since = 0, loop.time()
                    continue
                if loop.time() - since < SHORT_S:
                    short += 1
                else:
                    short, without_since = 0, loop.time()
        except (OSError, ErrataError) as error:
            self._fail(error)
        finally:
            self._runner = None  # so that the next request starts another task

    def _is_needed(self) -> bool:
        return bool(self._listeners or self._reads)

    async def _next_socket(self, short: int, give_up_at: float, closed: str) -> ClientConnection:
        """Return an open socket; retry until ``give_up_at``, except before the first socket of this connection.

        Args:
            short: How many sockets in a row were open for less than `SHORT_S`. The first of them is replaced at once.
            give_up_at: Loop time after which to wait no longer.
            closed: How the last of them was closed, with the server's reason.

        Raises:
            ConnectionError: The time is over, or connecting failed and would fail again.
            NotSupported: The server does not speak the multiplexed protocol.
        """
        assert self._loop is not None
        if self._first_socket is not None:
            ws, self._first_socket = self._first_socket, None
            return ws
        self._no_socket_because = None
        most_s = self._resume_after_s + (self.backoff.give_up_s if self.stats.connects else self.dial.connect_timeout_s)
        with waits_at(self.dial.ws_url).on("a connection", most_s, lambda: self._no_socket_because):
            return await self._opened(short, give_up_at, closed)

    async def _opened(self, short: int, give_up_at: float, closed: str) -> ClientConnection:
        assert self._loop is not None
        if self._resume_after_s:  # the server asked for this wait
            give_up_at += self._resume_after_s
            await asyncio.sleep(self._resume_after_s)
            self._resume_after_s = 0.0
        failures = max(short - 1, 0)
        cause: Exception = ConnectionError(f"the server closed {short} sockets as soon as they were open{closed}")
        while True:
            delay = self.backoff.delay(failures)
            if failures and self._loop.time() + delay > give_up_at:
                raise ConnectionError(
                    f"no connection for {self.backoff.give_up_s:g} s: {cause}; the server keeps the sessions for a "
                    "while: ask again to try again"
                ) from cause
            await asyncio.sleep(delay)
            self._place = place = self._next_place()
            try:
                ws = await place.open()
            except ConnectionError as error:
                moved = await self._find_member(place.shard)
                if not moved and (isinstance(error, ConnectRefused) or self.stats.connects == 0):
                    raise
                failures, cause = failures + 1, error
                self._no_socket_because = error
                continue
            if ws.subprotocol != PROTOCOL_NAME:
                self._close_socket(ws)
                raise NotSupported(
                    f"{self.dial.ws_url} does not speak {PROTOCOL_NAME}: use ErrataClient without connection= or mux="
                )
            return ws

    async def _serve(self, ws: ClientConnection) -> None:
        """Serve the sessions on a socket until it is closed, or until replies are complete after a ``goaway``.

        Raises:
            ConnectionClosed: The socket was lost.
            RemoteProtocolError: The server broke the protocol.
        """
        assert self._loop is not None and self._connected is not None
        loop, machine = self._loop, self.machine
        self._ws = ws
        self._knows_server = False
        self.stats.connects += 1
        machine.connected(loop.time())
        if self._receive_capabilities not in self._reads.values():  # else it is sent again
            self._reads[machine.read("capabilities")] = self._receive_capabilities
        if not self._connected.done():
            self._connected.set_result(None)
        self._writable.set()
        writer = loop.create_task(self._write(ws), name="errata-connection-writer")
        try:
            while not (machine.leaving and self._all_answered()):
                frame = await ws.recv(decode=False)
                self.stats.frames_received += 1
                try:
                    events = machine.receive(frame, loop.time())
                except RemoteProtocolError:
                    self._dispatch(machine.tick(loop.time()))  # events of the messages before the broken one
                    raise
                self._dispatch(events)
                if machine.has_data:
                    self._writable.set()
                self._wait_for_timer()
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            self._ws = None
            if self._is_needed():
                self._connected = loop.create_future()
            machine.disconnected(loop.time())
            self._close_socket(ws)

    async def _write(self, ws: ClientConnection) -> None:
        machine = self.machine
        try:
            while True:
                await self._writable.wait()
                self._writable.clear()
                while machine.has_data:
                    for frame in machine.data_to_send(WRITE_BYTES):
                        self.stats.frames_sent += 1
                        await ws.send(frame, text=True)
                self._wait_for_timer()
        except ConnectionClosed:
            pass  # the reader gets this error too
        except Exception:
            ws.transport.abort()  # else the reader would wait for replies to requests that were never sent
            raise

    def _all_answered(self) -> bool:
        return not any(session.sent for session in self.machine.sessions.values())

    def _close_socket(self, ws: ClientConnection) -> None:
        """Close a socket in a task; do not wait for the closing handshake."""
        assert self._loop is not None
        closing = self._loop.create_task(ws.close(), name="errata-connection-close")
        self._closing_sockets.add(closing)
        closing.add_done_callback(self._closing_sockets.discard)

    def _fail(self, error: Exception) -> None:
        """Fail all waiting callers with ``error``. Sessions stay; the next request connects again."""
        if self._connected is not None and not self._connected.done():
            self._connected.set_exception(error)
            self._connected.exception()  # so that asyncio does not log an exception that nobody awaited
        reads, self._reads = self._reads, {}
        for read, settle in reads.items():
            self.machine.drop(read)
            settle(error)
        for listener in list(self._listeners.values()):
            listener.unreachable(error)

    def _fail_reads(self, session: ClientSession, error: ErrataError) -> None:
        """Fail all callers that wait for the answer to a read of ``session``."""
        for read in list(session.reads.values()):
            self.machine.drop(read)
            if (settle := self._reads.pop(read, None)) is not None:
                settle(copy_of(error))

    # -- events ------------------------------------------------------------------------------------------------------

    def _dispatch(self, events: list[ClientEvent]) -> None:
        listeners = self._listeners
        for event in events:
            if type(event) is Replied or type(event) is Failed:
                listener = listeners.get(event.session.sid)
                if listener is not None:
                    listener.receive(event)
            elif isinstance(event, Answered):
                settle = self._reads.pop(event.read, None)
                if settle is not None:
                    settle(event)
            elif isinstance(event, GoneAway):
                self._go_away(event.retry_after_s)
            else:
                listener = listeners.get(event.session.sid)
                if isinstance(event, TakenOver):
                    self._fail_reads(event.session, taken_over_error())
                if isinstance(event, SessionEnded):
                    listeners.pop(event.session.sid, None)
                if listener is not None:
                    listener.receive(event)
                if isinstance(event, Refused):
                    _log.debug("refused until %.3f: %s", event.retry_at, event.error)
                    if event.error.code == Misdirected.code:
                        self._suspect(event.error.details.get("shard"), event.session.sid)

    # -- members that are lost ---------------------------------------------------------------------------------------

    async def _find_member(self, shard: str | None) -> bool:
        """Look where a member is now that no socket reaches; end its sessions if it is lost.

        Returns:
            Whether it is elsewhere, or its sessions have to wait for it.
        """
        if shard is None or not self._has_fleet:
            return False
        before = self._place
        found = await self.known_members().of(shard)
        if found is None:
            return False
        if found.state == "lost":
            self._suspect(shard, *(sid for sid in self.machine.sessions if shard_of(sid) == shard))
            return False
        self._place = self.dial.at(found)
        return found.state == "down" or before is None or self._place.url != before.url

    def known_members(self) -> Members:
        """Return the members of the server; the connection closes what is open for them."""
        if self.members is None:
            self.members = self._own_members = Members(self.dial.address, dict(self.dial.headers))
        return self.members

    def _suspect(self, shard: object, *sids: str) -> None:
        """Ask whether a shard is lost, or elsewhere, whose sessions are refused or wait for it."""
        if not isinstance(shard, str) or not sids or self._closed:
            return
        self._suspects |= dict.fromkeys(sids, shard)
        if self._suspecting is None:
            assert self._loop is not None
            self._suspecting = self._loop.create_task(self._clear_suspects(), name="errata-connection-lost")

    async def _clear_suspects(self) -> None:
        members = self.known_members()
        try:
            while self._suspects:
                sid, shard = self._suspects.popitem()
                found = await members.of(shard)
                session, ws = self.machine.sessions.get(sid), self._ws
                if found is None or session is None:
                    continue
                place = self.dial.at(found)
                if found.state == "lost":
                    self._dispatch(self.machine.lose(session, lost_error(found)))
                elif ws is not None and shard == self.member and place.url != (self._place or self.dial).url:
                    self._place = place  # another server has the address that its member had
                    self._close_socket(ws)
        finally:
            self._suspecting = None

    async def _stop_suspecting(self) -> None:
        """Ask no longer who is lost; called when the connection is closed."""
        if self._suspecting is not None:
            self._suspecting.cancel()
            await asyncio.gather(self._suspecting, return_exceptions=True)
        if self._reading_members is not None:
            self._reading_members.cancel()
            await asyncio.gather(self._reading_members, return_exceptions=True)
        if self._own_members is not None:
            await self._own_members.aclose()

    def _go_away(self, retry_after_s: float) -> None:
        """Have the socket closed when all replies have arrived, or after `GOAWAY_TIMEOUT_S`; then connect again."""
        assert self._loop is not None
        self.stats.goaways += 1
        self._resume_after_s = min(max(retry_after_s, 0.0), self.backoff.give_up_s)
        ws = self._ws
        if ws is not None:
            self._loop.call_later(GOAWAY_TIMEOUT_S, self._close_if_current, ws)

    def _close_if_current(self, ws: ClientConnection) -> None:
        if self._ws is ws:
            self._close_socket(ws)

    def _receive_capabilities(self, outcome: ReadOutcome) -> None:
        """Keep the server's capabilities and apply its limits."""
        if isinstance(outcome, Exception) or outcome.error is not None:
            return
        self.capabilities = capabilities = Capabilities.model_validate_json(outcome.payload)
        self._knows_server = True
        self.machine.apply_limits(capabilities.limits)
        if capabilities.offers(EXTENSION) and self.members is None:
            # Now, since this member may be the one that ends: the others are asked then who has come back where.
            assert self._loop is not None
            self._reading_members = self._loop.create_task(self.known_members().of(capabilities.shard))

    def _wait_for_timer(self) -> None:
        due = self.machine.next_timer()
        timer = self._timer
        if timer is not None:
            # `_due` is kept because the handle that uvloop returns for a past time has no `when()`.
            if due is not None and self._due <= due and not timer.cancelled():
                return  # `_tick` sets the next timer
            timer.cancel()
        self._timer = None
        if due is not None and self._loop is not None:
            self._timer, self._due = self._loop.call_at(due, self._tick), due

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = None
        self._dispatch(self.machine.tick(self._loop.time()))
        self._writable.set()
        self._wait_for_timer()
