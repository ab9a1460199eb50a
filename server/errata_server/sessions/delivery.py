"""`Delivery`: runs one request under the session's lock, commits its row, and replies only then.

A request that arrives again never gets here: the mux state machine and the keys of the journal find it. After a failure
the instance is discarded if it may be ahead of the journal, and a new one is restored.

`Delivery.deliver` is a procedure (`errata_server.concurrency.procedures`). A step of a session that is awake and idle
waits only for its environment's call and for the commit, and needs no task. All other cases (a busy or dormant session,
a full disk, a failure) continue in a task.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec.structs import replace

from errata_protocol.errors import EnvironmentFailed, ErrataError, Overloaded, ServiceError, SessionUnknown, StepTimeout

from ..concurrency.containment import calling
from ..concurrency.fair_lock import Held
from ..concurrency.procedures import Procedure
from ..environments.host import CallNotRun, EnvHost, ThreadLost
from ..ids import name_of
from ..journal.base import EpisodeRow, Record, label_fields
from ..runtime.rows import Admitted, error_row
from ..runtime.runtime import Runtime
from .commits import Commit, commit_with_rewards
from .execution import Execution
from .instances import InstanceLoader
from .reexecution import drawn
from .session import Committed, Request, Session

log = logging.getLogger("errata.sessions")

MAX_LOGGED = 500
"""Most characters of an environment's exception message in a log line."""

WAKE_RETRY_S = 5.0
"""``retry_after`` of the refusal of a request whose session could not be woken, seconds."""

LOOK_S = 0.01
"""Seconds for which a check that the journal can be written is reused."""

T = TypeVar("T")


