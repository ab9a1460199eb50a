"""`Sessions`: the sessions of one environment: opens, finds, runs and closes them; what every door speaks to.

A session is *awake* (it has an environment instance), *dormant* (a journal row and perhaps a sandbox directory; the
next request wakes it from its last committed delivery) or over. A mutating request runs, its snapshot is taken, the
row is committed, and only then does the reply exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace
from openenv.core.env_server.types import ConcurrencyConfig

from errata_protocol.environment import Recovery
from errata_protocol.errors import (
    CapacityReached,
    Conflict,
    EnvironmentFailed,
    ErrataError,
    SessionLost,
    SessionUnknown,
)

from ..concurrency.calls import ThreadGone
from ..concurrency.deadlines import Deadlines
from ..environments.declarations import Declared
from ..environments.host import EnvHost
from ..environments.placement import EnvironmentFactory
from ..environments.signatures import says_concurrent
from ..journal.base import DeliveryRow, SessionChange, SessionRow
from ..runtime.capacity import Room, Share
from ..runtime.runtime import Runtime
from .admission import Admission
from .decoding import Decoder
from .execution import Execution
from .fast_open import Opened, Opening
from .fast_step import Express, Settled
from .instances import Waker
from .lifetime import Idling
from .reexecution import Reexecution
from .session import Address, Reply, Request, Session

log = logging.getLogger("errata.sessions")

T = TypeVar("T")


class Sessions(Idling):
    """All sessions of one environment.

    Args:
        runtime: Shared journal, sandboxes, clock and ids.
        factory: Makes one environment instance.
        environment: Name under which sessions are journaled.
        concurrency: Upstream's limits.
        agent_text_version: Journaled with each episode.
        declared: What is declared of the environment beside its code.
        decoder: Reads journaled requests back; without it no session is continued by re-execution.
        retention: Returns the work of deleting what is kept no longer, or None; asked at each open.
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
        super().__init__(runtime, environment, concurrency.session_timeout)
        self._retention = retention
        self._factory = factory
        declared = declared or Declared()
        execution = Execution(runtime, declared)
        reexecution = Reexecution(runtime, execution, decoder) if decoder is not None else None
        snapshots = not declared.sandboxed or runtime.snapshots_each_step
        self.waker = Waker(runtime, factory, reexecution, deterministic=declared.deterministic, snapshots=snapshots)
        self._admission = Admission(runtime, self.waker, execution, environment, agent_text_version, self._make_place)
        self._express = Express(runtime, execution, self._admission, environment, self.own)
        self.recovery = self.waker.recovery_of(factory)
        self.room = Room(concurrency.max_concurrent_envs)
        runtime.enders.append(self._end)
        runtime.metrics.watch(environment, lambda: self.room.used, lambda: len(self._detached))

    # -- opening and finding --------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Sessions that hold an environment instance or are making one."""
        return self.room.used

    def live(self, sid: str) -> Session | None:
        """Return a session that this process holds, whoever's it is; for upstream's own methods."""
        return self.held(sid)

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[EnvHost]:
        """Lend an instance for one call without a session: not counted, not journaled, closed afterwards.

        Raises:
            EnvironmentFailed: The factory failed.
        """
        await self.runtime.start()
        host = await self.waker.create(Session(self._new_row(), committed=False, room=Room(None)))
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
        """Make a session with its own environment instance.

        Args:
            given_out: A client is told its id: it outlives its socket.
            principal: Whose it is.
            room: Where to count it, by default among all others.
            address: What its client chose, of a multiplexed session; it is given out then.

        Raises:
            Conflict: There is a session at that address.
            CapacityReached: There is no room, and no detached session can be hibernated to make some.
            EnvironmentFailed: The factory failed.
        """
        await self.runtime.start()
        self._prune()
        row = self._new_row(given_out=given_out or address is not None, principal=principal, address=address)
        session = Session(row, committed=False, room=room or self._share(principal))
        if row.sid not in self._live:
            await self._make_room(session.room)
        if row.sid in self._live:
            raise Conflict("a session of this id is there already")
        session.opening = True  # before the factory runs: it holds its place
        self._live[session.sid] = session
        try:
            session.host = await self.waker.create(session)
            if session.host.recovery is not self.recovery:
                self.recovery = session.host.recovery  # a factory function told nothing before its first call
            session.row = replace(session.row, recovery=session.host.recovery)
            if row.given_out:
                await self._commit_row(session)
        except BaseException:
            self.forget(session)
            host, session.host = session.host, None  # its place is free for another
            if host is not None:
                await host.close()
            raise
        finally:
            session.opening = False
        self.runtime.metrics.opened(self.environment)
        return session

    def begin_open(
        self, address: Address, principal: str | None, opened: Opened, loop: asyncio.AbstractEventLoop
    ) -> bool:
        """As `open`, for a multiplexed session that has to wait for nothing but the factory and its commit.

        Returns:
            False where something has to be waited for, or is wrong: nothing was done, and `open` does or tells it.
        """
        if not self.runtime.started or address.sid in self._live or self.runtime.store.trouble() is not None:
            return False
        room = self._share(principal)
        if room.full:
            return False
        self._prune()
        row = self._new_row(given_out=True, principal=principal, address=address)
        session = Session(row, committed=False, room=room)
        try:
            opening = Opening(self, session, opened, loop)
            session.opening = True  # before the factory runs: it holds its place
            self._live[row.sid] = session
            opening.depart()
        except (CapacityReached, ThreadGone):
            self.forget(session)
            session.opening = False
            return False
        return True

    async def _make_place(self, session: Session) -> None:
        """Return when a session that wakes has a place, or raise CapacityReached."""
        self.hold(session)
        await self._make_room(session.room)

    def _prune(self) -> None:
        """Delete what is kept no longer, where it is time for that: a server that opens sessions also lets some go."""
        if (work := self._retention()) is not None:
            self.own(work)

    def deadlines(self, loop: asyncio.AbstractEventLoop) -> Deadlines:
        """Return the deadlines of the event loop that runs."""
        return self._express.deadlines(loop)

    async def find(self, sid: str, principal: str | None = None) -> Session:
        """Return a given-out session, waking its journal row if need be; its environment wakes at the next request.

        Raises:
            SessionUnknown: No such session, or it belongs to another principal.
            SessionLost: It ended with a server and cannot be continued.
        """
        await self.runtime.start()
        session = self.held(sid)
        if session is None or session.row.principal != principal:  # a foreign one costs what an unknown one does
            session = await self._find_dormant(sid, principal)
        if not session.given_out or session.closed or session.multiplexed:
            raise SessionUnknown(f"Unknown session_id: {sid}")
        if session.lost is not None:
            raise SessionLost(session.lost, eid=session.eid, t=session.t)
        return session

    async def _find_dormant(self, sid: str, principal: str | None) -> Session:
        def mine(row: SessionRow) -> bool:
            return row.environment == self.environment and row.principal == principal

        row, last = await self._stored(sid, mine)
        if row is None or not mine(row) or row.status in ("closed", "expired") or not row.given_out or row.key_hash:
            raise SessionUnknown(f"Unknown session_id: {sid}")
        return self.dormant(row, last)

    async def _stored(
        self, sid: str, wanted: Callable[[SessionRow], bool]
    ) -> tuple[SessionRow | None, DeliveryRow | None]:
        """Return the row of a session as it is now, and its last delivery if it is wanted: no other costs that read."""
        while True:
            with self.search({sid}) as outdated:
                row = await self.runtime.store.session(sid)
                looked = row is not None and wanted(row)
                last = await self.runtime.store.last_delivery(sid) if looked else None
            if not outdated:
                return row, last

    def dormant(self, row: SessionRow, last: DeliveryRow | None) -> Session:
        """Return the session of a journal row: as this process has it, or asleep.

        Args:
            row: As read.
            last: Its last delivery.
        """
        existing = self.held(row.sid)
        if existing is not None and existing.is_of(row):  # another request woke it while this one read
            return existing  # else an open under the same sid, whose commit will fail
        session = Session(row, committed=True, room=self._share(row.principal))
        if last is not None:
            session.eid, session.t = last.eid, last.t
        if row.status == "lost":
            session.lost = session.lost_message(row.lost or "it ended with its server")
        elif session.multiplexed:
            self._live[row.sid] = session
        else:
            self._asleep[row.sid] = session
        return session

    async def give_out(self, session: Session) -> None:
        """Remember that a client was told this session's id: it outlives its socket from now on."""
        if not session.given_out:
            if session.committed:
                await self.runtime.journal.commit(SessionChange(session.sid, given_out=True))
            else:
                session.row = replace(session.row, given_out=True)
                await self._commit_row(session)
            session.given_out = True

    async def _end(self, sid: str) -> bool:
        session = self.held(sid)
        if session is None or not session.committed:  # that may be an open under the same sid, whose commit will fail
            row, last = await self._stored(sid, lambda row: row.environment == self.environment)
            if row is None or row.environment != self.environment:
                return False
            if row.status != "open":
                return True
            session = self.dormant(row, last)  # so that whoever looks for it meanwhile finds that it is closed
        await self.close(session)
        return True

    async def close_all(self, grace_s: float = 10.0) -> None:
        """Shut down: let running requests commit, then close every environment. Given-out sessions stay open rows.

        Args:
            grace_s: How long to wait for requests that run. What is not committed then did not happen.
        """
        busy = {asyncio.ensure_future(_turn_of(session)) for session in self._live.values() if session.turn.busy}
        if busy:
            _, running = await asyncio.wait(busy, timeout=grace_s)
            for turn in running:
                turn.cancel()
        closing = {asyncio.ensure_future(self._shut(session)) for session in list(self._live.values())}
        if closing:
            _, hanging = await asyncio.wait(closing, timeout=grace_s)
            for close in hanging:
                close.cancel()
            if hanging:
                log.warning("%d environments did not close within %g s and were left behind", len(hanging), grace_s)
        for session in list(self._live.values()):
            self.forget(session)

    async def _shut(self, session: Session) -> None:
        if session.turn.busy:
            if session.host is not None:
                session.host.abandon()
        elif session.given_out:
            async with session.turn:
                host, session.host = session.host, None
                if host is not None:
                    await host.close()
        else:
            await self.close(session)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def admit(self, session: Session, request: Request, socket: object | None = None) -> Reply:
        """Run one mutating request, commit it, and return its reply.

        A caller that goes away does not take the request with it: it runs to its commit.

        Args:
            session: Whose request it is.
            request: What to do.
            socket: The socket it came through, None for HTTP. What a lost socket left in its queue does not act on a
                session that another speaks for now.

        Raises:
            ErrataError: Typed for the wire; the session's state is then as its last commit left it, or, for an
                environment without snapshots, as the environment left it.
        """
        return await asyncio.shield(self.own(self.run(session, request, socket)))

    async def run(self, session: Session, request: Request, socket: object | None = None) -> Reply:
        """As `admit`, for callers that do not go away: they run in a task that `own` made."""
        if request.kind == "step":
            loop = asyncio.get_running_loop()
            settled: asyncio.Future[Reply] = loop.create_future()
            if self.begin(session, request, socket, partial(_settle, settled), loop):
                return await settled
        outcome, started = "ok", asyncio.get_running_loop().time()
        try:
            reply = await self._admission.deliver(session, request, socket)
            if session.host is not None and session.host.recovery is Recovery.NONE:
                self.recovery = Recovery.NONE  # its first snapshot may have shown that it is none of ours
            return reply
        except BaseException as error:
            outcome = error.code if isinstance(error, ErrataError) else "INTERNAL"  # one of few: it is a label
            raise
        finally:
            seconds = asyncio.get_running_loop().time() - started
            self.runtime.metrics.request(self.environment, request.kind, outcome, seconds)

    def begin(
        self,
        session: Session,
        request: Request,
        socket: object | None,
        settled: Settled,
        loop: asyncio.AbstractEventLoop,
    ) -> bool:
        """As `run`, for a step that has to wait for nothing but its environment: ``settled`` is told what came of it.

        Returns:
            False where something has to be waited for: nothing was done, and `run` does it all.
        """
        return self._express.begin(session, request, socket, settled, loop)

    async def state(self, session: Session) -> dict[str, Any]:
        """Return the environment's own state, after all earlier requests."""
        async with session.turn:
            return await self._admission.on_host(session, EnvHost.state)

    async def look(self, session: Session, call: Callable[[EnvHost], Awaitable[T]]) -> T:
        """Read something from the session's environment, after all earlier requests; it is no delivery."""
        timeout_s = self.runtime.settings.step_timeout_s
        async with session.turn:
            return await self._admission.on_host(session, lambda host: host.scoped(call, timeout_s=timeout_s))

    def _takes_several(self) -> bool:
        made = next((session.host.env for session in self._live.values() if session.host is not None), None)
        return says_concurrent(made if made is not None else self._factory)

    def _share(self, principal: str | None) -> Room:
        return Share(self.room, self.runtime.room_of(principal))

    def _new_row(
        self, *, given_out: bool = False, principal: str | None = None, address: Address | None = None
    ) -> SessionRow:
        return SessionRow(
            sid=self.runtime.ids.session() if address is None else address.sid,
            environment=self.environment,
            recovery=self.recovery,
            seed=self.runtime.ids.seed(),
            created=self.runtime.clock.time(),
            given_out=given_out,
            principal=principal,
            key_hash=address.key_hash if address is not None else None,
            group=address.group if address is not None else None,
        )

    async def _commit_row(self, session: Session) -> None:
        await self.runtime.store.wait_until_writable()
        await self.runtime.journal.commit(session.row)
        session.committed = True


def _settle(settled: asyncio.Future[Reply], reply: Reply | None, error: Exception | None) -> None:
    if settled.done():  # who waited was cancelled; the step was committed
        return
    if reply is not None:
        settled.set_result(reply)
    else:
        settled.set_exception(error or EnvironmentFailed("the step came to nothing"))


async def _turn_of(session: Session) -> None:
    async with session.turn:
        pass
