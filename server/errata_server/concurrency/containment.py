"""Turns what an environment's code raises into exceptions that end one call: SystemExit would end the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from errata_protocol.exception_text import named_text_of

P = ParamSpec("P")
T = TypeVar("T")


def contained(error: BaseException) -> Exception:
    """Return an exception that ends no more than the call in which ``error`` was raised.

    SystemExit, KeyboardInterrupt and others that would end a thread, a coroutine or the event loop are wrapped in
    RuntimeError.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"it raised {named_text_of(error)}")
    wrapped.__cause__ = error
    return wrapped


def is_ending(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Return whether ``error`` ends ``task`` from outside: it was cancelled, or its event loop is gone.

    An environment's code can raise CancelledError and GeneratorExit, too.
    """
    if not isinstance(error, asyncio.CancelledError | GeneratorExit) or task is None:
        return False
    try:
        return asyncio.current_task() is not task or task.cancelling() > 0
    except RuntimeError:  # no event loop runs
        return True


def calling(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that runs an environment's code on the event loop, as its properties; raise what `contained`
    returns."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        failure = contained(error)
    raise failure
