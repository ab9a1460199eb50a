"""Grading slots: how many submissions of one server are graded at a time."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cache

from errata_os.division import own_division
from errata_server.concurrency.slots import Slots
from errata_server.environments.context import current_session


def grading_slot(limit: int) -> AbstractAsyncContextManager[None]:
    """Return a context manager that holds a grading slot; principals, and the sessions of each, take turns.

    Waiting for it does not count against the call's deadline.

    Args:
        limit: Slots of the server; 0 gives one for each CPU. Where several processes are the server, each has a part.
    """
    slots = _slots(own_division().share(limit or os.cpu_count() or 1))
    try:
        session = current_session()
    except LookupError:  # outside of a server there is no deadline
        return slots.take(nullcontext)
    return slots.take(session.clock_stopped, session.share)


@cache
def _slots(limit: int) -> Slots:
    return Slots(limit)
