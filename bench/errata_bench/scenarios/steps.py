"""Steps over a few multiplexed sockets, compared with stock OpenEnv, which has one socket for each session."""

from __future__ import annotations

from functools import partial

from ..budgets import Budget
from ..figures import Round
from ..scenario import ACTION, MUX_1, MUX_64, STOCK, Found, Metric, Plan, Scenario, alternate, arm_of
from ..servers import Server
from ..stage import stage, stepping

SECONDS = 12.0
"""Seconds of stepping: stock takes 6 s for one step of each of 10,000 sessions, and a steady state needs two."""

METRICS = (
    Metric("steps_per_s", "steps a second", "1/s"),
    Metric("p50_ms", "latency, median", "ms"),
    Metric("p99_ms", "latency, 99th percentile", "ms"),
    Metric("server_cpu_us", "server's CPU a step", "us"),
    Metric("client_cpu_us", "load generator's CPU a step", "us", compared=False),
    Metric("replies_per_frame", "replies a frame", compared=False),
    Metric("threads", "server's threads"),
    Metric("load_average", "load average", compared=False),
)


async def run(plan: Plan, *, kind: str) -> Found:
    """Hold all sessions open on every server, and step them in turn."""
    async with stage(plan) as here:
        servers = await here.servers(kind)

        async def step(server: Server, door: str, **how: int) -> Round:
            return await stepping(server, await here.opened(door, server), plan.seconds, action=ACTION, **how)

        arms = {STOCK: partial(step, servers[STOCK], "plain")} if plan.stock else {}
        for arm, frame in ((MUX_1, 1), (MUX_64, 64)):
            for name in plan.errata_servers:  # an arm and its counterpart on the second interpreter follow each other
                arms[arm_of(name, arm)] = partial(step, servers[name], "mux", frame=frame)
        return await alternate(plan, arms)


def _budgets(faster_1: float, faster_64: float) -> tuple[Budget, ...]:
    return (
        Budget(MUX_1, "steps_per_s", ">=", faster_1, to=STOCK),
        Budget(MUX_64, "steps_per_s", ">=", faster_64, to=STOCK),
        Budget(MUX_1, "server_cpu_us", "<=", 45),
        Budget(MUX_64, "server_cpu_us", "<=", 25),
        Budget(MUX_1, "p99_ms", "<=", 1, to=STOCK),
        Budget(MUX_64, "p99_ms", "<=", 1, to=STOCK),
    )


SCENARIOS = (
    Scenario(
        "steps-any-thread",
        "steps over mux: a synchronous environment that runs on any thread",
        partial(run, kind="any-thread"),
        METRICS,
        _budgets(12, 25),
        seconds=SECONDS,
        pairs=True,
    ),
    Scenario(
        "steps-async",
        "steps over mux: an asynchronous environment",
        partial(run, kind="async"),
        METRICS,
        _budgets(4, 8),
        seconds=SECONDS,
        pairs=True,
        smoke_sessions=0,
    ),
    Scenario(
        "steps-pinned",
        "steps over mux: a synchronous environment, unmodified",
        partial(run, kind="pinned"),
        METRICS,
        (
            Budget(MUX_1, "steps_per_s", ">=", 2, to=STOCK),
            Budget(MUX_64, "steps_per_s", ">=", 2, to=STOCK),
        ),
        seconds=SECONDS,
        pairs=True,
        smoke_sessions=0,
    ),
)
