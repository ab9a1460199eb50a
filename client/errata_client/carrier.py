"""The socket under a `Connection`: dialled, served and dialled again, for as long as a session needs it.

    run ---- dial, again after a random and growing wait --------------+
     |                                                                 |
     +-- read: frames -> machine -> events -> the sessions they concern |   until closed, given up, or nobody is left
     +-- write: what the requests of one turn of the loop make, batched |
     +-- tick: what the machine put off                                 |
     +----- socket lost, goaway, the server broke the protocol --------+

Requests outlive sockets: the machine resumes every session on the next socket and sends again what the server had not
accepted. A caller waits on; only its own deadline, or `Backoff.give_up_s` without a socket, ends the wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from errata_protocol.capabilities import PROTOCOL_NAME, Capabilities
from errata_protocol.errors import ErrataError, NotSupported, RemoteProtocolError
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
)

from .dialing import Backoff, ConnectRefused, Dial
from .stats import ConnectionStats

WRITE_BYTES = 1 << 20
"""Taken from the machine at a time, so that replies are read while much is sent."""
GOAWAY_PATIENCE_S = 10.0
"""How long replies are waited for on a socket that the server wants closed."""
PROTOCOL_ERRORS = 5
"""Sockets in a row that the server broke the protocol on, each within `STEADY_S`, before waiting requests fail."""
STEADY_S = 30.0

_log = logging.getLogger("errata.client")

Outcome = Answered | Exception
"""What becomes of a read."""


class Listener(Protocol):
    """What a connection tells about one session."""

    ends: bool
    """The session ends with its client."""

    def take(self, event: ClientEvent) -> None:
        """Take an event of the session, in order."""

    async def end(self) -> None:
        """End it on the server."""

    def unreachable(self, error: Exception) -> None:
        """Take that nothing is sent or received for now: nobody waits any longer."""


class Carrier:
    """The asyncio shell of `errata_protocol.mux.ClientProtocol`, for one event loop.

    Args:
        dial: How its sockets are opened.
        backoff: Waits between attempts, and when to give up.

    Attributes:
        machine: The protocol. Whoever asks it for something calls `stir` afterwards.
        stats: Counters.
        capabilities: What the server said it can do; None before the first socket.
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
        self._socket: ClientConnection | None = None  # opened elsewhere, to be used first
        self._writable: asyncio.Event = asyncio.Event()
        self._up: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._listeners: dict[str, Listener] = {}
        self._reads: dict[ClientRead, Callable[[Outcome], None]] = {}
        self._farewells: set[asyncio.Task[None]] = set()
        self._resume_after_s = 0.0
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a socket now."""
        return self._ws is not None

    def attach(self, session: ClientSession, listener: Listener) -> None:
        """Tell ``listener`` of all events of ``session``, which the machine just made."""
        self._listeners[session.sid] = listener
        self.stir()

    def let_go(self, session: ClientSession) -> None:
        """Forget a session here; on the server it stays."""
        self.machine.forget(session)
        self._listeners.pop(session.sid, None)
        self.stir()

    def stir(self) -> None:
        """Send what the machine has to say, once this turn of the loop is over."""
        self._writable.set()
        if self._runner is None and self._wanted():
            self._run_on()

    # -- the socket --------------------------------------------------------------------------------------------------

    def _run_on(self) -> None:
        if self._runner is None and not self._closed:
            assert self._loop is not None
            self._up = self._loop.create_future()
            self._runner = self._loop.create_task(self._run(), name="errata-connection")
            self._runner.add_done_callback(self._ran)

    def _ran(self, runner: asyncio.Task[None]) -> None:
        error = None if runner.cancelled() else runner.exception()
        if error is not None:  # a defect of ours: nobody may wait for ever because of it
            _log.error("the connection broke", exc_info=error)
            self._fail(error if isinstance(error, Exception) else ConnectionError(repr(error)))

    async def _run(self) -> None:
        assert self._loop is not None and self._up is not None
        broken = 0
        try:
            while self._socket is not None or self._wanted() or not self._up.done():
                ws = await self._dialled()
                since = self._loop.time()
                try:
                    await self._serve(ws)
                except ConnectionClosed as error:
                    self.stats.sockets_lost += 1
                    _log.info("a socket to %s was lost: %s", self.dial.ws_url, error)
                except RemoteProtocolError as error:
                    if (wait_s := error.details.get("retry_after")) is not None:  # a frame of ours found no room
                        self.stats.overloaded += 1
                        _log.info("%s", error)
                        await asyncio.sleep(wait_s)
                        continue
                    self.stats.protocol_errors += 1
                    broken = broken + 1 if self._loop.time() - since < STEADY_S else 1
                    _log.warning("%s", error)
                    if broken >= PROTOCOL_ERRORS:
                        raise
                    await asyncio.sleep(self.backoff.delay(broken))
        except (OSError, ErrataError) as error:
            self._fail(error)
        finally:
            self._runner = None  # at once: who asks next starts another

    def _wanted(self) -> bool:
        return bool(self._listeners or self._reads)

    async def _dialled(self) -> ClientConnection:
        """Return a socket, however many attempts it takes; the very first one is not repeated."""
        assert self._loop is not None
        if self._socket is not None:
            ws, self._socket = self._socket, None
            return ws
        if self._resume_after_s:
            await asyncio.sleep(self._resume_after_s)
            self._resume_after_s = 0.0
        failures, give_up_at = 0, self._loop.time() + self.backoff.give_up_s
        while True:
            try:
                ws = await self.dial.open()
            except ConnectionError as error:
                if isinstance(error, ConnectRefused) or self.stats.connects == 0:
                    raise
                failures += 1
                delay = self.backoff.delay(failures)
                if self._loop.time() + delay > give_up_at:
                    raise ConnectionError(
                        f"no connection for {self.backoff.give_up_s:g} s: {error}; the server keeps the sessions for a "
                        "while: ask again to try again"
                    ) from error
                await asyncio.sleep(delay)
                continue
            if ws.subprotocol != PROTOCOL_NAME:
                self._part(ws)
                raise NotSupported(
                    f"{self.dial.ws_url} does not speak {PROTOCOL_NAME}: use ErrataClient without connection= or mux="
                )
            return ws

    async def _serve(self, ws: ClientConnection) -> None:
        """Carry the sessions on a socket until it ends.

        Raises:
            ConnectionClosed: It was lost.
            RemoteProtocolError: The server broke the protocol.
        """
        assert self._loop is not None and self._up is not None
        loop, machine = self._loop, self.machine
        self._ws = ws
        self.stats.connects += 1
        machine.connected(loop.time())
        self._reads[machine.read("capabilities")] = self._learn
        if not self._up.done():
            self._up.set_result(None)
        self._writable.set()
        writer = loop.create_task(self._write(ws), name="errata-connection-writer")
        try:
            while not (machine.leaving and self._is_quiet()):
                frame = await ws.recv(decode=False)
                self.stats.frames_received += 1
                try:
                    events = machine.receive(frame, loop.time())
                except RemoteProtocolError:
                    self._dispatch(machine.tick(loop.time()))  # what it had understood before
                    raise
                self._dispatch(events)
                if machine.has_data:
                    self._writable.set()
                self._wait_for_timer()
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            self._ws = None
            if self._wanted():
                self._up = loop.create_future()
            machine.disconnected(loop.time())
            self._part(ws)

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
            pass  # the reader hears of it too
        except Exception:
            ws.transport.abort()  # else the reader would wait for answers to what was never sent
            raise

    def _is_quiet(self) -> bool:
        return not any(session.sent for session in self.machine.sessions.values())

    def _part(self, ws: ClientConnection) -> None:
        """Close a socket without waiting for it."""
        assert self._loop is not None
        farewell = self._loop.create_task(ws.close(), name="errata-connection-close")
        self._farewells.add(farewell)
        farewell.add_done_callback(self._farewells.discard)

    def _fail(self, error: Exception) -> None:
        """Let nobody wait any longer. Sessions stay, and the next request tries again."""
        if self._up is not None and not self._up.done():
            self._up.set_exception(error)
            self._up.exception()  # that nobody asked is no defect
        reads, self._reads = self._reads, {}
        for read, settle in reads.items():
            self.machine.drop(read)
            settle(error)
        for listener in list(self._listeners.values()):
            listener.unreachable(error)

    # -- events ------------------------------------------------------------------------------------------------------

    def _dispatch(self, events: list[ClientEvent]) -> None:
        listeners = self._listeners
        for event in events:
            if type(event) is Replied or type(event) is Failed:
                listener = listeners.get(event.session.sid)
                if listener is not None:
                    listener.take(event)
            elif isinstance(event, Answered):
                settle = self._reads.pop(event.read, None)
                if settle is not None:
                    settle(event)
            elif isinstance(event, GoneAway):
                self._go(event.retry_after_s)
            else:
                listener = listeners.get(event.session.sid)
                if isinstance(event, SessionEnded):
                    listeners.pop(event.session.sid, None)
                if listener is not None:
                    listener.take(event)
                if isinstance(event, Refused):
                    _log.debug("refused until %.3f: %s", event.retry_at, event.error)

    def _go(self, retry_after_s: float) -> None:
        """Leave a socket that the server wants closed, when its replies are here or have been waited for."""
        assert self._loop is not None
        self.stats.goaways += 1
        self._resume_after_s = min(max(retry_after_s, 0.0), self.backoff.give_up_s)
        ws = self._ws
        if ws is not None:
            self._loop.call_later(GOAWAY_PATIENCE_S, self._part_if_open, ws)

    def _part_if_open(self, ws: ClientConnection) -> None:
        if self._ws is ws:
            self._part(ws)

    def _learn(self, outcome: Outcome) -> None:
        """Keep to the bounds that the server tells."""
        if isinstance(outcome, Exception) or outcome.error is not None:
            return
        self.capabilities = told = Capabilities.model_validate_json(outcome.payload)
        self.machine.keep_to(told.limits)

    def _wait_for_timer(self) -> None:
        due = self.machine.next_timer()
        timer = self._timer
        if timer is not None:
            # Its `when()` is not asked: what uvloop returns for a time that has passed has none.
            if due is not None and self._due <= due and not timer.cancelled():
                return  # it is asked again then
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
