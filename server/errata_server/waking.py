"""How a session gets an environment instance: a new one, one restored from its last commit, and when to give one up."""

from __future__ import annotations

import logging
from typing import Any

from errata_protocol.environment import Recovery, Snapshot
from errata_protocol.errors import SessionLost

from .context import SessionContext
from .hosting import EnvHost, EnvironmentFactory
from .ids import name_of
from .journal.base import SessionChange
from .runtime import Runtime
from .session import Session


class Waker:
    """Makes, restores and drops the instances of one environment's sessions.

    Args:
        runtime: Journal and sandboxes.
        factory: Makes one environment instance.
    """

    def __init__(self, runtime: Runtime, factory: EnvironmentFactory) -> None:
        self._runtime = runtime
        self._factory = factory

    async def create(self, session: Session) -> EnvHost:
        """Return a fresh instance.

        Raises:
            EnvironmentFailed: The factory failed.
        """
        context = SessionContext(
            sandboxes=lambda: self._runtime.sandboxes,
            seed=session.row.seed,
            log=_SessionLog(logging.getLogger("errata.session"), {"session": name_of(session.sid)}),
        )
        return await EnvHost.create(
            self._factory,
            context,
            self._runtime.threads,
            timeout_s=self._runtime.settings.step_timeout_s,
            owner=self,
        )

    async def wake(self, session: Session) -> EnvHost:
        """Return an instance that stands where the session's last commit left it; a fresh one before any.

        Raises:
            SessionLost: The last commit holds no snapshot, or is not the one this session stands on.
            ServiceError: The environment could not be restored now.
        """
        host = await self.create(session)
        try:
            last = await self._runtime.read(self._runtime.journal.last_delivery, session.sid)
            if last is not None:
                if last.state is None or last.eid != session.eid:
                    raise SessionLost(session.lost_message("its environment cannot be restored"))
                await host.restore(Snapshot(last.state, last.refs))
                if last.kind == "fork":
                    await host.forked(last.eid)
        except BaseException:
            await host.close()
            raise
        return host

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
        if host.recovery is not Recovery.SNAPSHOT:
            session.lost = session.lost_message(why)
            if session.committed:
                await self._runtime.journal.commit(SessionChange(session.sid, status="lost"))


class _SessionLog(logging.LoggerAdapter[logging.Logger]):
    """Names the session in each line; an adapter, because loggers are kept for ever."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return f"{self.extra['session']}: {msg}" if self.extra else msg, kwargs
