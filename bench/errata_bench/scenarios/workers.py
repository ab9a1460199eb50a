"""Steps over multiplexed sockets to a server of one process and to one of two workers; kills of one of four workers."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

from ..budgets import Budget
from ..figures import Round
from ..scenario import ACTION, Found, Metric, Plan, Scenario, alternate
from ..servers import Server, free_port
from ..stage import stage, target
from . import restart, resume

WORKERS = 2
KILLED_WORKERS = 4
WORKER, SUPERVISOR = "kill -9 of a worker", "kill -9 of the supervisor"
GONE_S = 0.01
"""Time between two looks at whether the workers of a killed supervisor have ended, seconds."""
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


async def run_killed(plan: Plan) -> Found:
    """Kill a worker, and the supervisor, in each round. The load knows no workers, and all its sockets are cut.

    The supervisor is started again as a service manager does it: once the workers have died with it.
    """
    async with stage(plan) as here:
        options = ("--workers", str(KILLED_WORKERS), "--port", str(free_port()))
        server = await here.errata(restart.TARGET, *options)
        workers: list[int] = []
        load = await here.load("mux", server)
        await load.do("open", sessions=plan.sessions)

        def kill_worker() -> None:
            os.kill(server.children()[0], signal.SIGKILL)  # the one that has run for longest is started again at once

        async def wait() -> None:
            """Leave the start to the supervisor."""

        def kill_supervisor() -> None:
            nonlocal workers
            workers = server.children()
            server.kill()

        async def start() -> None:
            nonlocal server
            while any(Path(f"/proc/{pid}").exists() for pid in workers):  # noqa: ASYNC110  # children of another process
                await asyncio.sleep(GONE_S)
            server = await here.errata(restart.TARGET, *options)

        arms = {
            WORKER: partial(restart.outage, plan, load, kill_worker, wait),
            SUPERVISOR: partial(restart.outage, plan, load, kill_supervisor, start),
        }
        return await alternate(plan, arms, restart.NOTES)


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
    Scenario(
        "workers-killed",
        f"one of {KILLED_WORKERS} workers, or the supervisor, is killed; all sessions go on",
        run_killed,
        resume.METRICS,
        (
            Budget(WORKER, "all_stepped_s", "<=", 3, at=2_000),
            Budget(SUPERVISOR, "all_stepped_s", "<=", 10, at=2_000),
        ),
        sessions=2_000,
        baseline=None,
    ),
)
