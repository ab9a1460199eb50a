"""`current_session()`: sandbox backend, seed and logger of the session whose environment code runs (PROTOCOL E1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

from ..concurrency.slots import NO_SHARE, Share
from ..concurrency.step_clock import StepClock
from ..sandbox.base import Backend

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class SessionContext:
    """Resources of one session.

    Args:
        sandboxes: The server's sandbox backend, or a function that creates it at first use.
        seed: Seed that the server drew for this session and journaled; to be used where a reset names none.
        log: Logger whose records name the session by a hash of its id.
        monotonic: Monotonic clock of the server, seconds.
        share: Principal and session of the caller, between which the resources that all sessions use are divided.

    Attributes:
        clock: Clock of the session's calls; None until `clock_stopped` is called for the first time.
    """

    __slots__ = ("_monotonic", "_sandboxes", "clock", "log", "seed", "share")

    def __init__(
        self,
        sandboxes: Backend | Callable[[], Backend],
        seed: int,
        log: Log,
        monotonic: Callable[[], float] = time.monotonic,
        share: Share = NO_SHARE,
    ) -> None:
        self._sandboxes = sandboxes
        self._monotonic = monotonic
        self.share = share
        self.clock: StepClock | None = None
        self.seed = seed
        self.log = log

    def clock_stopped(self) -> AbstractContextManager[None]:
        """Return a context manager in which time does not count against the deadline of the running call (PROTOCOL
        D10).

        For waits that the agent does not cause, such as a queue for a slot that all sessions share. The client waits as
        long as `errata_protocol.environment.EnvironmentSpec.call_timeouts_s` says for the tool.
        """
        if self.clock is None:
            self.clock = StepClock(self._monotonic)
        return self.clock.stopped()

    @property
    def sandboxes(self) -> Backend:
        """The server's sandbox backend. It may not be started yet: call ``await sandboxes.start()``, which is
        idempotent.

        ``start`` raises `errata_protocol.errors.SandboxUnavailable` if the machine cannot run sandboxes.
        """
        if not isinstance(self._sandboxes, Backend):
            self._sandboxes = self._sandboxes()
        return self._sandboxes


_current: ContextVar[SessionContext | None] = ContextVar("errata_session", default=None)


def current_session() -> SessionContext:
    """Return the context of the session whose factory or call is running.

    Raises:
        LookupError: There is no session, for example because stock OpenEnv serves the environment.
    """
    context = _current.get()
    if context is None:
        raise LookupError("no Errata session is running here: serve the environment with errata_server.create_app")
    return context
