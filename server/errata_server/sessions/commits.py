"""Commits as waits of a procedure. What they return says what the journal has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from errata_protocol.errors import ErrataError

from ..concurrency.procedures import Done, Operation
from ..journal.base import DeliveryRow, Record, SessionRow
from ..runtime.rewards import Rewards
from ..runtime.store import Store
from .execution import Executed
from .session import Committed


def commit_delivery(store: Store, row: DeliveryRow, before: Sequence[Record]) -> Operation:
    """Make a delivery durable, and the records in front of it, all or nothing; the result is the `Committed` row."""
    return _Commit(store, (*before, row) if before else (row,), cast(Committed, row))


def commit_session(store: Store, row: SessionRow) -> Operation:
    """Make the row of a new session durable; the result is the row."""
    return _Commit(store, (row,), row)


async def commit_with_rewards(
    rewards: Rewards, session: SessionRow, executed: Executed, before: Sequence[Record]
) -> Committed:
    """Commit a delivery and the rewards that its environment computed, all or nothing; see `Rewards.commit`."""
    await rewards.commit(session, executed.rewards, executed.row, before)
    return cast(Committed, executed.row)


class _Commit(Operation):
    __slots__ = ("_done", "_records", "_result", "_store")

    _done: Done

    def __init__(self, store: Store, records: Sequence[Record], result: object) -> None:
        self._store = store
        self._records = records
        self._result = result

    def start(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        self._done = done
        self._store.submit(self._records, self._settled, loop)

    def _settled(self, error: ErrataError | None) -> None:
        self._done(self._result, error)
