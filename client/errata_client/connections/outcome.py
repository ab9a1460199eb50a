"""The outcome of a request: its reply or an exception, and how it reaches the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from errata_protocol.errors import ErrataError, LocalProtocolError, NotAttached
from errata_protocol.mux import Replied

from ..wire.frames import wire_error

Outcome = Replied | Exception
Done = Callable[[Outcome], None]


def ignore_outcome(outcome: Outcome) -> None:
    """The callback of a request whose caller no longer waits."""


def resolve(future: asyncio.Future[Any], outcome: Outcome) -> None:
    """Set the result or exception of a future, unless it is done already, e.g. cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def copy_of(error: Exception) -> Exception:
    """Return a copy of an exception: each caller raises its own, because a traceback and notes are added to it.

    A server's error gets the text of OpenEnv's client (`wire_error`). Other exceptions than `ErrataError` and
    `ConnectionError` are returned as they are.
    """
    if not isinstance(error, ErrataError):
        return type(error)(*error.args) if type(error) is ConnectionError else error
    if isinstance(error, LocalProtocolError):
        return LocalProtocolError(error.message, **error.details)
    return wire_error(error.to_wire())


def taken_over_error() -> NotAttached:
    """Return the error for requests of a session that another process took over."""
    return NotAttached("another process took this session over: reattach() takes it back")
