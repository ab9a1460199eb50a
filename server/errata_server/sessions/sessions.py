"""`Sessions`: opens, finds, runs and closes the sessions of one environment; every door calls it.

A session is *awake* (it has an environment instance), *dormant* (a journal row and perhaps a sandbox directory; the
next request restores it to its last committed delivery) or over. A mutating request runs, its snapshot is taken, the
row is committed, and only then is the reply created.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace
from openenv.core.env_server.types import ConcurrencyConfig

from errata_protocol.errors import SessionLost, SessionUnknown
from errata_protocol.labels import NO_LABELS, Labels

from ..concurrency.owned_tasks import OwnedTasks
from ..concurrency.procedures import run, start
from ..environments.declarations import Declared
from ..environments.host import EnvHost
from ..environments.placement import EnvironmentFactory
from ..journal.base import DeliveryRow, SessionChange, SessionRow, SessionStatus
from ..recovery import RecoveryClass
from ..runtime.capacity import Capacity
from ..runtime.runtime import Runtime
from .decoding import Decoder
from .delivery import Delivery
from .execution import Execution
from .instances import InstanceLoader
from .lifetime import DetachedElsewhere, Lifetime
from .opening import Opening
from .reexecution import Reexecution
from .session import Address, Committed, Reply, Request, Session
from .table import SessionTable

log = logging.getLogger("errata.sessions")

C = TypeVar("C")
T = TypeVar("T")


class Sessions:
    """All sessions of one environment.

    Args:
        runtime: Shared journal, sandboxes, clock and ids.
        factory: Creates an environment instance.
        environment: Name under which sessions are journaled.
        concurrency: Upstream's limits of instances and of session time.
        agent_text_version: Journaled with each episode.
        declared: Declarations about the environment beside its code.
        decoder: Decodes journaled requests; None disables recovery by re-execution.
        retention: Called at each open; returns a coroutine that deletes old episodes, or None.
        multiplexed: The detached sessions of multiplexed sockets; None without such a door.

    Attributes:
        table: The sessions that are in memory.
        lifetime: Attaches and detaches sockets; hibernates and closes sessions.
        tasks: Runs work that must go on when its caller is cancelled.
        capacity: Limit and current number of instances.
    """

    def __init__(
        self,
        runtime: Runtime,
        factory: EnvironmentFactory,
        environment: str,
        concurrency: ConcurrencyConfig,
        *,
        agent_text_version: str | None = None,
        declared: Declared | None = None,
        decoder: Decoder | None = None,
        retention: Callable[[], Coroutine[Any, Any, None] | None] = lambda: None,
        multiplexed: DetachedElsewhere | None = None,
    ) -> None:
        self.runtime = runtime
        self.environment = environment
        self.table = SessionTable()
        self.tasks = OwnedTasks()
        limit, fleet = concurrency.max_concurrent_envs, runtime.fleet
        self.capacity = Capacity(limit) if fleet is None else fleet.capacity(environment, limit)
        self.lifetime = Lifetime(
            runtime,
            environment,
            factory,
            self.capacity,
            self.table,
            self.tasks,
            concurrency.session_timeout,
            multiplexed,
        )
        declared = declared or Declared()
        execution = Execution(runtime, declared)
        self._instances = InstanceLoader(
            runtime,
            factory,
            Reexecution(runtime, execution, decoder) if decoder is not None else None,
            deterministic=declared.deterministic,
            snapshots=not declared.sandboxed or runtime.sandbox.snapshots_each_step,
        )
        self._delivery = Delivery(
            runtime, self._instances, execution, environment, agent_text_version, self._ensure_capacity
        )
        self._opening = Opening(runtime, environment, self._instances, self.table, self.lifetime, self.tasks, retention)
        runtime.attached.known = True
        runtime.metrics.watch(environment, lambda: self.capacity.used, self.lifetime.detached)

    @property
    def recovery(self) -> RecoveryClass:
        """Recovery class of the environment, as known so far; see `InstanceLoader`."""
        return self._instances.recovery

    # -- opening and finding --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[EnvHost]:
        """Yield an instance without a session; it is not counted or journaled, and is closed afterwards.

        Raises:
            EnvironmentFailed: The factory failed.
        """
        await self.runtime.start()
        session = Session(self._opening.new_row(), committed=False, capacity=Capacity(None))
        host = await run(self._instances.create(session))
        try:
            yield host
        finally:
            await host.close()

    async def open(
        self,
        *,
        resumable: bool = False,
        principal: str | None = None,
        capacity: Capacity | None = None,
        address: Address | None = None,
        labels: Labels = NO_LABELS,
    ) -> Session:
        """Open a session with its own environment instance.

        Args:
            resumable: Whether the client learns the session's id (it is *given out*, PROTOCOL A3), so that the session
                outlives its socket and the client can attach to it again.
            principal: Owner of the session.
            capacity: Capacity that counts its instance; None for that of the environment and the principal.
            address: Id and key of a multiplexed session, which is always resumable.
            labels: Labels of its episodes, unless their resets have others.

        Raises:
            Conflict: A session with that id exists.
            CapacityReached: The capacity is full, and no detached session can be evicted.
            EnvironmentFailed: The factory failed.
        """
        opening = self._opening.open(
            resumable=resumable, principal=principal, capacity=capacity, address=address, labels=labels
        )
        return await run(opening)

    def begin_open(
        self,
        address: Address,
        principal: str | None,
        opened: Callable[[C, Session | None, Exception | None], None],
        caller: C,
        loop: asyncio.AbstractEventLoop,
        *,
        labels: Labels = NO_LABELS,
    ) -> None:
        """Open a multiplexed session as `open` does; uses a task only if needed.

        Args:
            address: The session's id and key.
            principal: Owner of the session.
            opened: Called once, on the event loop, with ``caller`` and the session, or with ``caller``, None and the
                error.
            caller: First argument of ``opened``.
            loop: The running event loop.
            labels: Labels of its episodes, unless their resets have others.
        """
        start(
            self._opening.open(principal=principal, address=address, labels=labels),
            opened,
            caller,
            loop,
            self.tasks.start,
        )

    async def _ensure_capacity(self, session: Session) -> None:
        """Keep a dormant session in memory, and evict others until its instance is within the limits.

        Raises:
            CapacityReached: A limit is reached, and no detached session can be evicted.
        """
        self.table.hold(session)
        await self.lifetime.ensure_capacity(session.capacity)

    async def find(self, sid: str, principal: str | None = None) -> Session:
        """Return a resumable session from memory or the journal; its environment is restored at the next request.

        Args:
            sid: Id of the session.
            principal: Owner of the session.

        Raises:
            Misdirected: ``sid`` names another data directory.
            SessionUnknown: The session does not exist, is closed, or has another owner.
            SessionLost: The session is lost.
        """
        self.runtime.store.check_shard(sid)
        await self.runtime.start()
        session = self.table.get(sid)
        if session is None or session.row.principal != principal:  # another owner's takes as long as an unknown one
            session = await self._find_dormant(sid, principal)
        if not session.resumable or session.closed or session.multiplexed:
            raise SessionUnknown(f"Unknown session_id: {sid}")
        if session.lost is not None:
            raise SessionLost(session.lost, eid=session.eid, t=session.t)
        return session

    async def _find_dormant(self, sid: str, principal: str | None) -> Session:
        def is_callers(row: SessionRow) -> bool:
            return row.environment == self.environment and row.principal == principal

        row, last = await self._stored(sid, is_callers)
        if (
            row is None
            or not is_callers(row)
            or row.status in ("closed", "expired")
            or not row.given_out
            or row.key_hash
        ):
            raise SessionUnknown(f"Unknown session_id: {sid}")
        return self.dormant(row, last)

    async def _stored(
        self, sid: str, wanted: Callable[[SessionRow], bool]
    ) -> tuple[SessionRow | None, DeliveryRow | None]:
        """Return the current row of a session, and its last delivery if ``wanted(row)``; each None if missing."""
        while True:
            with self.table.search({sid}) as outdated:
                row = await self.runtime.store.session(sid)
                is_wanted = row is not None and wanted(row)
                last = await self.runtime.store.last_delivery(sid) if is_wanted else None
            if not outdated:
                return row, last

    def dormant(self, row: SessionRow, last: DeliveryRow | None) -> Session:
        """Return the session of a journal row: the one in memory, or else a new dormant one.

        Args:
            row: The journal row.
            last: The session's last delivery; None if it has none.
        """
        existing = self.table.get(row.sid)
        if existing is not None and existing.is_of(row):  # another request loaded it during the read
            return existing  # else it is being opened under the same sid, and its commit will fail
        session = Session(row, committed=True, capacity=self.lifetime.share_of(row.principal))
        if last is not None:
            session.eid, session.t = last.eid, last.t
        if row.status == "lost":
            session.lost = session.lost_message(row.lost or "it ended with its server")
        elif session.multiplexed:
            self.table.live[row.sid] = session
        else:
            self.table.asleep[row.sid] = session
        return session

    async def make_resumable(self, session: Session) -> None:
        """Make a session outlive its socket, because a client gets to know its id; commit that. Idempotent."""
        if not session.resumable:
            if session.committed:
                await self.runtime.store.commit(SessionChange(session.sid, given_out=True))
            else:
                session.row = replace(session.row, given_out=True)
                await run(self._opening.commit(session))
            session.resumable = True

    async def evict_for(self, capacity: Capacity) -> bool:
        """Evict the longest detached session that counts in ``capacity``; return whether there was one."""
        return await self.lifetime.evict_oldest(capacity)

    async def end(self, sid: str, status: SessionStatus = "closed") -> bool:
        """Close a session of this environment; return False if the environment has none with this id.

        Args:
            sid: Id of the session.
            status: Final status to journal.
        """
        session = self.table.get(sid)
        if session is None or not session.committed:  # if being opened, its commit may fail because the sid exists
            row, last = await self._stored(sid, lambda row: row.environment == self.environment)
            if row is None or row.environment != self.environment:
                return False
            if row.status != "open":
                return True
            session = self.dormant(row, last)  # so that a concurrent lookup finds the session that is being closed
        await self.lifetime.close(session, status=status)
        return True

    async def close_all(self, grace_s: float = 10.0) -> None:
        """Shut down: wait for running requests to commit, then close every environment. Resumable sessions stay open.

        Args:
            grace_s: Seconds to wait for running requests, and again for closing. Uncommitted requests have no effect.
        """
        sessions = list(self.table.live.values())
        busy = {asyncio.ensure_future(_idle(session)) for session in sessions if session.lock.busy}
        if busy:
            _, running = await asyncio.wait(busy, timeout=grace_s)
            for wait in running:
                wait.cancel()
        closing = {asyncio.ensure_future(self._shut(session)) for session in list(self.table.live.values())}
        if closing:
            _, hanging = await asyncio.wait(closing, timeout=grace_s)
            for close in hanging:
                close.cancel()
            if hanging:
                log.warning("%d environments did not close within %g s and were left behind", len(hanging), grace_s)
        for session in list(self.table.live.values()):
            self.table.forget(session)

    async def _shut(self, session: Session) -> None:
        if session.lock.busy:
            if session.host is not None:
                session.host.abandon()
        elif session.resumable:
            async with session.lock as held:
                host = session.take_host(held)
                if host is not None:
                    await host.close()
        else:
            await self.lifetime.close(session)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def admit(self, session: Session, request: Request, socket: object | None = None) -> Reply:
        """Run one mutating request, commit it, and return its reply.

        The request runs to its commit even if the caller is cancelled.

        Args:
            session: The session.
            request: The request.
            socket: Socket that received the request, None for HTTP. The request is refused if the session is attached
                to another socket by then.

        Raises:
            ErrataError: The request failed. The session is then at its last commit; the state of an environment that
                cannot be restored is as the environment left it.
        """
        return await asyncio.shield(self.tasks.start(self.run(session, request, socket)))

    async def run(self, session: Session, request: Request, socket: object | None = None) -> Reply:
        """Run a request as `admit` does, without protection from cancellation: for callers in a task of `tasks`."""
        return Reply.of(await self.committed(session, request, socket))

    async def committed(self, session: Session, request: Request, socket: object | None = None) -> Committed:
        """Run a request as `run` does, and return its committed row."""
        return await run(self._delivery.deliver(session, request, socket, asyncio.get_running_loop()))

    def begin(
        self,
        session: Session,
        request: Request,
        settled: Callable[[C, Committed | None, Exception | None], None],
        caller: C,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Run a request as `admit` does; uses a task only if needed.

        Args:
            session: The session.
            request: The request.
            settled: Called once, on the event loop, with ``caller`` and the committed delivery, or with ``caller``,
                None and the error.
            caller: First argument of ``settled``.
            loop: The running event loop.
        """
        start(self._delivery.deliver(session, request, None, loop), settled, caller, loop, self.tasks.start)

    async def state(self, session: Session) -> dict[str, Any]:
        """Return the environment's own state, after all earlier requests."""
        async with session.lock as held:
            return await self._delivery.on_host(held, session, EnvHost.state)

    async def look(self, session: Session, call: Callable[[EnvHost], Awaitable[T]]) -> T:
        """Run a read-only ``call`` on the session's environment after all earlier requests; it is not journaled."""
        timeout_s = self.runtime.settings.step_timeout_s
        async with session.lock as held:
            return await self._delivery.on_host(held, session, lambda host: host.scoped(call, timeout_s=timeout_s))


async def _idle(session: Session) -> None:
    """Wait until no request of the session runs."""
    async with session.lock:
        pass
