"""Commits as waits of a procedure. What they return says what the journal has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from errata_protocol.errors import ErrataError

from ..concurrency.procedures import Done, Operation
from ..journal.base import DeliveryRow, Journal, Record, SessionRow
from ..runtime.rewards import Rewards
from .execution import Executed
from .session import Committed


def commit_delivery(journal: Journal, row: DeliveryRow, before: Sequence[Record]) -> Operation:
    """Make a delivery durable, and the records in front of it, all or nothing; the result is the `Committed` row."""
    return _Commit(journal, (*before, row) if before else (row,), cast(Committed, row))


def commit_session(journal: Journal, row: SessionRow) -> Operation:
    """Make the row of a new session durable; the result is the row."""
    return _Commit(journal, (row,), row)


async def commit_with_rewards(
    rewards: Rewards, session: SessionRow, executed: Executed, before: Sequence[Record]
) -> Committed:
    """Commit a delivery and the rewards that its environment computed, all or nothing; see `Rewards.commit`."""
    await rewards.commit(session, executed.rewards, executed.row, before)
    return cast(Committed, executed.row)


class _Commit(Operation):
    __slots__ = ("_done", "_journal", "_records", "_result")

    _done: Done

    def __init__(self, journal: Journal, records: Sequence[Record], result: object) -> None:
        self._journal = journal
        self._records = records
        self._result = result

    def start(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        self._done = done
        self._journal.submit(self._records, self._settled, loop)

    def _settled(self, error: ErrataError | None) -> None:
        self._done(self._result, error)