class Delivery:
    """Delivers requests to the sessions of one environment.

    Functions that take a `Held` run under the session's lock.

    Args:
        runtime: Journal, ids and clock.
        instances: Restores and drops the instance of a session.
        execution: Runs a request on an instance.
        environment: Name under which episodes are journaled and requests counted.
        agent_text_version: Journaled with each episode.
        ensure_capacity: Called before a dormant session gets an instance; raises CapacityReached if it cannot have one.
    """

    def __init__(
        self,
        runtime: Runtime,
        instances: InstanceLoader,
        execution: Execution,
        environment: str,
        agent_text_version: str | None,
        ensure_capacity: Callable[[Session], Awaitable[None]],
    ) -> None:
        self._runtime = runtime
        self._instances = instances
        self._execution = execution
        self._environment = environment
        self._agent_text_version = agent_text_version
        self._ensure_capacity = ensure_capacity
        self._writable_until = 0.0

    def deliver(
        self, session: Session, request: Request, socket: object | None, loop: asyncio.AbstractEventLoop
    ) -> Procedure[Committed]:
        """Run a mutating request after all earlier ones, commit it, and return the committed delivery.

        Args:
            session: The session.
            request: The request.
            socket: See `Sessions.admit`.
            loop: The running event loop.

        Raises:
            ErrataError: See `Sessions.admit`.
        """
        outcome, kind, now = "ok", request.kind, loop.time()
        started = now
        held = session.lock.try_acquire()
        try:
            if held is None:
                held = yield session.lock.acquire()
                now = loop.time()
            if socket is not None and session.attached is not socket:
                raise SessionUnknown("another socket speaks for this session now: attach again")
            if now >= self._writable_until and not self._writable(now):
                yield self._runtime.store.wait_until_writable()
            host = session.usable_host
            if host is None:
                host = yield self._woken(held, session)  # raises for a lost session before an id is generated
            created = session.last_used = self._runtime.clock.time()
            eid, t = session.eid, session.t
            new_episode = eid is None or t is None or kind == "reset"
            if eid is None or new_episode:
                eid = self._runtime.ids.episode()
                request = drawn(host, request, session.row.seed, eid, first=session.eid is None)
            t = 0 if kind == "reset" else (t or 0) + 1
            sha = request.sha or hashlib.sha256(request.data).digest()
            admitted = Admitted(eid, t, session.row.sid, request.id, kind, request.data, created, sha)
            try:
                try:
                    executed = yield from self._execution.run(host, admitted, request)
                except ThreadLost:  # the call did not run: try once more, on another thread
                    host = yield self._woken(held, session)
                    executed = yield from self._execution.run(host, admitted, request)
                if not host.recovery.survives_restart and session.recoverable:
                    self._note_recovery(held, session, host)
                records: tuple[Record, ...] = () if session.committed else (session.row,)
                if new_episode:
                    records = (*records, (yield self._episode_row(host, session, eid, request)))
            except ServiceError as error:
                yield self._restore(held, session, admitted, error)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:
                if not isinstance(error, ErrataError) and session.recoverable:
                    # A defect of the server, perhaps after the environment acted: the door refuses the request.
                    yield self._instances.drop(held, session, "")
                raise
            # From here to the commit the environment is ahead of the journal: the reply waits for the commit. What the
            # commit does not need is freed now, while it is in the processor's cache: thousands may wait together.
            del request, admitted
            committed: Committed
            try:
                if executed.rewards:
                    committed = yield commit_with_rewards(self._runtime.rewards, session.row, executed, records)
                else:
                    committed = (yield Commit(self._runtime.store, (*records, executed.row)))[-1]
            except (Exception, asyncio.CancelledError):
                yield self._instances.drop(held, session, "a delivery could not be journaled")
                raise
            session.advance(held, committed)
            if (error_kind := executed.row.error_kind) is not None:
                self._runtime.metrics.marked(self._environment, error_kind)
            return committed
        except BaseException as error:
            outcome = error.code if isinstance(error, ErrataError) else "INTERNAL"  # a metric label
            raise
        finally:
            if held is not None:
                session.lock.release(held)
            self._runtime.metrics.request(self._environment, kind, outcome, loop.time() - started)

    def _writable(self, now: float) -> bool:
        """Return whether the journal can be written; a positive result is reused until `LOOK_S` after ``now``."""
        if self._runtime.store.trouble() is not None:
            return False
        self._writable_until = now + LOOK_S
        return True

    async def _episode_row(self, host: EnvHost, session: Session, eid: str, request: Request) -> EpisodeRow:
        try:
            alias = (await host.state()).get("episode_id")
            alias = None if alias is None else calling(str, alias)
        except Exception:  # upstream does not read the state here, so an error in it must not fail the request
            alias = request.reset.get("episode_id")
        return EpisodeRow(
            eid=eid,
            sid=session.sid,
            environment=self._environment,
            created=self._runtime.clock.time(),
            episode_id=str(alias).encode("utf-8", "backslashreplace").decode() if alias is not None else None,
            principal=session.row.principal,
            agent_text_version=self._agent_text_version,
            **label_fields(session.row.labels.updated(request.labels)),
        )

    def _note_recovery(self, held: Held, session: Session, host: EnvHost) -> None:
        """Record a changed recovery class: a first snapshot may show that ``snapshot()`` is not ours."""
        self._instances.recovery = host.recovery
        session.row = replace(session.row, recovery=host.recovery.name)

    async def _restore(self, held: Held, session: Session, admitted: Admitted, error: ServiceError) -> None:
        """Log the failure, and drop an instance that may be ahead of the last commit (PROTOCOL D10)."""
        _log_failure(session, admitted, error)
        host = session.host
        if host is not None and isinstance(error, StepTimeout):
            if host.gone or not isinstance(error, CallNotRun):
                await self._instances.drop(held, session, "a call passed the step deadline")
        elif host is not None and type(error) is not EnvironmentFailed and host.recovery.survives_restart:
            # As upstream, keep the instance after its own exception, or if it could not be restored.
            await self._instances.drop(held, session, "")
        if admitted.kind == "reset":
            session.failed_reset = admitted
        if not error.info.consumes_id:
            return  # a refusal is no outcome of the request (PROTOCOL D5)
        if admitted.id is None and session.committed and session.eid is not None:
            # A failed reset began no episode, but may have changed the instance of the current one.
            await self._runtime.store.commit(error_row(replace(admitted, eid=session.eid), error))

    async def _awake(self, held: Held, session: Session) -> EnvHost:
        """Return the session's instance; without one, create it and restore it to the last commit.

        An instance whose thread is blocked by a call is dropped first.

        Raises:
            SessionLost: The session is lost, or its environment cannot be restored.
            SessionUnknown: The session was closed.
            CapacityReached: There is no capacity for another instance.
            ServiceError: The environment could not be created or restored now; a retry may succeed.
        """
        if session.host is not None and session.host.gone:
            await self._instances.drop(held, session, "a call hangs on the thread that its environment lived on")
        session.check_alive()
        if session.host is not None:
            return session.host
        await self._ensure_capacity(session)
        session.opening = True
        try:
            host = session.host = await self._instances.wake(held, session)
        finally:
            session.opening = False
        return host

    async def _woken(self, held: Held, session: Session) -> EnvHost:
        """Return what `_awake` returns, for a request whose errors are recorded.

        Raises:
            Overloaded: The factory or ``restore`` raised an exception. Not `EnvironmentFailed`, which would be recorded
                as the outcome of a request that did not run, and re-execution would run that request.
            ServiceError: See `_awake`.
        """
        try:
            return await self._awake(held, session)
        except ServiceError as error:
            if error.code != EnvironmentFailed.code:
                raise
            raise Overloaded(
                f"the session could not be brought back, and nothing ran: {error.message}", retry_after=WAKE_RETRY_S
            ) from error

    async def on_host(self, held: Held, session: Session, call: Callable[[EnvHost], Awaitable[T]]) -> T:
        """Run ``call`` on the session's environment; retry once if its thread was written off before the call began."""
        try:
            return await call(await self._awake(held, session))
        except ThreadLost:
            return await call(await self._awake(held, session))


def _log_failure(session: Session, admitted: Admitted, error: ServiceError) -> None:
    """Log a failed request; at level DEBUG with the environment's own traceback."""
    cause = error.__cause__ if log.isEnabledFor(logging.DEBUG) else None
    log.warning(
        "session %s: %s for t=%d failed: %s: %s",
        name_of(session.sid),
        admitted.kind,
        admitted.t,
        type(error.__cause__ or error).__name__,
        error.message[:MAX_LOGGED].encode("utf-8", "backslashreplace").decode(),  # the text may not be valid Unicode
        exc_info=cause,
    )
