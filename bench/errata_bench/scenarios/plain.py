"""Steps over plain sockets, one for each session, and steps that block or compute; with compression offered and pings
as OpenEnv's client has them."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..budgets import Budget
from ..figures import Round
from ..scenario import ACTION, MUX_64, PLAIN, STOCK, Found, Metric, Plan, Scenario, alternate, arm_of
from ..servers import Server
from ..stage import stage, stepping
from . import steps

METRICS = (
    *(metric for metric in steps.METRICS if metric.key != "replies_per_frame"),
    Metric("deflated", "sockets that the server compresses", compared=False),
    Metric("pongs_overdue", "pongs not there within 20 s", compared=False),
)
OFFERED = (
    "Both clients offer compression and send pings: stock compresses, as uvicorn does by default; Errata declines."
)


async def run(plan: Plan, *, kind: str, mux: bool = False) -> Found:
    """Hold all sessions open on every server, and step them in turn.

    Args:
        plan: How to run it.
        kind: Name of the environment.
        mux: Also measure a few multiplexed sockets.
    """
    async with stage(plan) as here:
        servers = await here.servers(kind, deflate=True)

        async def step(server: Server, door: str, **how: Any) -> Round:
            options = {"as_upstream": True} if door == "plain" else {}
            load = await here.opened(door, server, **options)
            return await stepping(server, load, plan.seconds, action=ACTION, **how)

        arms = {STOCK: partial(step, servers[STOCK], "plain")} if plan.stock else {}
        for name in plan.errata_servers:
            arms[arm_of(name, PLAIN)] = partial(step, servers[name], "plain")
        if mux:
            for name in plan.errata_servers:
                arms[arm_of(name, MUX_64)] = partial(step, servers[name], "mux", frame=64)
        return await alternate(plan, arms, [OFFERED])


def _plain(kind: str, title: str, *budgets: Budget, smoke_sessions: int = 0) -> Scenario:
    return Scenario(
        f"plain-{kind}",
        f"steps over plain sockets: {title}",
        partial(run, kind=kind),
        METRICS,
        budgets,
        seconds=steps.SECONDS,
        pairs=True,
        smoke_sessions=smoke_sessions,
    )


def _waiting(kind: str, title: str, sessions: int, smoke_sessions: int = 20) -> Scenario:
    return Scenario(
        kind,
        f"steps that take their time: {title}",
        partial(run, kind=kind, mux=True),
        steps.METRICS,
        sessions=sessions,
        smoke_sessions=smoke_sessions,
        seconds=6.0,
        pairs=True,
    )


_FEW_THREADS = Budget(PLAIN, "threads", "<=", 40)

SCENARIOS = (
    _plain(
        "any-thread",
        "a synchronous environment that runs on any thread",
        Budget(PLAIN, "steps_per_s", ">=", 4, to=STOCK),
        _FEW_THREADS,
    ),
    _plain(
        "async",
        "an asynchronous environment",
        Budget(PLAIN, "steps_per_s", ">=", 4, to=STOCK),
        _FEW_THREADS,
        smoke_sessions=100,
    ),
    _plain("pinned", "a synchronous environment, unmodified"),
    _waiting("blocking", "0.2 s blocked, one thread each", 1000, smoke_sessions=0),
    _waiting("blocking-any-thread", "0.2 s blocked, any thread", 1000, smoke_sessions=0),
    _waiting("work", "20 ms of computing; both do what one interpreter can, about 50 steps a second", 100),
)
