"""The servers and load generators of one scenario, started together and ended together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from errata_protocol.late_imports import OPENENV_WEB_INTERFACE, import_without

from .figures import Round
from .load import Load
from .scenario import AGAINST, ERRATA, STOCK, Plan
from .servers import Server

DOORS = 2
"""Limit of sessions in multiples of the plan's: a server may hold all sessions over two kinds of sockets at once."""
SPARE = 10
"""Additional sessions of the limit: those of an earlier round may still be ending."""


class Stage:
    """The servers and load generators of a scenario.

    Args:
        plan: How to run it.
        directory: Directory for the data of its servers.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self._starting: list[asyncio.Future[Server]] = []
        self._loads: list[Load] = []
        self._opened: dict[tuple[str, int], Load] = {}

    async def stock(self, kind: str, *, deflate: bool = False, env: dict[str, str] | None = None) -> Server:
        """Start a stock server."""
        return await self._start(partial(Server.stock, kind, self._places, deflate=deflate, env=env))

    async def errata(
        self,
        target: str,
        *options: str,
        name: str = ERRATA,
        env: dict[str, str] | None = None,
        python: Path | None = None,
    ) -> Server:
        """Start ``errata serve``; ``name`` is that of its data directory, kept until the stage ends."""
        directory = self.directory / name
        return await self._start(
            partial(Server.errata, target, self._places, directory, *options, env=env, python=python)
        )

    async def servers(
        self, kind: str, *, deflate: bool = False, env: Mapping[str, dict[str, str]] | None = None
    ) -> dict[str, Server]:
        """Start all servers that the plan measures with one of our environments.

        Args:
            kind: Name of the environment.
            deflate: The stock server compresses.
            env: Environment variables by server.

        Returns:
            By name: `STOCK` unless it is left out, `ERRATA`, and `AGAINST` where there is a second interpreter.
        """
        env = env or {}
        starting = {}
        if self.plan.stock:
            starting[STOCK] = self.stock(kind, deflate=deflate, env=env.get(STOCK))
        for name in self.plan.errata_servers:
            python = self.plan.against if name == AGAINST else None
            starting[name] = self.errata(target(kind), name=name, env=env.get(name), python=python)
        return dict(zip(starting, await asyncio.gather(*starting.values()), strict=True))

    async def errata_in_memory(self, target: str) -> Server:
        """Start Errata with its journal in memory."""
        return await self._start(partial(Server.errata_in_memory, target, self._places))

    async def load(self, door: str, server: Server, **options: Any) -> Load:
        """Start a load generator for a server."""
        if door == "mux":
            options.setdefault("sockets", self.plan.sockets)
        load = await Load.start(door, server.port, **options)
        self._loads.append(load)
        return load

    async def opened(self, door: str, server: Server, **options: Any) -> Load:
        """Return the load generator that holds all sessions open; a second call returns the same one.

        Each arm calls it, so that sessions that cannot be opened fail only their own arms.
        """
        load = self._opened.get((door, server.port))
        if load is None or load.failed:
            load = await self.load(door, server, **options)
            self.plan.progress(f"opening {self.plan.sessions:,} sessions at the {door} door")
            await load.do("open", sessions=self.plan.sessions)
            self._opened[door, server.port] = load
        return load

    async def end(self) -> None:
        """End all processes, load generators first: a server would wait for their sockets."""
        await asyncio.gather(*(load.stop() for load in self._loads))
        started = await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in started if isinstance(server, Server)))
        self._starting, self._loads, self._opened = [], [], {}

    async def _start(self, start: Callable[[], Server]) -> Server:
        # In a thread, not a task: the end of the event loop would cancel a task, and its server would not be ended.
        starting = asyncio.get_running_loop().run_in_executor(None, start)
        self._starting.append(starting)
        return await asyncio.shield(starting)

    @property
    def _places(self) -> int:
        return DOORS * self.plan.sessions + SPARE


@contextlib.asynccontextmanager
async def stage(plan: Plan) -> AsyncIterator[Stage]:
    """Yield a stage, and end it also after an error."""
    with plan.scratch() as directory:
        made = Stage(plan, directory)
        try:
            yield made
        finally:
            await made.end()


def target(kind: str) -> str:
    """Return the target of ``errata serve`` for one of our environments."""
    import_without(*OPENENV_WEB_INTERFACE)  # gradio, which takes seconds: this process serves nothing
    from .environments import KINDS

    return f"errata_bench.environments:{KINDS[kind].__name__}"


async def stepping(server: Server, load: Load, seconds: float, **how: Any) -> Round:
    """Step all sessions of a load for a while, and add the server's CPU time to the figures."""
    cpu = server.cpu_s()
    figures = await load.do("step", seconds=seconds, **how)
    return {
        **figures,
        "server_cpu_us": (server.cpu_s() - cpu) / figures["steps"] * 1e6,
        "threads": float(server.threads()),
    }
