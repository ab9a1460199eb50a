"""`Commit`: a journal commit that a procedure yields and waits for.

A `Committed` is a delivery row that the journal has; only a commit makes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from msgspec import Struct

from ..concurrency.procedures import Done, Operation
from ..journal.base import Record, SessionRow
from ..runtime.rewards import Rewards
from ..runtime.store import Store
from .execution import Executed
from .session import Committed


class Commit(Struct, Operation, eq=False, gc=False):
    """Commits records, all or none; the result are the records. A delivery among them is a `Committed` then.

    Args:
        store: The journal.
        records: Records to commit, in this order.
    """

    store: Store
    records: Sequence[Record]

    def start(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        """Submit the records; see `Operation.start`."""
        self.store.submit(self.records, done, loop)


async def commit_with_rewards(
    rewards: Rewards, session: SessionRow, executed: Executed, before: Sequence[Record]
) -> Committed:
    """Commit a delivery and the step rewards that its environment computed, all or none; see `Rewards.commit`."""
    await rewards.commit(session, executed.rewards, executed.row, before)
    return cast(Committed, executed.row)
