"""`ProtocolDriver`: runs the mux state machine on an event loop: passes events, performs effects, sets the timer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from errata_protocol.errors import ErrataError, FrameTooLarge, Overloaded
from errata_protocol.mux import (
    AnswerRead,
    Effect,
    EncodedReply,
    FindSession,
    Hibernate,
    ReadPushes,
    ReadReplies,
    RecordedReply,
    RecordError,
    RunRequest,
    ServerConfig,
    ServerConnection,
    ServerProtocol,
    ServerSession,
    Stored,
)
from errata_protocol.mux.records import EndReason

from ...ids import MULTIPLEXED
from ..readers import Reader

log = logging.getLogger("errata.mux")


def journal_sid(sid: str) -> str:
    """Return the journal's id of the multiplexed session ``sid``."""
    return MULTIPLEXED + sid


def wire_sid(sid: str) -> str:
    """Return the sid of the multiplexed session whose id in the journal is ``sid``."""
    return sid.removeprefix(MULTIPLEXED)


class SocketHandle(Protocol):
    """A socket as the driver and its handlers use it; it is the ``handle`` of its `ServerConnection`."""

    reader: Reader
    """Who opened the socket."""
    reads: asyncio.Semaphore
    """Bounds the reads of this socket that run at the same time."""

    def wake(self) -> None:
        """Called when the connection has data to send."""

    async def writable(self) -> None:
        """Wait until the client has read enough of what was sent to accept more, or the socket is closed."""


class ProtocolDriver:
    """Passes events to the state machine and performs the effects that it returns.

    A method that has the name of one of `ServerProtocol` calls that method and performs its effects. All methods are
    called on one event loop, that of the sockets.

    Args:
        config: Configuration of the state machine.
        attached: See `ServerProtocol`.

    Attributes:
        protocol: The state machine, for calls that return no effects.
        has_loop: Whether `move_to` was called.
        loop: The event loop of the sockets; unset before `move_to`.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, config: ServerConfig, attached: Callable[[ServerSession], None]) -> None:
        self.protocol = ServerProtocol(config, attached)
        self._handlers: Mapping[type, Callable[[Any], None]] = {}
        self.has_loop = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def handle_with(self, handlers: Mapping[type, Callable[[Any], None]]) -> None:
        """Set the handler of each type of effect. Call it once, before the first event."""
        self._handlers = handlers

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether ``loop`` is that of the sockets; False before `move_to`."""
        return self.has_loop and self.loop is loop

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use ``loop`` from now on. A timer that was set on another loop is dropped, not cancelled."""
        self.loop = loop
        self.has_loop = True
        self._timer = None

    def now(self) -> float:
        """Return the time that the state machine is given: the event loop's, seconds."""
        return self.loop.time()

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform effects in order, and set the timer for the state machine's next `tick`."""
        handlers = self._handlers
        for effect in effects:
            handlers[type(effect)](effect)
        due = self.protocol.next_timer()
        if due is not None and (self._timer is None or self._due > due or self._timer.cancelled()):
            if self._timer is not None:
                self._timer.cancel()
            # `_due` is kept because the handle that uvloop returns for a past time has no `when()`.
            self._timer, self._due = self.loop.call_at(due, self._tick), due

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in a task. An exception that it raises is logged: handlers handle the errors they expect."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected error in the multiplexed door", exc_info=error)

    def _tick(self) -> None:
        self._timer = None
        self.perform(self.protocol.tick(self.now()))

    # -- events of sockets --------------------------------------------------------------------------------------------

    def receive(self, connection: ServerConnection, frame: bytes | str, *, shallow: bool = False) -> None:
        """Called with each frame that arrives, and whether it is known to nest no deeper than an envelope may."""
        self.perform(self.protocol.receive(connection, frame, self.loop.time(), shallow=shallow))

    def frame_discarded(self, connection: ServerConnection, why: FrameTooLarge | Overloaded) -> None:
        """Called when a frame was discarded because it exceeded a bound; the client gets ``why`` as an error."""
        self.perform(self.protocol.frame_discarded(connection, why))

    def drained(self, connection: ServerConnection) -> None:
        """Called when a socket accepts input again after replies were held back."""
        self.perform(self.protocol.drained(connection))

    def disconnect(self, connection: ServerConnection) -> None:
        """Called when a socket is closed."""
        self.perform(self.protocol.disconnect(connection, self.now()))

    def go_away(self, retry_after_s: float) -> None:
        """Send ``goaway`` on all connections and admit no more requests; see `ServerProtocol.go_away`."""
        self.perform(self.protocol.go_away(retry_after_s))

    # -- outcomes of effects ------------------------------------------------------------------------------------------

    def completed(self, request: RunRequest | RecordError, reply: EncodedReply) -> None:
        """Called when the reply or error of a request is committed."""
        effects = self.protocol.completed(request, reply, self.loop.time())
        if effects or reply.type == "closed":  # else the reply joins others that wait to be sent, and no timer is set
            self.perform(effects)

    def rejected(self, request: RunRequest, error: ErrataError) -> None:
        """Called when a request failed without effect and nothing was committed: its id may be used again."""
        self.perform(self.protocol.rejected(request, error))

    def found(self, find: FindSession, stored: Stored) -> None:
        """Attach the session of an ``open`` or ``resume``, which was made or found; see `ServerProtocol.found`."""
        self.perform(self.protocol.found(find, stored, self.now()))

    def find_failed(self, find: FindSession, error: ErrataError) -> None:
        """Send the client the error of an ``open`` or ``resume`` whose session could not be made or found."""
        self.perform(self.protocol.find_failed(find, error, self.now()))

    def replies_read(self, effect: ReadReplies, replies: Sequence[RecordedReply]) -> None:
        """Called with replies that were read from the journal."""
        self.perform(self.protocol.replies_read(effect, replies))

    def pushes_read(self, effect: ReadPushes, pushes: Sequence[tuple[int, bytes]]) -> None:
        """Called with pushes that were read from the journal."""
        self.perform(self.protocol.pushes_read(effect, pushes))

    def read_answered(self, read: AnswerRead, reply: EncodedReply) -> None:
        """Called with the reply to a read."""
        self.perform(self.protocol.read_answered(read, reply))

    def pushed(self, sid: str, seq: int, data: bytes) -> None:
        """Called when a push is committed."""
        self.perform(self.protocol.pushed(sid, seq, data))

    def hibernated(self, hibernate: Hibernate) -> None:
        """Remove a session whose environment is closed from memory; see `ServerProtocol.hibernated`."""
        self.perform(self.protocol.hibernated(hibernate, self.now()))

    def ended(self, sid: str, reason: EndReason) -> None:
        """Called when a session ended for a reason other than its own ``close``."""
        self.perform(self.protocol.ended(sid, reason, self.now()))
