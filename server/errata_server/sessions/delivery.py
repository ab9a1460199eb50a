"""`Delivery`: the one rule by which a request is delivered exactly once: lock, execute, commit, reply, or recover.

`Delivery.deliver` is a procedure (`errata_server.concurrency.procedures`). A step of a session that is awake and idle
waits only for its environment's call and for the commit, and needs no task. Everything else (a busy or sleeping
session, no room on the disk, a failure) goes on in one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec.structs import replace

from errata_protocol.errors import EnvironmentFailed, ErrataError, ServiceError, SessionUnknown, StepTimeout

from ..concurrency.fair_lock import Turn
from ..concurrency.procedures import Procedure
from ..environments.host import EnvHost, ThreadLost
from ..ids import name_of
from ..journal.base import EpisodeRow, Record
from ..runtime.rows import Admitted, error_row
from ..runtime.runtime import Runtime
from .commits import commit_delivery, commit_with_rewards
from .execution import Execution
from .instances import InstanceLoader
from .reexecution import drawn
from .session import Committed, Reply, Request, Session

log = logging.getLogger("errata.sessions")

MAX_LOGGED = 500
"""Characters of an environment's exception that a log line repeats."""

LOOK_S = 0.01
"""How long it is believed that the journal can be written."""

T = TypeVar("T")


