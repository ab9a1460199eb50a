"""The server is killed with SIGKILL while all sessions step, started again, and the sessions continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from ..budgets import Budget
from ..figures import Round
from ..load import Load
from ..scenario import ACTION, MUX_64, Found, Plan, Scenario, alternate
from ..servers import free_port
from ..stage import stage
from . import resume

TARGET = "errata_bench.kept_environment:KeptEcho"

NOTES = (
    "With snapshot() and restore(); seconds count from the kill on, the new process's start included.",
    "Each session's next reply has to name the delivery that its id asks for: no step acted twice or was lost.",
)


async def outage(plan: Plan, load: Load, kill: Callable[[], None], start: Callable[[], Awaitable[None]]) -> Round:
    """Kill while all sessions step, then resume each of them and step once in it.

    Args:
        plan: How to run the scenario.
        load: The load generator that has the sessions.
        kill: Function that kills what serves some of the sessions, or all.
        start: Function that starts it again.
    """
    stepping = asyncio.ensure_future(load.do("lose", action=ACTION))
    await asyncio.wait((stepping,), timeout=plan.seconds / 4)
    if stepping.done():
        stepping.result()  # its log has the reason
    killed_at = time.monotonic()
    kill()
    await stepping
    resuming = asyncio.ensure_future(load.do("resume", since=killed_at, action=ACTION))
    await start()
    return await resuming


async def run(plan: Plan) -> Found:
    """Kill, start, resume and step once in each session, in each round."""
    async with stage(plan) as here:
        port = ("--port", str(free_port()))
        server = await here.errata(TARGET, *port)
        load = await here.load("mux", server)
        await load.do("open", sessions=plan.sessions)

        async def start() -> None:
            nonlocal server
            server = await here.errata(TARGET, *port)

        return await alternate(plan, {MUX_64: lambda: outage(plan, load, lambda: server.kill(), start)}, NOTES)


SCENARIOS = (
    Scenario(
        "restart",
        "kill -9, start again, all sessions go on",
        run,
        resume.METRICS,
        (Budget(MUX_64, "first_stepped_s", "<=", 5), Budget(MUX_64, "all_stepped_s", "<=", 30)),
        baseline=None,
    ),
)
