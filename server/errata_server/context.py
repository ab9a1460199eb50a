"""What the server gives to an environment while its factory or a call of it runs (PROTOCOL E1)."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

from .sandbox.base import Backend


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Resources of one session.

    Args:
        sandboxes: The server's sandbox backend, not started: `await sandboxes.start()` is idempotent and raises
            `errata_protocol.errors.SandboxUnavailable` where the machine lacks something.
        seed: Drawn by the server for this session and journaled; use it wherever a reset names no seed.
        log: Logger whose records name the session by a hash of its id.
    """

    sandboxes: Backend
    seed: int
    log: logging.Logger


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
