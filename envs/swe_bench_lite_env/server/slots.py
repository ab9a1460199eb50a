"""Grading slots: how many submissions of one server are graded at a time."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache

from errata_server.concurrency.slots import Slots
from errata_server.environments.context import current_session


def grading_slot(limit: int) -> AbstractAsyncContextManager[None]:
    """Return a context manager that holds a grading slot. Waiting for it does not count against the call's deadline.

    Args:
        limit: Slots of this process; 0 gives one for each CPU.
    """
    try:
        while_waiting = current_session().clock_stopped
    except LookupError:  # outside of a server there is no deadline
        while_waiting = nullcontext
    return _slots(limit or os.cpu_count() or 1).take(while_waiting)


@cache
def _slots(limit: int) -> Slots:
    return Slots(limit)
