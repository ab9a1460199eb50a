"""The cost of the durable journal: the same steps with a journal in memory, on disk, and on disk and synced."""

from __future__ import annotations

import asyncio
from functools import partial

from ..budgets import Budget
from ..figures import Round
from ..scenario import ACTION, Found, Plan, Scenario, alternate
from ..servers import Server
from ..stage import stage, stepping, target
from . import steps

MEMORY = "in memory"
METRICS = tuple(metric for metric in steps.METRICS if metric.key != "threads")


async def run(plan: Plan) -> Found:
    """Step the same sessions on three servers in turn, in frames of 64 and of 1."""
    kind = target("any-thread")
    async with stage(plan) as here:
        started = await asyncio.gather(
            here.errata_in_memory(kind),
            here.errata(kind, "--no-fsync", name="unsynced"),
            here.errata(kind, name="synced"),
        )
        servers = dict(zip((MEMORY, "on disk, not synced", "on disk, synced"), started, strict=True))

        async def step(server: Server, frame: int) -> Round:
            load = await here.opened("mux", server)
            return await stepping(server, load, plan.seconds, action=ACTION, frame=frame)

        arms = {
            f"{name}, frames of {frame}": partial(step, server, frame)
            for name, server in servers.items()
            for frame in (1, 64)
        }
        return await alternate(plan, arms)


SCENARIOS = (
    Scenario(
        "journal",
        "throughput with the journal in memory, on disk, and synced before each reply",
        run,
        METRICS,
        (Budget("on disk, synced, frames of 64", "steps_per_s", ">=", 0.75, to=f"{MEMORY}, frames of 64"),),
        baseline=f"{MEMORY}, frames of 64",
    ),
)
