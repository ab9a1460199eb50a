"""`current_session()`: sandbox backend, seed and logger of the session whose environment code runs (PROTOCOL E1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

from ..concurrency.step_clock import StepClock
from ..sandbox.base import Backend

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class SessionContext:
    """Resources of one session.

    Args:
        sandboxes: The server's sandbox backend, or a function that makes it when it is first asked for.
        seed: Drawn by the server for this session and journaled; use it wherever a reset names no seed.
        log: Logger whose records name the session by a hash of its id.
        monotonic: The server's clock, seconds.

    Attributes:
        clock: Of the session's calls; None until `clock_stopped` was called first.
    """

    __slots__ = ("_monotonic", "_sandboxes", "clock", "log", "seed")

    def __init__(
        self,
        sandboxes: Backend | Callable[[], Backend],
        seed: int,
        log: Log,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sandboxes = sandboxes
        self._monotonic = monotonic
        self.clock: StepClock | None = None
        self.seed = seed
        self.log = log

    def clock_stopped(self) -> AbstractContextManager[None]:
        """Return a context in which the deadline of the call that runs comes no nearer (PROTOCOL D10).

        For waits that are not the agent's doing, such as a queue for a slot that all sessions share. The client waits
        as long as `errata_protocol.environment.EnvironmentSpec.call_timeouts_s` says of the tool.
        """
        if self.clock is None:
            self.clock = StepClock(self._monotonic)
        return self.clock.stopped()

    @property
    def sandboxes(self) -> Backend:
        """The server's sandbox backend, not started: `await sandboxes.start()` is idempotent.

        ``start`` raises `errata_protocol.errors.SandboxUnavailable` where the machine lacks something.
        """
        if not isinstance(self._sandboxes, Backend):
            self._sandboxes = self._sandboxes()
        return self._sandboxes


_current: ContextVar[SessionContext | None] = ContextVar("errata_session", default=None)


def current_session() -> SessionContext:
    """Return the context of the session whose factory or call is running.

    Raises:
        LookupError: Called outside of a session, e.g. by an environment that stock OpenEnv serves.
    """
    context = _current.get()
    if context is None:
        raise LookupError("no Errata session is running here: serve the environment with errata_server.create_app")
    return context
