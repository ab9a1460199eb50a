"""`Worker`: what a forked worker runs: the server of one shard, whose connections come from the shared address."""

from __future__ import annotations

import asyncio
import copy
import logging
from pathlib import Path

import uvicorn

from errata_os.division import Division, divide
from errata_protocol.errors import InvalidRequest

from ..doors.mux.driver import wire_sid
from ..runtime.registry import RUNTIMES
from ..runtime.runtime import Runtime
from ..sandbox import registry
from ..serve.connections import Connections
from ..serve.health_port import STUCK_S
from ..serve.last_sessions import sessions_left
from ..serve.server import Served
from ..workers import MOST_WORKERS, WORKERS
from .acceptor import Acceptor
from .drain import Drain
from .forwarder import Arrivals, install
from .member import START_S, Member, Plan

log = logging.getLogger("errata.fleet")


class Worker:
    """One worker, as `errata_server.serve.server.run` sees it: where its connections come from.

    Args:
        plan: What all workers share.
        number: The worker's number.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self.member = Member(plan, number)
        self.url = plan.url
        self.probes = plan.probes
        self._announces = number == 0 and not plan.board.all_started
        self._acceptor: Acceptor | None = None
        self._leaving: asyncio.Task[None] | None = None

    def join(self) -> Path:
        """Make this process the worker: its sessions are of the fleet. Return its data directory."""
        directories = self.member.plan.directories
        division = Division(self.member.worker, len(directories), directories[0])
        divide(division)
        WORKERS.set_limit(division.share(MOST_WORKERS))
        RUNTIMES.join(self.member)
        return directories[self.member.worker]

    def enter(self, served: Served) -> None:
        """Make an application one of a fleet. Call it before its first request.

        Raises:
            InvalidRequest: Several workers cannot serve an environment.
        """
        backend = served.runtime.settings.sandbox
        sandboxed = [spec.name for spec in served.specs if spec.sandbox]
        if sandboxed and not registry.backend_type(backend).shared:
            raise InvalidRequest(
                f"{', '.join(sandboxed)} runs commands in sandboxes of the backend {backend}, which belong to one "
                "process: serve it with --workers 1, or with the backend namespace"
            )
        self.member.serve([spec.name for spec in served.specs])
        install(served.app, self.member, tokens=bool(served.runtime.settings.tokens))
        self._served = served

    def stuck_others(self) -> list[str]:
        """Return a text for each other worker whose event loop has not run for `STUCK_S`."""
        board = self.member.plan.board
        return [
            f"the event loop of worker {worker} has not run for {board.silent_s(worker):.0f} s"
            for worker in board.stuck(STUCK_S)
            if worker != self.member.worker
        ]

    async def open(self, server: uvicorn.Server) -> bool:
        """Take connections; return whether this worker announces the server, once all workers take connections."""
        board, runtime = self.member.plan.board, self._served.runtime
        await runtime.start()
        self.member.show(runtime.metrics)
        if not board.has_started(self.member.worker):
            for row in await runtime.store.open_sessions():
                if row.key_hash is not None:
                    self.member.took(wire_sid(row.sid))

        def stop() -> None:
            server.should_exit = True

        drain = Drain(self.member, lambda: sessions_left(runtime), stop, runtime.clock.monotonic)
        runtime.readiness.add(drain.trouble)
        arrivals = Arrivals(self._served.app, runtime, self.member, drain)
        from_others = copy.copy(server.config)
        from_others.app, from_others.loaded = arrivals, False
        from_others.load()

        def beaten() -> None:
            drain.beaten()
            runtime.members.look()
            self._leave_pages(runtime)

        self._acceptor = Acceptor(
            self.member,
            Connections.of(server.config),
            lambda: _protocol(server, server.config),
            lambda: _protocol(server, from_others),
            beaten,
        )
        self._acceptor.open()
        board.start(self.member.worker)
        if not self._announces:
            return False
        while not (board.all_started or server.should_exit):  # noqa: ASYNC110  # shared memory has no event
            await asyncio.sleep(START_S)
        return board.all_started

    def _leave_pages(self, runtime: Runtime) -> None:
        """Close the session of OpenEnv's pages here while they are at another worker, as when this one drains."""
        if self.member.sole.home == self.member.worker or not runtime.pages.are_used:
            return
        if self._leaving is None or self._leaving.done():
            self._leaving = asyncio.create_task(runtime.pages.leave())
            self._leaving.add_done_callback(_log_failed)

    async def close(self) -> None:
        """Take no further connections."""
        if self._leaving is not None:
            self._leaving.cancel()
        if self._acceptor is not None:
            self._acceptor.close()
        self.member.plan.listening.close()


def _log_failed(leaving: asyncio.Task[None]) -> None:
    if not leaving.cancelled() and (error := leaving.exception()) is not None:
        log.error("the session of the web interface could not be closed: it is tried again", exc_info=error)


def _protocol(server: uvicorn.Server, config: uvicorn.Config) -> asyncio.Protocol:
    return config.http_protocol_class(  # type: ignore[call-arg]
        config=config, server_state=server.server_state, app_state=server.lifespan.state
    )
