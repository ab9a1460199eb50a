"""`Opening`: opens a session: checks capacity, creates the instance, commits the row if the session is resumable.

`Opening.open` is a procedure (`errata_server.concurrency.procedures`): if there is capacity, it waits only for the
environment's factory and for the commit, and needs no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from errata_protocol.errors import Conflict
from errata_protocol.labels import NO_LABELS, Labels

from ..concurrency.owned_tasks import OwnedTasks
from ..concurrency.procedures import Procedure
from ..journal.base import SessionRow, label_fields
from ..runtime.capacity import Capacity
from ..runtime.runtime import Runtime
from .commits import Commit
from .instances import InstanceLoader
from .lifetime import Lifetime
from .session import Address, Session
from .table import SessionTable


class Opening:
    """Opens the sessions of one environment.

    Args:
        runtime: Journal, clock and ids.
        environment: Name under which sessions are journaled.
        instances: Creates their instances.
        table: Registers a session before its instance is created.
        lifetime: Evicts other sessions when the capacity is full.
        tasks: Runs the deletion of old episodes.
        retention: Called at each open; returns a coroutine that deletes old episodes, or None.
    """

    def __init__(
        self,
        runtime: Runtime,
        environment: str,
        instances: InstanceLoader,
        table: SessionTable,
        lifetime: Lifetime,
        tasks: OwnedTasks,
        retention: Callable[[], Coroutine[Any, Any, None] | None],
    ) -> None:
        self._runtime = runtime
        self._environment = environment
        self._instances = instances
        self._table = table
        self._lifetime = lifetime
        self._tasks = tasks
        self._retention = retention

    def open(
        self,
        *,
        resumable: bool = False,
        principal: str | None = None,
        capacity: Capacity | None = None,
        address: Address | None = None,
        labels: Labels = NO_LABELS,
    ) -> Procedure[Session]:
        """Open a session; see `Sessions.open`."""
        if not self._runtime.started:
            yield self._runtime.start()
        if (deletion := self._retention()) is not None:
            self._tasks.start(deletion)
        row = self.new_row(
            resumable=resumable or address is not None, principal=principal, address=address, labels=labels
        )
        session = Session(row, committed=False, capacity=capacity or self._lifetime.share_of(principal))
        if row.sid not in self._table.live and session.capacity.full:
            yield self._lifetime.ensure_capacity(session.capacity)
        if row.sid in self._table.live:
            raise Conflict("a session of this id is there already")
        session.opening = True  # before the factory runs, so that the session counts in the capacity
        self._table.live[row.sid] = session
        try:
            host = session.host = yield from self._instances.create(session)
            self._instances.recovery = host.recovery  # a factory function shows it with its first instance
            session.row = replace(session.row, recovery=host.recovery.name)
            if row.given_out:
                yield from self.commit(session)
        except (Exception, asyncio.CancelledError):
            self._table.forget(session)
            failed, session.host = session.host, None
            session.opening = False  # no longer counts in the capacity
            if failed is not None:
                yield failed.close()
            raise
        session.opening = False
        self._runtime.metrics.opened(self._environment)
        return session

    def commit(self, session: Session) -> Procedure[None]:
        """Commit the row of a session for the first time."""
        if self._runtime.store.trouble() is not None:
            yield self._runtime.store.wait_until_writable()
        yield Commit(self._runtime.store, (session.row,))
        session.committed = True

    def new_row(
        self,
        *,
        resumable: bool = False,
        principal: str | None = None,
        address: Address | None = None,
        labels: Labels = NO_LABELS,
    ) -> SessionRow:
        """Return the row of a session that does not exist yet."""
        return SessionRow(
            sid=self._runtime.ids.session() if address is None else address.sid,
            environment=self._environment,
            recovery=self._instances.recovery.name,
            seed=self._runtime.ids.seed(),
            created=self._runtime.clock.time(),
            given_out=resumable,
            principal=principal,
            key_hash=address.key_hash if address is not None else None,
            group=address.group if address is not None else None,
            **label_fields(labels),
        )
