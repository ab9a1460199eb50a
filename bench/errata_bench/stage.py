"""The servers and load generators of one scenario, started together and ended together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from .figures import Round
from .load import Load
from .scenario import Plan
from .servers import Server

DOORS = 2
"""A server may hold all sessions at two doors at once."""
SPARE = 10
"""Places beyond that: sessions of an earlier round may still be ending."""


class Stage:
    """What a scenario runs on.

    Args:
        plan: How it is to run.
        directory: Where its servers keep their data.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self._servers: list[Server] = []
        self._loads: list[Load] = []
        self._opened: dict[tuple[str, int], Load] = {}

    async def stock(self, kind: str, *, deflate: bool = False, env: dict[str, str] | None = None) -> Server:
        """Start a stock server."""
        places = DOORS * self.plan.sessions + SPARE
        return self._kept(await asyncio.to_thread(Server.stock, kind, places, deflate=deflate, env=env))

    async def errata(
        self, target: str, *options: str, name: str = "errata", env: dict[str, str] | None = None
    ) -> Server:
        """Start ``errata serve``; ``name`` is that of its data directory, kept until the stage ends."""
        places = DOORS * self.plan.sessions + SPARE
        return self._kept(
            await asyncio.to_thread(Server.errata, target, places, self.directory / name, *options, env=env)
        )

    async def forgetful(self, target: str) -> Server:
        """Start Errata with its journal in memory."""
        return self._kept(await asyncio.to_thread(Server.forgetful, target, DOORS * self.plan.sessions + SPARE))

    async def load(self, door: str, server: Server, **options: Any) -> Load:
        """Start a load generator for a server."""
        if door == "mux":
            options.setdefault("sockets", self.plan.sockets)
        load = await Load.start(door, server.port, **options)
        self._loads.append(load)
        return load

    async def opened(self, door: str, server: Server, **options: Any) -> Load:
        """Return a load generator that holds all sessions open, the same one each time it is asked for.

        Called by each arm rather than before all of them, so that a door that does not open fails its own arms only.
        """
        load = self._opened.get((door, server.port))
        if load is None:
            load = await self.load(door, server, **options)
            self.plan.progress(f"opening {self.plan.sessions:,} sessions at the {door} door")
            await load.do("open", sessions=self.plan.sessions)
            self._opened[door, server.port] = load
        return load

    async def end(self) -> None:
        """End all of them; load generators first, whose sockets a server would wait for."""
        await asyncio.gather(*(load.stop() for load in self._loads))
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self._servers))
        self._servers, self._loads, self._opened = [], [], {}

    def _kept(self, server: Server) -> Server:
        self._servers.append(server)
        return server


@contextlib.asynccontextmanager
async def stage(plan: Plan) -> AsyncIterator[Stage]:
    """Give a stage, and end it whatever happens."""
    with plan.scratch() as directory:
        made = Stage(plan, directory)
        try:
            yield made
        finally:
            await made.end()


def target(kind: str) -> str:
    """Return what ``errata serve`` calls one of our environments."""
    from .environments import KINDS

    return f"errata_bench.environments:{KINDS[kind].__name__}"


async def stepping(server: Server, load: Load, seconds: float, **how: Any) -> Round:
    """Step all sessions of a load for a while, and add what it costs the server."""
    cpu = server.cpu_s()
    figures = await load.do("step", seconds=seconds, **how)
    return {
        **figures,
        "server_cpu_us": (server.cpu_s() - cpu) / figures["steps"] * 1e6,
        "threads": float(server.threads()),
    }
