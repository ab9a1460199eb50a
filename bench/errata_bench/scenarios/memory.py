"""Resident memory of idle sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ..budgets import Budget
from ..figures import Round
from ..load import Load
from ..scenario import ACTION, PLAIN, STOCK, Found, Metric, Plan, Scenario, alternate
from ..servers import Server
from ..stage import Stage, stage, target
from .restart import TARGET as KEPT

MUX = "errata, mux"
HIBERNATED = "errata, hibernated"
HIBERNATE_S = 120.0

METRICS = (
    Metric("kib_per_session", "resident memory a session", "KiB"),
    Metric("threads", "server's threads"),
    Metric("instances", "environment instances alive", compared=False),
    Metric("load_average", "load average", compared=False),
)


async def _warm(load: Load) -> None:
    """Open, step and close one session: memory that the first one takes is mostly that of code."""
    await load.do("open", sessions=1)
    await load.do("step", seconds=60, action=ACTION, limit=3)
    await load.do("close")


async def _held(here: Stage, server: Server, load: Load, reader: Load | None = None) -> Round:
    """Return a server's growth in memory with all sessions idle; with a ``reader`` of its metrics, hibernated."""
    sessions = here.plan.sessions
    await _warm(load)
    await server.quiet(64)
    before = server.rss_kib()
    await load.do("open", sessions=sessions)
    await load.do("step", seconds=300, action=ACTION, limit=1)
    alive, threads = float(sessions), sessions + 100
    if reader is not None:
        await load.do("detach")
        alive, threads = await _asleep(reader), 64
    await server.quiet(threads, timeout_s=10)
    return {
        "kib_per_session": (server.rss_kib() - before) / sessions,
        "threads": float(server.threads()),
        "instances": alive,
    }


async def _asleep(reader: Load) -> float:
    """Wait until no session has an instance, at most `HIBERNATE_S`; return how many still have one."""
    end = time.monotonic() + HIBERNATE_S
    while True:
        await asyncio.sleep(0.5)
        alive = (await reader.do("metric", name="errata_sessions_active"))["value"]
        if not alive or time.monotonic() > end:
            return alive


def _arm(plan: Plan, which: str) -> Callable[[], Awaitable[Round]]:
    async def measure() -> Round:
        async with stage(plan) as here:  # a new server each time: a process does not give back all its memory
            if which == HIBERNATED:
                server = await here.errata(KEPT, env={"ERRATA_DETACH_TTL_S": "1"})
                load, reader = await here.load("mux", server), await here.load("http", server)
                return await _held(here, server, load, reader)
            if which == STOCK:
                server = await here.stock("any-thread", deflate=True)
            else:
                server = await here.errata(target("any-thread"))
            load = await (here.load("mux", server) if which == MUX else here.load("plain", server, as_upstream=True))
            return await _held(here, server, load)

    return measure


async def run(plan: Plan) -> Found:
    """Open all sessions on a new server in each arm and round, and step each once."""
    notes = [
        "(resident memory with all sessions - before) / sessions, each having done a reset and a step.",
        "Plain sockets with OpenEnv's own client settings. Hibernated: sockets gone, detach_ttl passed.",
    ]
    return await alternate(plan, {which: _arm(plan, which) for which in (STOCK, PLAIN, MUX, HIBERNATED)}, notes)


SCENARIOS = (
    Scenario(
        "memory",
        "memory of idle sessions",
        run,
        METRICS,
        (
            Budget(MUX, "kib_per_session", "<=", 5),
            Budget(PLAIN, "kib_per_session", "<=", 35),
            Budget(HIBERNATED, "instances", "<=", 0, at=None),
        ),
    ),
)
