"""What a step costs the server as the number of sessions grows."""

from __future__ import annotations

from functools import partial

from ..budgets import Budget
from ..figures import Round
from ..scenario import ACTION, MUX_1, MUX_64, STOCK, Found, Metric, Plan, Scenario, alternate
from ..stage import stage, stepping, target

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
        stock, errata = await here.stock("any-thread"), await here.errata(target("any-thread"))
        loads = {}
        wanted = [max(1, plan.sessions // 10**power) for power in range(DECADES)]
        for door, server in (("plain", stock), ("mux", errata)):
            loads[door] = await here.load(door, server)

        async def measure(door: str, **how: int) -> Round:
            server, load = (stock, loads["plain"]) if door == "plain" else (errata, loads["mux"])
            found: dict[str, float] = {}
            for power in reversed(range(DECADES)):
                await load.do("open", sessions=wanted[power])
                figures = await stepping(server, load, plan.seconds / 2, action=ACTION, **how)
                await load.do("close")
                await server.quiet(64)
                found |= {f"{key}_{power}": figures[key] for key in ("server_cpu_us", "steps_per_s")}
            return {**found, "growth": found["server_cpu_us_0"] / found["server_cpu_us_2"]}

        step = partial(measure, "mux")
        arms = {
            STOCK: partial(measure, "plain"),
            MUX_1: partial(step, frame=1),
            MUX_64: partial(step, frame=64),
        }
        return await alternate(plan, arms)


SCENARIOS = (
    Scenario(
        "scale",
        "the cost of a step, from a hundredth of the sessions to all",
        run,
        METRICS,
        (Budget(MUX_1, "growth", "<=", 1.3), Budget(MUX_64, "growth", "<=", 1.3)),
    ),
)
