"""Steps over multiplexed sockets to a server of one process and to one of two workers."""

from __future__ import annotations

import asyncio
from functools import partial

from ..budgets import Budget
from ..figures import Round
from ..scenario import ACTION, Found, Metric, Plan, Scenario, alternate
from ..servers import Server
from ..stage import stage, target

WORKERS = 2
FRAMES = (1, 64)
MIB = 1024**2

METRICS = (
    Metric("steps_per_s", "steps a second", "1/s"),
    Metric("p99_ms", "latency, 99th percentile", "ms"),
    Metric("server_cpu_us", "all the server's processes' CPU a step", "us"),
    Metric("client_cpu_us", "load generator's CPU a step", "us", compared=False),
    Metric("load_average", "load average", compared=False),
)


def arm(workers: int, frame: int) -> str:
    """Return the name of an arm."""
    return f"workers {workers}, mux, frames of {frame}"


async def run(plan: Plan) -> Found:
    """Hold all sessions open on both servers, and step them in turn. The load knows no workers."""
    async with stage(plan) as here:
        kind = target("any-thread")
        one, several = await asyncio.gather(
            here.errata(kind, name="one"), here.errata(kind, "--workers", str(WORKERS), name="several")
        )
        notes = [
            f"worker {number}: {cpu_s:.2f} s of CPU from its fork to its first connection, "
            f"{private / MIB:.0f} MiB of private memory"
            for number, (cpu_s, private) in enumerate(map(_cost, several.children()))
        ]

        async def step(server: Server, pids: list[int], frame: int) -> Round:
            load = await here.opened("mux", server)
            before = sum(map(Server.cpu_s_of, pids))
            figures = await load.do("step", seconds=plan.seconds, action=ACTION, frame=frame)
            used_s = sum(map(Server.cpu_s_of, pids)) - before
            return {**figures, "server_cpu_us": used_s / figures["steps"] * 1e6}

        arms = {}
        for frame in FRAMES:
            arms[arm(1, frame)] = partial(step, one, [one.process.pid], frame)
            arms[arm(WORKERS, frame)] = partial(step, several, several.children(), frame)
        return await alternate(plan, arms, notes)


def _cost(pid: int) -> tuple[float, int]:
    """Return a process's CPU time, seconds, and its private memory, bytes."""
    return Server.cpu_s_of(pid), Server.private_bytes_of(pid)


SCENARIOS = (
    Scenario(
        "workers",
        f"steps over mux: one process and {WORKERS} workers",
        run,
        METRICS,
        (
            Budget(arm(WORKERS, 64), "server_cpu_us", "<=", 1.05, to=arm(1, 64), at=2_000),
            Budget(arm(WORKERS, 1), "server_cpu_us", "<=", 1.05, to=arm(1, 1), at=2_000),
            Budget(arm(WORKERS, 64), "steps_per_s", ">=", 1.6, to=arm(1, 64), at=2_000),
        ),
        sessions=2_000,
        seconds=8.0,
        baseline=arm(1, 64),
    ),
)
