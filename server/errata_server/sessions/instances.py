"""Creates, restores and discards the environment instance of a session, as its recovery class says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from openenv.core.env_server.interfaces import Environment

from errata_protocol.environment import Recovery, Snapshot
from errata_protocol.errors import ServiceError, SessionLost

from ..concurrency.threads import Place
from ..environments.context import SessionContext
from ..environments.host import EnvHost, factory_failed, scoped
from ..environments.placement import EnvironmentFactory, place_for
from ..environments.recovery_class import recovery_of
from ..ids import name_of
from ..journal.base import DeliveryRow, SessionChange
from ..runtime.runtime import Runtime
from ..sandbox.base import Backend
from .reexecution import NotRepeatable, Reexecution
from .session import Session


class Waker:
    """Makes, restores and drops the instances of one environment's sessions.

    Args:
        runtime: Journal and sandboxes.
        factory: Makes one environment instance.
        reexecution: Runs journaled requests again; None where nothing can read them back, and then no session is
            continued so.
        deterministic: The environment is declared so, by its spec or its operator.
        snapshots: The environment's snapshots may be taken after each step.
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

    def recovery_of(self, env: EnvironmentFactory | Environment[Any, Any, Any]) -> Recovery:
        """Return the recovery class of the environment's factory or instance under what is declared of it."""
        found = recovery_of(env, deterministic=self._deterministic, snapshots=self._snapshots)
        return Recovery.NONE if found is Recovery.REEXECUTE and self._reexecution is None else found

    async def create(self, session: Session) -> EnvHost:
        """Return a fresh instance.

        Raises:
            EnvironmentFailed: The factory failed.
        """
        self._runtime.threads.lend_to_loop()  # here, because not every application has a lifespan, nor a loop for long
        return await EnvHost.create(
            self._factory,
            self.context(session),
            self._runtime.threads,
            timeout_s=self._runtime.settings.step_timeout_s,
            owner=self,
            classify=self.recovery_of,
        )

    # -- the parts of `create`, for whoever has no task to wait in ------------------------------------------------

    def factory_failed(self, error: Exception, timeout_s: float) -> ServiceError:
        """As `host.factory_failed`, of this factory."""
        return factory_failed(self._factory, error, timeout_s)

    def context(self, session: Session) -> SessionContext:
        """Return what `current_session` returns to the session's instance."""
        return SessionContext(
            sandboxes=self._sandboxes,
            seed=session.row.seed,
            log=_SessionLog(session.sid),
            monotonic=self._runtime.clock.monotonic,
        )

    def _sandboxes(self) -> Backend:
        return self._runtime.sandboxes

    def place(self) -> Place:
        """Return where the factory is to be called.

        Raises:
            CapacityReached: No thread is left.
        """
        self._runtime.threads.lend_to_loop()
        return place_for(self._factory, self._runtime.threads, self)

    def bound_factory(self, context: SessionContext) -> Callable[[], Any]:
        """Return the factory as a call in which `current_session` is ``context``."""
        return scoped(context, self._factory)

    def host(self, env: object, context: SessionContext, place: Place) -> EnvHost:
        """Return the host of what the factory returned at ``place``.

        Raises:
            TypeError: It is no environment.
        """
        return EnvHost.of(env, self._factory, context, self._runtime.threads, place, self.recovery_of)

    async def wake(self, session: Session) -> EnvHost:
        """Return an instance that stands where the session's last commit left it; a fresh one before any.

        Raises:
            SessionLost: The last commit is not the one this session stands on, or the environment cannot be brought
                there: it has no snapshot, or its requests, run again, gave something else.
            ServiceError: The environment could not be restored now.
        """
        differed: NotRepeatable | None = None
        while True:
            host = await self.create(session)
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
            differed: What came of running the current episode's requests alone; None if that was not tried.
        """
        if last.eid == session.eid and last.t is not None:
            if last.state is not None and host.recovery is Recovery.SNAPSHOT:
                await host.restore(Snapshot(last.state, last.refs))
                if last.kind == "fork":
                    await host.forked(last.eid)
                elif host.credit.compute is not None:
                    await self._look_at_credit(host, last.eid, last.t)
                return
            if session.row.recovery == Recovery.REEXECUTE and self._reexecution is not None:
                if host.recovery is Recovery.NONE:
                    host.recovery = Recovery.REEXECUTE  # what its client was told holds, whatever is declared now
                await self._run_again(session, host, last.eid, last.t, differed, self._reexecution)
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

    async def _look_at_credit(self, host: EnvHost, eid: str, t: int) -> None:
        """Tell what may have been judged before the snapshot that ``host`` was restored from."""
        row = await self._runtime.store.episode(eid)
        if row is not None and row.origin_eid is not None:
            host.credit.forked()
            return
        turns = await self._runtime.store.turns(eid)
        host.credit.restored(t, only_steps=all(turn.kind == "step" for turn in turns if turn.t > 0))

    async def _lose(self, session: Session, why: str) -> None:
        session.lost = session.lost_message(why)
        if session.committed:
            await self._runtime.journal.commit(SessionChange(session.sid, status="lost", lost=why))

    async def drop(self, session: Session, why: str) -> None:
        """Give up an instance that may be ahead of the journal; the next request wakes the last commit, if it can.

        Args:
            session: Whose instance.
            why: What to tell where the session is lost with it.
        """
        host, session.host = session.host, None
        if host is None:
            return
        await host.close()
        if host.recovery is Recovery.NONE:
            await self._lose(session, why)


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
