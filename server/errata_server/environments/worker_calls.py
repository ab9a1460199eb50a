"""`call_in_worker`: what an environment calls for work whose size an agent or a task author chooses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from ..concurrency.slots import NO_SHARE, Share
from ..workers import DEFAULT, WORKERS, Budget
from .context import current_session

T = TypeVar("T")


async def call_in_worker(
    what: str, function: Callable[..., T], *arguments: Any, budget: Budget = DEFAULT, share: Share | None = None
) -> T:
    """Call a function in a worker process, in the share of the session whose code runs.

    The wait for a process does not count against the deadline of the session's call. Outside of a session all callers
    have one share.

    Args:
        what: What is worked on, for the message of the error, e.g. ``the patch``.
        function: Function of a module, which depends on its arguments only.
        *arguments: Positional arguments, which are pickled.
        budget: Most CPU time, memory and bytes of the result.
        share: Share of the caller, where that is not the code of a session.

    Raises:
        errata_server.workers.BudgetExceeded: The call exceeded its budget; an `InvalidRequest`.
        errata_server.workers.WorkerFailed: The machine failed.
    """
    while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    if share is None:
        try:
            session = current_session()
        except LookupError:
            share = NO_SHARE
        else:
            share, while_waiting = session.share, session.clock_stopped
    return await WORKERS.call(what, function, *arguments, budget=budget, share=share, while_waiting=while_waiting)
