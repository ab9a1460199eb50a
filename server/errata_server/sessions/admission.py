"""The general path of a request: waits for the session's lock, wakes it if need be, executes, commits, recovers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec.structs import replace

from errata_protocol.environment import Recovery
from errata_protocol.errors import EnvironmentFailed, ServiceError, SessionLost, SessionUnknown, StepTimeout

from ..environments.host import EnvHost, ThreadLost
from ..ids import name_of
from ..journal.base import EpisodeRow, Record
from ..runtime.rows import Admitted, error_row, wire_digest
from ..runtime.runtime import Runtime
from .execution import Execution
from .instances import Waker
from .reexecution import drawn
from .session import Reply, Request, Session

log = logging.getLogger("errata.sessions")

MAX_LOGGED = 500
"""Characters of an environment's exception that a log line repeats."""

T = TypeVar("T")


class Admission:
    """Runs requests on the sessions of one environment.

    Args:
        runtime: Journal, ids and clock.
        waker: Gets a session its instance, and gives it up.
        execution: Runs a request on an instance.
        environment: Name under which episodes are journaled.
        agent_text_version: Journaled with each episode.
        make_place: Returns when there is a place for a session's instance, or raises CapacityReached.
    """

    def __init__(
        self,
        runtime: Runtime,
        waker: Waker,
        execution: Execution,
        environment: str,
        agent_text_version: str | None,
        make_place: Callable[[Session], Awaitable[None]],
    ) -> None:
        self._runtime = runtime
        self._waker = waker
        self._execution = execution
        self._environment = environment
        self._agent_text_version = agent_text_version
        self._make_place = make_place

    async def deliver(self, session: Session, request: Request, socket: object | None) -> Reply:
        """Run a mutating request after all earlier ones, commit it, and return its reply.

        Raises:
            ErrataError: See `Sessions.admit`.
        """
        async with session.turn:
            if socket is not None and session.attached is not socket:
                raise SessionUnknown("another socket speaks for this session now: attach again")
            await self._runtime.store.wait_until_writable()
            host = await self._awake(session)  # a lost session is told before an id is drawn
            created = session.last_used = self._runtime.clock.time()
            received_sha = request.sha or hashlib.sha256(request.data).digest()
            new_episode = request.kind == "reset" or session.eid is None or session.t is None
            eid = self._runtime.ids.episode() if new_episode or session.eid is None else session.eid
            t = 0 if request.kind == "reset" else (session.t or 0) + 1
            request = drawn(host, request, session.row.seed, eid, first=session.eid is None)
            admitted = Admitted(eid, t, session.sid, request.id, request.kind, request.data, created, received_sha)
            try:
                executed = await self.on_host(session, lambda host: self._execution.run(host, admitted, request))
                self.look_at_recovery(session, host)
                records: list[Record] = [] if session.committed else [session.row]
                if new_episode:
                    records.append(await self._episode_row(session, eid, request))
            except ServiceError as error:
                await self.failed(session, admitted, error)
                raise
            # From here to the commit the environment is ahead of the journal: the reply is held as long as it takes.
            try:
                await self._runtime.rewards.commit(session.row, executed.rewards, executed.row, records)
            except BaseException:
                await self.unkept(session)
                raise
            session.committed = True
            session.eid, session.t = eid, t
            return Reply(eid, t, executed.row.payload, wire_digest(executed.row.digest))

    async def _episode_row(self, session: Session, eid: str, request: Request) -> EpisodeRow:
        try:
            assert session.host is not None
            alias = (await session.host.state()).get("episode_id")
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

    def look_at_recovery(self, session: Session, host: EnvHost) -> None:
        """Take note of what a first snapshot may have shown: that it is none of ours."""
        if host.recovery is Recovery.NONE and session.recoverable:
            session.row = replace(session.row, recovery=Recovery.NONE)

    async def unkept(self, session: Session) -> None:
        """Give up an instance that ran what the journal does not have. In the session's turn."""
        await self._waker.drop(session, "a delivery could not be journaled")

    async def failed(self, session: Session, admitted: Admitted, error: ServiceError) -> None:
        """Bring the session back to its last commit: it never continues half-run (PROTOCOL D10). In its turn."""
        _log_failure(session, admitted, error)
        host = session.host
        if host is not None and isinstance(error, StepTimeout):
            if host.gone or host.recovery is Recovery.SNAPSHOT:  # else nothing has run: no thread was free in time
                await self._waker.drop(session, "a call passed the step deadline")
        elif host is not None and type(error) is not EnvironmentFailed and host.recovery is not Recovery.NONE:
            # Not for the environment's own exception, nor where nothing could be restored: upstream keeps the instance.
            await self._waker.drop(session, "")
        if admitted.id is None and session.committed and session.eid is not None:
            # A reset that failed began no episode; it may have changed the instance that the current one goes on with.
            await self._runtime.journal.commit(error_row(replace(admitted, eid=session.eid), error))

    async def _awake(self, session: Session) -> EnvHost:
        """Return the session's environment, restored from its last commit if it sleeps."""
        if session.host is not None and session.host.gone:
            await self._waker.drop(session, "a call hangs on the thread that its environment lived on")
        if session.lost is not None:
            raise SessionLost(session.lost, eid=session.eid, t=session.t)
        if session.closed:
            raise SessionUnknown("this session was closed: open another")
        if session.host is not None:
            return session.host
        await self._make_place(session)
        session.opening = True
        try:
            session.host = await self._waker.wake(session)
        finally:
            session.opening = False
        return session.host

    async def on_host(self, session: Session, call: Callable[[EnvHost], Awaitable[T]]) -> T:
        """Run ``call`` on the session's environment; once more where its thread was given up before anything ran."""
        try:
            return await call(await self._awake(session))
        except ThreadLost:
            return await call(await self._awake(session))


def _log_failure(session: Session, admitted: Admitted, error: ServiceError) -> None:
    """Say what failed; the environment's own traceback with it where debug lines are wanted."""
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
