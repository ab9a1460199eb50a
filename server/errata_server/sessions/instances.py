"""Creates, restores and discards the environment instance of a session, according to its recovery class."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from openenv.core.env_server.interfaces import Environment

from errata_protocol.environment import Snapshot
from errata_protocol.errors import SessionLost

from ..concurrency.fair_lock import Held
from ..concurrency.procedures import Procedure, run
from ..environments.context import SessionContext
from ..environments.host import EnvHost
from ..environments.placement import EnvironmentFactory
from ..environments.recovery_class import recovery_of
from ..ids import name_of
from ..journal.base import DeliveryRow, SessionChange
from ..recovery import NONE, REEXECUTE, RecoveryClass
from ..runtime.runtime import Runtime
from ..sandbox.base import Backend
from .reexecution import NotRepeatable, Reexecution
from .session import Session


class InstanceLoader:
    """Creates, restores and drops the instances of one environment's sessions.

    Args:
        runtime: Journal and sandboxes.
        factory: Creates an environment instance.
        reexecution: Runs journaled requests again; None disables recovery by re-execution.
        deterministic: Whether the spec or the operator declares the environment deterministic.
        snapshots: Whether snapshots may be taken after each step.

    Attributes:
        recovery: Recovery class of the environment, as known so far: it may change with the first instance of a factory
            function, and with the first result of ``snapshot()``.
    """

    def __init__(
        self,
        runtime: Runtime,
        factory: EnvironmentFactory,
        reexecution: Reexecution | None = None,
        *,
        deterministic: bool = False,
        snapshots: bool = True,
    ) -> None:
        self._runtime = runtime
        self._factory = factory
        self._reexecution = reexecution
        self._deterministic = deterministic
        self._snapshots = snapshots
        self.recovery = self._recovery_of(factory)

    def _recovery_of(self, env: EnvironmentFactory | Environment[Any, Any, Any]) -> RecoveryClass:
        """Return the recovery class of a factory or instance, given the environment's declarations."""
        found = recovery_of(env, deterministic=self._deterministic, snapshots=self._snapshots)
        return NONE if found.repeats_requests and self._reexecution is None else found

    def create(self, session: Session) -> Procedure[EnvHost]:
        """Create a new instance for a session.

        Raises:
            EnvironmentFailed: The factory failed.
        """
        self._runtime.threads.lend_to_loop()  # here, because not every application has a lifespan or a long-lived loop
        context = SessionContext(
            sandboxes=self._sandboxes,
            seed=session.row.seed,
            log=_SessionLog(session.sid),
            monotonic=self._runtime.clock.monotonic,
            share=(session.row.principal or "", session.sid),
        )
        return EnvHost.create(
            self._factory,
            context,
            self._runtime.threads,
            timeout_s=self._runtime.settings.step_timeout_s,
            owner=self,
            classify=self._recovery_of,
        )

    def _sandboxes(self) -> Backend:
        return self._runtime.sandboxes

    async def wake(self, held: Held, session: Session) -> EnvHost:
        """Create an instance and restore it to the session's last commit, if there is one.

        Returns:
            The instance. The caller attaches it to the session; if restoring fails, it is closed.

        Raises:
            SessionLost: The environment cannot be restored: there is no snapshot, re-execution gave different answers,
                or the last commit is of another episode than the session's current one.
            ServiceError: The environment could not be created or restored now; a retry may succeed.
        """
        differed: NotRepeatable | None = None
        while True:
            host = await run(self.create(session))
            try:
                last = await self._runtime.store.last_delivery(session.sid)
                if last is not None:
                    await self._bring_back(session, host, last, differed)
                return host
            except _DependsOnEarlier as error:
                await host.close()
                differed = error.differed
            except BaseException:
                await host.close()
                raise

    async def _bring_back(
        self, session: Session, host: EnvHost, last: DeliveryRow, differed: NotRepeatable | None
    ) -> None:
        """Bring a fresh instance to the last delivery: from its snapshot, or by running the journaled requests again.

        Args:
            session: The session of the instance.
            host: The fresh instance.
            last: The session's last delivery.
            differed: Why running the current episode's requests alone failed, so that those of the whole session are
                run now; None if that was not tried.

        Raises:
            SessionLost: ``last`` is not the delivery that the session stands on, or there is no way to restore it, or
                the requests gave something else when they were run again.
            ServiceError: It could not be restored now.
            _DependsOnEarlier: The requests gave something else, and the session's earlier episodes were not run before
                them: call again with a new instance and this error's ``differed``.
        """
        if last.eid == session.eid and last.t is not None:
            restoration = _Restoration(self, session, host, last, last.t, differed)
            # An environment that has snapshots now is restored from them, even if the session's class is another.
            if await host.recovery.restore(restoration) or await session.recovery.restore(restoration):
                return
        raise SessionLost(session.lost_message("its environment cannot be restored"), eid=session.eid, t=session.t)

    async def _run_again(
        self,
        session: Session,
        host: EnvHost,
        eid: str,
        t: int,
        differed: NotRepeatable | None,
        reexecution: Reexecution,
    ) -> None:
        outcome = "failed"
        try:
            await reexecution.run(host, eid, t, whole_session=differed is not None)
            outcome = "ok"
        except NotRepeatable as error:
            earlier = await reexecution.earlier_episodes(eid, t)
            if differed is None and earlier > 0:
                outcome = "earlier"
                _LOGGER.info(
                    "%s: its current episode alone gives something else; running %d earlier ones again first",
                    name_of(session.sid),
                    earlier,
                )
                raise _DependsOnEarlier(error) from error
            outcome = "differs"
            found = differed or error
            also = (
                f"; nor do they lead there after those of the session's {earlier} earlier episodes" if earlier else ""
            )
            await self._lose(session, f"{found}{also}")
            raise SessionLost(
                str(session.lost),
                eid=session.eid,
                t=session.t,
                **{"differs": found.differs} if found.differs else {},
            ) from error
        finally:
            if outcome != "earlier":
                self._runtime.metrics.reexecuted(session.row.environment, outcome)

    async def fork_name(self, eid: str) -> str | None:
        """Return the ``episode_id`` of a fork, for its environment's state; None for an episode that is no fork."""
        row = await self._runtime.store.episode(eid)
        return row.fork_name if row is not None else None

    async def _restore_credit(self, host: EnvHost, eid: str, t: int) -> None:
        """Rebuild the reward credit of an instance that was restored from the snapshot of delivery ``t``."""
        if await self.fork_name(eid) is not None:
            host.credit.forked()
            return
        turns = await self._runtime.store.turns(eid)
        host.credit.restored(t, only_steps=all(turn.kind == "step" for turn in turns if turn.t > 0))

    async def _lose(self, session: Session, why: str) -> None:
        session.lost = session.lost_message(why)
        if session.committed:
            await self._runtime.store.commit(SessionChange(session.sid, status="lost", lost=why))

    async def drop(self, held: Held, session: Session, why: str) -> None:
        """Close an instance that may be ahead of the journal. The next request restores another from the last commit.

        If the environment cannot be restored, the session is lost.

        Args:
            held: Proof that the session's lock is held.
            session: The session.
            why: Reason for the client if the session is lost.
        """
        host = session.take_host(held)
        if host is None:
            return
        await host.close()
        if not host.recovery.survives_restart:
            await self._lose(session, why)


