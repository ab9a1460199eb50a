"""`Sessions`: opens, finds, runs and closes the sessions of one environment; every door calls it.

A session is *awake* (it has an environment instance), *dormant* (a journal row and perhaps a sandbox directory; the
next request wakes it from its last committed delivery) or over. A mutating request runs, its snapshot is taken, the
row is committed, and only then does the reply exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from msgspec.structs import replace
from openenv.core.env_server.types import ConcurrencyConfig

from errata_protocol.errors import SessionLost, SessionUnknown

from ..concurrency.owned_tasks import OwnedTasks
from ..concurrency.procedures import run, start
from ..environments.declarations import Declared
from ..environments.host import EnvHost
from ..environments.placement import EnvironmentFactory
from ..journal.base import DeliveryRow, SessionChange, SessionRow
from ..recovery import RecoveryClass
from ..runtime.capacity import Room
from ..runtime.runtime import Runtime
from .decoding import Decoder
from .delivery import Delivery
from .execution import Execution
from .instances import InstanceLoader
from .lifetime import Lifetime
from .opening import Opening
from .reexecution import Reexecution
from .session import Address, Reply, Request, Session
from .table import SessionTable

log = logging.getLogger("errata.sessions")

T = TypeVar("T")

Settled: TypeAlias = Callable[[Reply | None, Exception | None], None]
"""Called once, on the event loop: with the committed reply, or with the reason that there is none."""

Opened: TypeAlias = Callable[[Session | None, Exception | None], None]
"""Called once, on the event loop: with the committed session, or with the reason that there is none."""


class Sessions:
    """All sessions of one environment.

    Args:
        runtime: Shared journal, sandboxes, clock and ids.
        factory: Makes one environment instance.
        environment: Name under which sessions are journaled.
        concurrency: Upstream's limits.
        agent_text_version: Journaled with each episode.
        declared: What is declared of the environment beside its code.
        decoder: Decodes journaled requests; without it no session is continued by re-execution.
        retention: Returns the work of deleting what is kept no longer, or None; asked at each open.

    Attributes:
        table: The sessions that are in memory.
        lifetime: Attaches sockets, and ends sessions or their instances.
        tasks: Runs what must not end with its caller.
        room: How many instances there may be and are.
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
    ) -> None:
        self.runtime = runtime
        self.environment = environment
        self.table = SessionTable()
        self.tasks = OwnedTasks()
        self.room = Room(concurrency.max_concurrent_envs)
        self.lifetime = Lifetime(
            runtime, environment, factory, self.room, self.table, self.tasks, concurrency.session_timeout
        )
        declared = declared or Declared()
        execution = Execution(runtime, declared)
        self._instances = InstanceLoader(
            runtime,
            factory,
            Reexecution(runtime, execution, decoder) if decoder is not None else None,
            deterministic=declared.deterministic,
            snapshots=not declared.sandboxed or runtime.snapshots_each_step,
        )
        self._delivery = Delivery(
            runtime, self._instances, execution, environment, agent_text_version, self._make_place
        )
        self._opening = Opening(runtime, environment, self._instances, self.table, self.lifetime, self.tasks, retention)
        runtime.enders.append(self._end)
        runtime.metrics.watch(environment, lambda: self.room.used, lambda: len(self.table.detached))

    @property
    def recovery(self) -> RecoveryClass:
        """Recovery class of the environment, as far as it is known."""
        return self._instances.recovery

    # -- opening and finding --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[EnvHost]:
        """Lend an instance for one call without a session: not counted, not journaled, closed afterwards.

        Raises:
            EnvironmentFailed: The factory failed.
        """
        await self.runtime.start()
        session = Session(self._opening.new_row(), committed=False, room=Room(None))
        host = await run(self._instances.create(session))
        try:
            yield host
        finally:
            await host.close()

    async def open(
        self,
        *,
        given_out: bool = False,
        principal: str | None = None,
        room: Room | None = None,
        address: Address | None = None,
    ) -> Session:
        """Open a session with its own environment instance.

        Args:
            given_out: A client gets to know its id: it outlives its socket.
            principal: The owner.
            room: Where to count it, by default among all others.
            address: Id and key of a multiplexed session; it is given out then.

        Raises:
            Conflict: There is a session of that id.
            CapacityReached: There is no room, and no detached session can be hibernated to make some.
            EnvironmentFailed: The factory failed.
        """
        opening = self._opening.open(given_out=given_out, principal=principal, room=room, address=address)
        return await run(opening)

    def begin_open(
        self, address: Address, principal: str | None, opened: Opened, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Open a multiplexed session as `open` does, without a task where none is needed; ``opened`` is called."""
        start(self._opening.open(principal=principal, address=address), opened, loop, self.tasks.start)

    async def _make_place(self, session: Session) -> None:
        """Return when a session that wakes has a place, or raise CapacityReached."""
        self.table.hold(session)
        await self.lifetime.make_room(session.room)

    async def find(self, sid: str, principal: str | None = None) -> Session:
        """Return a given-out session, waking its journal row if need be; its environment wakes at the next request.

        Raises:
            SessionUnknown: No such session, or it belongs to another principal.
            SessionLost: It ended with a server and cannot be continued.
        """
        await self.runtime.start()
        session = self.table.get(sid)
        if session is None or session.row.principal != principal:  # a foreign one costs what an unknown one does
            session = await self._find_dormant(sid, principal)
        if not session.given_out or session.closed or session.multiplexed:
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
        """Return the row of a session as it is now, and its last delivery if the row is wanted; else no second read."""
        while True:
            with self.table.search({sid}) as outdated:
                row = await self.runtime.store.session(sid)
                is_wanted = row is not None and wanted(row)
                last = await self.runtime.store.last_delivery(sid) if is_wanted else None
            if not outdated:
                return row, last

    def dormant(self, row: SessionRow, last: DeliveryRow | None) -> Session:
        """Return the session of a journal row: as this process has it, or asleep.

        Args:
            row: As read.
            last: Its last delivery.
        """
        existing = self.table.get(row.sid)
        if existing is not None and existing.is_of(row):  # another request woke it while this one read
            return existing  # else an open under the same sid, whose commit will fail
        session = Session(row, committed=True, room=self.lifetime.share_of(row.principal))
        if last is not None:
            session.eid, session.t = last.eid, last.t
        if row.status == "lost":
            session.lost = session.lost_message(row.lost or "it ended with its server")
        elif session.multiplexed:
            self.table.live[row.sid] = session
        else:
            self.table.asleep[row.sid] = session
        return session

    async def give_out(self, session: Session) -> None:
        """Record that a client knows this session's id: it outlives its socket from now on."""
        if not session.given_out:
            if session.committed:
                await self.runtime.journal.commit(SessionChange(session.sid, given_out=True))
            else:
                session.row = replace(session.row, given_out=True)
                await run(self._opening.commit(session))
            session.given_out = True

    async def _end(self, sid: str) -> bool:
        session = self.table.get(sid)
        if session is None or not session.committed:  # that may be an open under the same sid, whose commit will fail
            row, last = await self._stored(sid, lambda row: row.environment == self.environment)
            if row is None or row.environment != self.environment:
                return False
            if row.status != "open":
                return True
            session = self.dormant(row, last)  # so that a request that looks for it meanwhile finds it closed
        await self.lifetime.close(session)
        return True

    async def close_all(self, grace_s: float = 10.0) -> None:
        """Shut down: let running requests commit, then close every environment. Given-out sessions stay open rows.

        Args:
            grace_s: How long to wait for requests that run. What is not committed then did not happen.
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
        elif session.given_out:
            async with session.lock as turn:
                host = session.take_host(turn)
                if host is not None:
                    await host.close()
        else:
            await self.lifetime.close(session)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def admit(self, session: Session, request: Request, socket: object | None = None) -> Reply:
        """Run one mutating request, commit it, and return its reply.

        A caller that goes away does not take the request with it: it runs to its commit.

        Args:
            session: Whose request it is.
            request: What to do.
            socket: The socket it came through, None for HTTP. What a lost socket left in its queue does not act on a
                session that has another socket now.

        Raises:
            ErrataError: Typed for the wire; the session's state is then as its last commit left it, or, for an
                environment without snapshots, as the environment left it.
        """
        return await asyncio.shield(self.tasks.start(self.run(session, request, socket)))

    async def run(self, session: Session, request: Request, socket: object | None = None) -> Reply:
        """Run a request as `admit` does, for a caller that does not go away: one in a task of `tasks`."""
        return await run(self._delivery.deliver(session, request, socket, asyncio.get_running_loop()))

    def begin(self, session: Session, request: Request, settled: Settled, loop: asyncio.AbstractEventLoop) -> None:
        """Run a request as `admit` does, without a task where none is needed; ``settled`` is called."""
        start(self._delivery.deliver(session, request, None, loop), settled, loop, self.tasks.start)

    async def state(self, session: Session) -> dict[str, Any]:
        """Return the environment's own state, after all earlier requests."""
        async with session.lock as turn:
            return await self._delivery.on_host(turn, session, EnvHost.state)

    async def look(self, session: Session, call: Callable[[EnvHost], Awaitable[T]]) -> T:
        """Read something from the session's environment, after all earlier requests; it is no delivery."""
        timeout_s = self.runtime.settings.step_timeout_s
        async with session.lock as turn:
            return await self._delivery.on_host(turn, session, lambda host: host.scoped(call, timeout_s=timeout_s))


async def _idle(session: Session) -> None:
    """Return when no request of the session runs."""
    async with session.lock:
        pass
