"""The fast path of an open, by callbacks: it waits for nothing but the environment's factory and the commit.

For multiplexed sessions, which are opened by the thousand; `Sessions.open` is the way that can wait for room and for
the runtime to start. Only an environment with an MCP session gets a task, in which that is connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from msgspec.structs import replace

from errata_protocol.environment import Recovery
from errata_protocol.errors import ErrataError

from ..concurrency.calls import Call, ThreadGone
from ..concurrency.deadlines import Deadlines
from ..environments.host import EnvHost
from ..runtime.runtime import Runtime
from .instances import Waker
from .session import Session

Opened = Callable[[Session | None, Exception | None], None]
"""Told once, on the event loop: the committed session, or why there is none."""


class Opener(Protocol):
    """What an opening session needs of `sessions.Sessions`.

    Attributes:
        runtime: Settings, journal and metrics.
        environment: Name for the metrics.
        waker: Makes instances.
        recovery: Recovery class of the environment, as far as it is known.
    """

    runtime: Runtime
    environment: str
    waker: Waker
    recovery: Recovery

    def deadlines(self, loop: asyncio.AbstractEventLoop) -> Deadlines:
        """Return the deadlines of an event loop."""
        ...

    def own(self, work: Coroutine[Any, Any, Any]) -> object:
        """Run work that nobody waits for."""
        ...

    def forget(self, session: Session) -> None:
        """Take a session that did not open out of the table."""
        ...


class Opening(Call):
    """One session on its way; the call of its environment's factory.

    Args:
        sessions: Where it will be.
        session: Not committed; its place is taken.
        opened: Told the outcome.
        loop: The one that runs.
    """

    __slots__ = ("_context", "_deadline", "_opened", "_over", "_place", "_session", "_sessions")

    def __init__(self, sessions: Opener, session: Session, opened: Opened, loop: asyncio.AbstractEventLoop) -> None:
        self._sessions = sessions
        self._session = session
        self._opened = opened
        self._over = False
        self._deadline: Any = None
        waker = sessions.waker
        self._context = waker.context(session)
        self.prepare(waker.bound_factory(self._context), loop)
        self._place = waker.place()

    def depart(self) -> None:
        """Begin.

        Raises:
            ThreadGone: The thread was given up meanwhile.
        """
        try:
            self._place.start(self)
        except ThreadGone:
            self._place.release()
            raise
        settings = self._sessions.runtime.settings
        self._deadline = self._sessions.deadlines(self.loop).add(settings.step_timeout_s, self, self.loop.time())

    def resolve(self) -> None:
        """Take what the factory returned."""
        if self._over:
            return
        self._over = True
        self._sessions.deadlines(self.loop).remove(self, self._deadline)
        self._place.ended()
        session, sessions = self._session, self._sessions
        try:
            if self.error is not None:
                raise self.error
            host = sessions.waker.host(self.result, self._context, self._place)
        except Exception as error:
            self._place.release()
            self._fail(error if isinstance(error, ErrataError) else self._told(error))
            return
        self.result = None
        if host.wants_mcp:
            sessions.own(self._connect(host))
        else:
            self._journal(session, host)

    async def _connect(self, host: EnvHost) -> None:
        try:
            await host.connect_mcp(self._sessions.runtime.settings.step_timeout_s)
        except Exception as error:
            await host.close()
            self._fail(error)
        else:
            self._journal(self._session, host)

    def _journal(self, session: Session, host: EnvHost) -> None:
        session.host = host
        if host.recovery is not self._sessions.recovery:
            self._sessions.recovery = host.recovery  # a factory function told nothing before its first call
        session.row = replace(session.row, recovery=host.recovery)
        try:
            self._sessions.runtime.journal.submit((session.row,), self._committed, self.loop)
        except ErrataError as error:
            self._committed(error)

    def _committed(self, error: ErrataError | None) -> None:
        if error is not None:
            host, self._session.host = self._session.host, None
            if host is not None:
                self._sessions.own(host.close())
            self._fail(error)
            return
        self._session.committed = True
        self._session.opening = False
        self._sessions.runtime.metrics.opened(self._sessions.environment)
        self._opened(self._session, None)

    def expire(self) -> None:
        """Take that the factory ran too long."""
        abandoned = None if self._over else self.give_up()
        if abandoned is None:
            return  # it has just ended, and its result is on the way
        self._over = True
        self._place.release()
        self._fail(self._told(abandoned))

    def _told(self, error: Exception) -> ErrataError:
        told = self._sessions.waker.factory_failed(error, self._sessions.runtime.settings.step_timeout_s)
        told.__cause__ = error
        return told

    def _fail(self, error: Exception) -> None:
        self._sessions.forget(self._session)
        self._session.opening = False
        self._opened(None, error)


__all__ = ["Opened", "Opening"]
