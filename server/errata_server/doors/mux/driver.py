"""`ProtocolDriver`: runs the mux state machine on an event loop: feeds it, performs its effects, runs its timer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from errata_protocol.errors import ErrataError, FrameTooLarge, Overloaded
from errata_protocol.mux import (
    Effect,
    Find,
    Hibernate,
    Read,
    Recall,
    RecallPushes,
    Record,
    Recorded,
    Reply,
    Run,
    ServerConfig,
    ServerConnection,
    ServerProtocol,
    Stored,
)
from errata_protocol.mux.records import EndReason

log = logging.getLogger("errata.mux")

PREFIX = "mux."
"""Stands before a sid in the journal; a sid cannot hold a dot, and neither can the id of a plain session."""


def journal_sid(sid: str) -> str:
    """Return the session id under which a multiplexed session is journaled."""
    return PREFIX + sid


def wire_sid(sid: str) -> str:
    """Return the sid of a multiplexed session that is journaled as ``sid``."""
    return sid.removeprefix(PREFIX)


class SocketHandle(Protocol):
    """What the driver and its handlers use of a socket: the ``handle`` of a `ServerConnection`."""

    reads: asyncio.Semaphore
    """Bounds the reads of one socket that run together."""

    def wake(self) -> None:
        """Called when the connection has data to send."""

    async def writable(self) -> None:
        """Return when the socket takes more data, or is closed."""


class ProtocolDriver:
    """Feeds the state machine and performs the effects that it returns.

    Each method named as one of `ServerProtocol` passes an event or an outcome to the machine and performs the effects.
    Everything happens on one event loop, the one of the sockets.

    Args:
        config: Of the machine.

    Attributes:
        protocol: The machine, for what has no effects.
        has_loop: `move_to` was called.
        loop: The event loop of the sockets, once `has_loop`.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, config: ServerConfig) -> None:
        self.protocol = ServerProtocol(config)
        self._handlers: Mapping[type, Callable[[Any], None]] = {}
        self.has_loop = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def handle_with(self, handlers: Mapping[type, Callable[[Any], None]]) -> None:
        """Perform an effect by the handler of its type. Called once, before the first event."""
        self._handlers = handlers

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether ``loop`` is the one of the sockets."""
        return self.has_loop and self.loop is loop

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run on ``loop`` from now on."""
        self.loop = loop
        self.has_loop = True
        self._timer = None

    def now(self) -> float:
        """Return the machine's time, which is the event loop's."""
        return self.loop.time()

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform effects in their order, and set the timer for the machine's next `tick`."""
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
        """Run ``work`` in a task; an exception that it raises is a defect of ours, and logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a defect of the multiplexed door", exc_info=error)

    def _tick(self) -> None:
        self._timer = None
        self.perform(self.protocol.tick(self.now()))

    # -- events of sockets --------------------------------------------------------------------------------------------

    def receive(self, connection: ServerConnection, frame: bytes | str) -> None:
        """Called with each frame that arrives."""
        self.perform(self.protocol.receive(connection, frame, self.now()))

    def unread(self, connection: ServerConnection, why: FrameTooLarge | Overloaded) -> None:
        """Called when a frame arrived that was not kept; the client gets ``why`` as an error."""
        self.perform(self.protocol.unread(connection, why))

    def drained(self, connection: ServerConnection) -> None:
        """Called when a socket can take replies that were held back."""
        self.perform(self.protocol.drained(connection))

    def disconnect(self, connection: ServerConnection) -> None:
        """Called when a socket is closed."""
        self.perform(self.protocol.disconnect(connection, self.now()))

    def go_away(self, retry_after_s: float) -> None:
        """Called when the server stops: clients are asked to connect again after ``retry_after_s``."""
        self.perform(self.protocol.go_away(retry_after_s))

    # -- outcomes of effects ------------------------------------------------------------------------------------------

    def completed(self, request: Run | Record, reply: Reply) -> None:
        """Called when the reply to a request is committed."""
        self.perform(self.protocol.completed(request, reply, self.now()))

    def rejected(self, request: Run, error: ErrataError) -> None:
        """Called when a request had no effect and its id may be used again."""
        self.perform(self.protocol.rejected(request, error))

    def found(self, find: Find, stored: Stored) -> None:
        """Called when a session was opened, or found in the journal."""
        self.perform(self.protocol.found(find, stored, self.now()))

    def refused(self, find: Find, error: ErrataError) -> None:
        """Called when a session cannot be opened, or does not exist for its client."""
        self.perform(self.protocol.refused(find, error, self.now()))

    def recalled(self, recall: Recall, replies: Sequence[Recorded]) -> None:
        """Called with replies that were read from the journal."""
        self.perform(self.protocol.recalled(recall, replies))

    def pushes_recalled(self, recall: RecallPushes, pushes: Sequence[tuple[int, bytes]]) -> None:
        """Called with pushes that were read from the journal."""
        self.perform(self.protocol.pushes_recalled(recall, pushes))

    def answered(self, read: Read, reply: Reply) -> None:
        """Called with the reply to a read."""
        self.perform(self.protocol.answered(read, reply))

    def pushed(self, sid: str, seq: int, data: bytes) -> None:
        """Called when a push is committed."""
        self.perform(self.protocol.pushed(sid, seq, data))

    def slept(self, hibernate: Hibernate) -> None:
        """Called when the environment of a session is closed and its row is all that is left."""
        self.perform(self.protocol.slept(hibernate, self.now()))

    def ended(self, sid: str, reason: EndReason) -> None:
        """Called when a session is over."""
        self.perform(self.protocol.ended(sid, reason, self.now()))