@dataclass(slots=True)
class _Restoration:
    """Restores one new instance to one delivery; see `errata_server.recovery.Restoration`."""

    _loader: InstanceLoader
    _session: Session
    _host: EnvHost
    _last: DeliveryRow
    _t: int
    _differed: NotRepeatable | None

    async def from_snapshot(self) -> bool:
        host, last = self._host, self._last
        if last.state is None or not host.recovery.takes_snapshots:
            return False
        await host.restore(Snapshot(last.state, last.refs))
        if last.kind == "fork":
            await host.forked(await self._loader.fork_name(last.eid) or last.eid)
            return True
        if host.credit.compute is not None:
            await self._loader._restore_credit(host, last.eid, self._t)
        if not host.counts_forks and (name := await self._loader.fork_name(last.eid)) is not None:
            await host.continues_fork(name, self._t)
        return True

    async def by_reexecution(self) -> bool:
        reexecution = self._loader._reexecution
        if reexecution is None or not self._session.recovery.repeats_requests:
            return False
        if not self._host.recovery.survives_restart:
            self._host.recovery = REEXECUTE  # the session keeps its recovery class, whatever is declared now
        await self._loader._run_again(self._session, self._host, self._last.eid, self._t, self._differed, reexecution)
        return True


class _DependsOnEarlier(Exception):
    """Re-executing only the current episode gave different answers, and the session has earlier episodes."""

    def __init__(self, differed: NotRepeatable) -> None:
        super().__init__(str(differed))
        self.differed = differed


class _SessionLog(logging.LoggerAdapter[logging.Logger]):
    """Adds the session's name to each log line; an adapter, because `logging` never frees loggers."""

    def __init__(self, sid: str) -> None:
        super().__init__(_LOGGER)
        self._sid = sid

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return f"{name_of(self._sid)}: {msg}", kwargs


_LOGGER = logging.getLogger("errata.session")