class Delivery:
    """Delivers requests to the sessions of one environment.

    Functions that take a `Turn` run under the session's lock.

    Args:
        runtime: Journal, ids and clock.
        instances: Gets a session its instance, and gives it up.
        execution: Runs a request on an instance.
        environment: Name under which episodes are journaled and requests counted.
        agent_text_version: Journaled with each episode.
        make_place: Returns when there is a place for a session's instance, or raises CapacityReached.
    """

    def __init__(
        self,
        runtime: Runtime,
        instances: InstanceLoader,
        execution: Execution,
        environment: str,
        agent_text_version: str | None,
        make_place: Callable[[Session], Awaitable[None]],
    ) -> None:
        self._runtime = runtime
        self._instances = instances
        self._execution = execution
        self._environment = environment
        self._agent_text_version = agent_text_version
        self._make_place = make_place
        self._writable_until = 0.0

    def deliver(
        self, session: Session, request: Request, socket: object | None, loop: asyncio.AbstractEventLoop
    ) -> Procedure[Reply]:
        """Run a mutating request after all earlier ones, commit it, and return its reply.

        Args:
            session: Whose request it is.
            request: What to do.
            socket: See `Sessions.admit`.
            loop: The running event loop.

        Raises:
            ErrataError: See `Sessions.admit`.
        """
        outcome, started = "ok", loop.time()
        turn = session.lock.try_acquire()
        try:
            if turn is None:
                turn = yield session.lock.acquire()
            if socket is not None and session.attached is not socket:
                raise SessionUnknown("another socket speaks for this session now: attach again")
            if not self._writable(loop):
                yield self._runtime.store.wait_until_writable()
            host = session.usable_host
            if host is None:
                host = yield self._awake(turn, session)  # a lost session is refused before an id is drawn
            created = session.last_used = self._runtime.clock.time()
            eid, t = session.eid, session.t
            new_episode = eid is None or t is None or request.kind == "reset"
            if eid is None or new_episode:
                eid = self._runtime.ids.episode()
                request = drawn(host, request, session.row.seed, eid, first=session.eid is None)
            t = 0 if request.kind == "reset" else (t or 0) + 1
            sha = request.sha or hashlib.sha256(request.data).digest()
            admitted = Admitted(eid, t, session.row.sid, request.id, request.kind, request.data, created, sha)
            try:
                try:
                    executed = yield from self._execution.run(host, admitted, request)
                except ThreadLost:  # nothing ran: once more, on another thread
                    host = yield self._awake(turn, session)
                    executed = yield from self._execution.run(host, admitted, request)
                if not host.recovery.survives_restart:
                    self._note_recovery(turn, session, host)
                records: list[Record] = [] if session.committed else [session.row]
                if new_episode:
                    records.append((yield self._episode_row(host, session, eid, request)))
            except ServiceError as error:
                yield self._restore(turn, session, admitted, error)
                raise
            # From here to the commit the environment is ahead of the journal: the reply is held as long as it takes.
            committed: Committed
            try:
                if executed.rewards:
                    committed = yield commit_with_rewards(self._runtime.rewards, session.row, executed, records)
                else:
                    committed = yield commit_delivery(self._runtime.store, executed.row, records)
            except (Exception, asyncio.CancelledError):
                yield self._instances.drop(turn, session, "a delivery could not be journaled")
                raise
            session.advance(turn, committed)
            return Reply.of(committed)
        except BaseException as error:
            outcome = error.code if isinstance(error, ErrataError) else "INTERNAL"  # one of few: it is a label
            raise
        finally:
            if turn is not None:
                session.lock.release(turn)
            self._runtime.metrics.request(self._environment, request.kind, outcome, loop.time() - started)

    def _writable(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether a commit can be made durable now, as of `LOOK_S` ago."""
        now = loop.time()
        if now >= self._writable_until:
            if self._runtime.store.trouble() is not None:
                return False
            self._writable_until = now + LOOK_S
        return True

    async def _episode_row(self, host: EnvHost, session: Session, eid: str, request: Request) -> EpisodeRow:
        try:
            alias = (await host.state()).get("episode_id")
        except Exception:  # upstream does not read the state here, so whatever is wrong with it is no reason to fail
            alias = request.reset.get("episode_id")
        return EpisodeRow(
            eid=eid,
            sid=session.sid,
            environment=self._environment,
            created=self._runtime.clock.time(),
            episode_id=str(alias).encode("utf-8", "backslashreplace").decode() if alias is not None else None,
            principal=session.row.principal,
            agent_text_version=self._agent_text_version,
        )

    def _note_recovery(self, turn: Turn, session: Session, host: EnvHost) -> None:
        """Record what a first snapshot may have shown: that the environment's ``snapshot()`` is not ours."""
        self._instances.recovery = host.recovery
        if session.recoverable:
            session.row = replace(session.row, recovery=host.recovery.name)

    async def _restore(self, turn: Turn, session: Session, admitted: Admitted, error: ServiceError) -> None:
        """Bring the session back to its last commit: it never continues half-run (PROTOCOL D10)."""
        _log_failure(session, admitted, error)
        host = session.host
        if host is not None and isinstance(error, StepTimeout):
            if host.gone or host.recovery.takes_snapshots:  # else nothing has run: no thread was free in time
                await self._instances.drop(turn, session, "a call passed the step deadline")
        elif host is not None and type(error) is not EnvironmentFailed and host.recovery.survives_restart:
            # Not for the environment's own exception, nor where nothing could be restored: upstream keeps the instance.
            await self._instances.drop(turn, session, "")
        if admitted.id is None and session.committed and session.eid is not None:
            # A reset that failed began no episode; it may have changed the instance that the current one goes on with.
            await self._runtime.store.commit(error_row(replace(admitted, eid=session.eid), error))

    async def _awake(self, turn: Turn, session: Session) -> EnvHost:
        """Return the session's environment, restored from its last commit if it sleeps."""
        if session.host is not None and session.host.gone:
            await self._instances.drop(turn, session, "a call hangs on the thread that its environment lived on")
        session.check_alive()
        if session.host is not None:
            return session.host
        await self._make_place(session)
        session.opening = True
        try:
            host = session.host = await self._instances.wake(turn, session)
        finally:
            session.opening = False
        return host

    async def on_host(self, turn: Turn, session: Session, call: Callable[[EnvHost], Awaitable[T]]) -> T:
        """Run ``call`` on the session's environment; once more where its thread was given up before anything ran."""
        try:
            return await call(await self._awake(turn, session))
        except ThreadLost:
            return await call(await self._awake(turn, session))


def _log_failure(session: Session, admitted: Admitted, error: ServiceError) -> None:
    """Log what failed; with the environment's own traceback where debug lines are wanted."""
    cause = error.__cause__ if log.isEnabledFor(logging.DEBUG) else None
    log.warning(
        "session %s: %s for t=%d failed: %s: %s",
        name_of(session.sid),
        admitted.kind,
        admitted.t,
        type(error.__cause__ or error).__name__,
        error.message[:MAX_LOGGED]
        .encode("utf-8", "backslashreplace")
        .decode(),  # an environment's text may have no form
        exc_info=cause,
    )
