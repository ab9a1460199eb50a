"""What becomes of a request, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from errata_protocol.errors import ErrataError, LocalProtocolError, NotAttached
from errata_protocol.mux import Replied

from .frames import wire_error

Outcome = Replied | Exception
Done = Callable[[Outcome], None]


def nobody(outcome: Outcome) -> None:
    """Stands for a caller that is gone."""


def resolve(future: asyncio.Future[Any], outcome: Outcome) -> None:
    """Tell a caller, if it still waits."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def raised_again(error: Exception) -> Exception:
    """Return an exception of its own for each caller: a traceback and notes belong to one.

    Its text is OpenEnv's for an error frame, which programs search.
    """
    if not isinstance(error, ErrataError):
        return type(error)(*error.args) if type(error) is ConnectionError else error
    if isinstance(error, LocalProtocolError):
        return LocalProtocolError(error.message, **error.details)
    return wire_error(error.to_wire())


def taken() -> NotAttached:
    """Return what a session's owner is told that another process resumed."""
    return NotAttached("another process took this session over: reattach() takes it back")
