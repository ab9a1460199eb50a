"""`MuxShell`: drives the mux state machine: performs its effects, runs its timer and background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from errata_protocol.mux import Effect, ServerConfig, ServerProtocol, ServerSession
from errata_protocol.mux.records import EndReason
from errata_protocol.mux.state import State

from ...sessions.session import Session
from ...sessions.sessions import Sessions

log = logging.getLogger("errata.mux")

PREFIX = "mux."
"""Stands before a sid in the journal; a sid cannot hold a dot, and neither can the id of a plain session."""


def journal_sid(sid: str) -> str:
    """Return the session id under which a multiplexed session is journaled."""
    return PREFIX + sid


class Door(Protocol):
    """What the shell knows of a socket: the handle of its `ServerConnection`."""

    reading: asyncio.Semaphore
    """Reads that are looked up together."""

    def wake(self) -> None:
        """There is something to send."""

    async def room(self) -> None:
        """Return when the socket takes more, or is gone."""


class MuxShell:
    """Feeds the machine and performs what it asks for.

    Args:
        sessions: The environment's sessions.
        production: No state(t), no fork (PROTOCOL F1).

    Attributes:
        perform: What performs an effect, by its type.
        idle: Sessions that no socket speaks for, by sid, in the order of their detaching; of some it is not true any
            more.
    """

    def __init__(self, sessions: Sessions, *, production: bool) -> None:
        self.sessions = sessions
        self.runtime = sessions.runtime
        self.protocol = ServerProtocol(ServerConfig(limits=self.runtime.settings.limits, production=production))
        self.perform: dict[type, Callable[[Any], None]] = {}
        self.idle: OrderedDict[str, Session] = OrderedDict()
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment] # `move_to` comes before any use
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def now(self) -> float:
        """Return the machine's time: the event loop's."""
        return self.loop.time()

    def do(self, effects: Sequence[Effect]) -> None:
        """Perform effects, in their order."""
        perform = self.perform
        for effect in effects:
            perform[type(effect)](effect)
        due = self.protocol.next_timer()
        if due is not None and (self._timer is None or self._due > due or self._timer.cancelled()):
            if self._timer is not None:
                self._timer.cancel()
            # Its `when()` is not asked: what uvloop returns for a time that has passed has none.
            self._timer, self._due = self.loop.call_at(due, self._tick), due

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take that everything happens on ``loop`` from now on."""
        self.loop = loop
        self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self.do(self.protocol.tick(self.now()))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` to its end; what it raises is a defect, and logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a defect of the multiplexed door", exc_info=error)

    def end(self, sid: str, reason: EndReason) -> None:
        """Tell the machine that a session is over."""
        self.idle.pop(sid, None)
        self.do(self.protocol.ended(sid, reason, self.now()))

    def let_go(self, mine: ServerSession, reason: EndReason) -> None:
        """End a session that a request or a read found over; its row says what became of it, or is told now."""
        if self.protocol.session(mine.sid) is mine:
            self.end(mine.sid, reason)
        self.spawn(self.sessions.lifetime.close(mine.handle, status=reason))

    def keep_idle(self, mine: ServerSession) -> None:
        """Take that no socket speaks for a session: it may make room for others, and ends in time as upstream's do."""
        self.idle[mine.sid] = mine.handle
        self.idle.move_to_end(mine.sid)
        if self.sessions.lifetime.session_timeout_s is not None:
            self.loop.call_later(self.sessions.lifetime.session_timeout_s, self._expire, mine, mine.detached_at)

    def _expire(self, mine: ServerSession, since: float) -> None:
        if mine.state is State.DETACHED and mine.detached_at == since and not mine.queue:
            self.spawn(self._end_expired(mine))

    async def _end_expired(self, mine: ServerSession) -> None:
        await self.sessions.lifetime.close(mine.handle, status="expired")
        self.end(mine.sid, "expired")
