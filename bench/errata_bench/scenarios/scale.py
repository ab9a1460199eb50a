"""The server's cost of a step by the number of sessions."""

from __future__ import annotations

import asyncio
from functools import partial

from ..budgets import Budget
from ..figures import Round
from ..load import Load
from ..scenario import ACTION, MUX_1, MUX_64, STOCK, Found, Metric, Plan, Scenario, alternate
from ..servers import Server
from ..stage import stage, stepping, target
from .steps import SECONDS

DECADES = 3


METRICS = (
    *(
        metric
        for words, power in (("a hundredth of the sessions", 2), ("a tenth", 1), ("all", 0))
        for metric in (
            Metric(f"server_cpu_us_{power}", f"server's CPU a step, {words}", "us"),
            Metric(f"steps_per_s_{power}", f"steps a second, {words}", "1/s"),
        )
    ),
    Metric("growth", "server's CPU a step, all sessions to a hundredth", "x", compared=False),
    Metric("load_average", "load average", compared=False),
)


async def run(plan: Plan) -> Found:
    """Step a hundredth, a tenth and all of the sessions in each arm and round."""
    async with stage(plan) as here:
        stock, errata = await asyncio.gather(here.stock("any-thread"), here.errata(target("any-thread")))
        sizes = [max(1, plan.sessions // 10**power) for power in range(DECADES)]
        # As many sessions on each socket at every size, so that frames fill alike.
        sockets = [max(1, -(-size * plan.sockets // plan.sessions)) for size in sizes]
        links = [await here.load("mux", errata, sockets=count) for count in sockets]
        single = await here.load("plain", stock)

        async def measure(server: Server, loads: list[Load], **how: int) -> Round:
            found: dict[str, float] = {}
            for power in reversed(range(DECADES)):
                load = loads[power]
                await load.do("open", sessions=sizes[power])
                figures = await stepping(server, load, plan.seconds, action=ACTION, **how)
                await load.do("close")
                await server.quiet(64)
                found |= {f"{key}_{power}": figures[key] for key in ("server_cpu_us", "steps_per_s")}
            return {**found, "growth": found["server_cpu_us_0"] / found["server_cpu_us_2"]}

        arms = {
            STOCK: partial(measure, stock, [single] * DECADES),
            MUX_1: partial(measure, errata, links, frame=1),
            MUX_64: partial(measure, errata, links, frame=64),
        }
        return await alternate(plan, arms)


SCENARIOS = (
    Scenario(
        "scale",
        "the cost of a step, from a hundredth of the sessions to all",
        run,
        METRICS,
        (Budget(MUX_1, "growth", "<=", 1.3), Budget(MUX_64, "growth", "<=", 1.3)),
        seconds=SECONDS,
    ),
)
