"""Creates, restores and discards the environment instance of a session, as its recovery class says."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from openenv.core.env_server.interfaces import Environment

from errata_protocol.environment import Snapshot
from errata_protocol.errors import SessionLost

from ..concurrency.fair_lock import Turn
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
    """Makes, restores and drops the instances of one environment's sessions.

    Args:
        runtime: Journal and sandboxes.
        factory: Makes one environment instance.
        reexecution: Runs journaled requests again; None where nothing can decode them, and then no session is
            continued so.
        deterministic: The environment is declared so, by its spec or its operator.
        snapshots: The environment's snapshots may be taken after each step.

    Attributes:
        recovery: Recovery class of the environment, as far as it is known: a factory function shows it with its first
            instance, and a ``snapshot()`` with its first result.
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
        """Return the recovery class of the environment's factory or instance under what is declared of it."""
        found = recovery_of(env, deterministic=self._deterministic, snapshots=self._snapshots)
        return NONE if found.repeats_requests and self._reexecution is None else found

    def create(self, session: Session) -> Procedure[EnvHost]:
        """Return a fresh instance.

        Raises:
            EnvironmentFailed: The factory failed.
        """
        self._runtime.threads.lend_to_loop()  # here, because not every application has a lifespan, nor a loop for long
        context = SessionContext(
            sandboxes=self._sandboxes,
            seed=session.row.seed,
            log=_SessionLog(session.sid),
            monotonic=self._runtime.clock.monotonic,
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

    async def wake(self, turn: Turn, session: Session) -> EnvHost:
        """Return an instance that stands where the session's last commit left it; a fresh one before any.

        Raises:
            SessionLost: The last commit is not the one this session stands on, or the environment cannot be brought
                there: it has no snapshot, or its requests, run again, gave something else.
            ServiceError: The environment could not be restored now.
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
        """Bring a fresh instance to the last delivery.

        Args:
            session: Whose instance.
            host: The instance.
            last: The delivery.
            differed: The outcome of running the current episode's requests alone; None if that was not tried.
        """
        if last.eid == session.eid and last.t is not None:
            restoration = _Restoration(self, session, host, last, last.t, differed)
            # An environment that has snapshots by now is restored from them, whatever class its client was promised.
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

    async def _restore_credit(self, host: EnvHost, eid: str, t: int) -> None:
        """Note which deliveries were rated before the snapshot that ``host`` was restored from."""
        row = await self._runtime.store.episode(eid)
        if row is not None and row.origin_eid is not None:
            host.credit.forked()
            return
        turns = await self._runtime.store.turns(eid)
        host.credit.restored(t, only_steps=all(turn.kind == "step" for turn in turns if turn.t > 0))

    async def _lose(self, session: Session, why: str) -> None:
        session.lost = session.lost_message(why)
        if session.committed:
            await self._runtime.store.commit(SessionChange(session.sid, status="lost", lost=why))

    async def drop(self, turn: Turn, session: Session, why: str) -> None:
        """Give up an instance that may be ahead of the journal; the next request wakes the last commit, if it can.

        Args:
            turn: The session's.
            session: Whose instance.
            why: The reason that the client is given where the session is lost with it.
        """
        host = session.take_host(turn)
        if host is None:
            return
        await host.close()
        if not host.recovery.survives_restart:
            await self._lose(session, why)


@dataclass(slots=True)
class _Restoration:
    """One fresh instance and the delivery it is to be brought to; see `errata_server.recovery.Restoration`."""

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
            await host.forked(last.eid)
        elif host.credit.compute is not None:
            await self._loader._restore_credit(host, last.eid, self._t)
        return True

    async def by_reexecution(self) -> bool:
        reexecution = self._loader._reexecution
        if reexecution is None or not self._session.recovery.repeats_requests:
            return False
        if not self._host.recovery.survives_restart:
            self._host.recovery = REEXECUTE  # the class that its client was promised holds, whatever is declared now
        await self._loader._run_again(self._session, self._host, self._last.eid, self._t, self._differed, reexecution)
        return True


class _DependsOnEarlier(Exception):
    """The requests of the current episode alone do not lead back, and the session has earlier ones."""

    def __init__(self, differed: NotRepeatable) -> None:
        super().__init__(str(differed))
        self.differed = differed


class _SessionLog(logging.LoggerAdapter[logging.Logger]):
    """Names the session in each line; an adapter, because loggers are kept for ever."""

    def __init__(self, sid: str) -> None:
        super().__init__(_LOGGER)
        self._sid = sid

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return f"{name_of(self._sid)}: {msg}", kwargs


_LOGGER = logging.getLogger("errata.session")
