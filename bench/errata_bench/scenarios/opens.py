"""Opening sessions. Figures depend on when a session counts as open, so all three definitions are measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..budgets import Budget
from ..factories import COUNTER_VARIABLE
from ..figures import Round
from ..load import Load
from ..scenario import MUX_1, MUX_64, PLAIN, STOCK, Found, Metric, Plan, Scenario, alternate, arm_of
from ..servers import Server
from ..stage import Stage, stage

THREADS_LEFT = 64
"""A server with more threads still has sessions of an earlier round."""

METRICS = (
    Metric("lazy_per_s", "opens a second, answered before the factory ran", "1/s"),
    Metric("factory_per_s", "opens a second, answered after the factory ran", "1/s"),
    Metric("reset_per_s", "opens with reset a second", "1/s"),
    Metric("reset_p99_ms", "open with reset, 99th percentile", "ms"),
    Metric("server_cpu_us", "server's CPU for an open with reset", "us"),
    Metric("client_cpu_us", "load generator's CPU for it", "us", compared=False),
    Metric("factories_missing", "most factories that had not run at some `opened`, or handshake", compared=False),
    Metric("load_average", "load average", compared=False),
)


def _arm(
    here: Stage, server: Server, load: Load, counter: str, *, lazy: bool = False, **how: int
) -> Callable[[], Awaitable[Round]]:
    sessions = here.plan.sessions

    async def opened(then: str) -> Round:
        cpu = server.cpu_s()
        found = await load.do("open", sessions=sessions, then=then, counter=counter, **how)
        used = server.cpu_s() - cpu
        await load.do("close")
        await server.quiet(THREADS_LEFT)
        return {**found, "server_cpu_us": used / sessions * 1e6}

    async def measure() -> Round:
        bare, state, reset = await opened("nothing"), await opened("state"), await opened("reset")
        # An `opened` reply counts only if none ever came before its factory had run, else the read of a state does. A
        # plain handshake always comes before the factory.
        early = lazy or bare["factories_missing"] > 0
        return {
            **({"lazy_per_s": bare["opens_per_s"]} if early else {}),
            "factory_per_s": (state if early else bare)["opens_per_s"],
            "reset_per_s": reset["opens_per_s"],
            "reset_p99_ms": reset["p99_ms"],
            "server_cpu_us": reset["server_cpu_us"],
            "client_cpu_us": reset["client_cpu_us"],
            "factories_missing": bare["factories_missing"],
        }

    return measure


async def run(plan: Plan) -> Found:
    """Open and close all sessions, three times in each arm and round."""
    async with stage(plan) as here:
        counters = {name: str(here.directory / f"{name}.made") for name in (STOCK, *plan.errata_servers)}
        env = {name: {COUNTER_VARIABLE: counter} for name, counter in counters.items()}
        servers = await here.servers("any-thread", env=env)
        plain = {name: await here.load("plain", server) for name, server in servers.items()}
        mux = {name: await here.load("mux", servers[name]) for name in plan.errata_servers}
        arms = {}
        if plan.stock:
            arms[STOCK] = _arm(here, servers[STOCK], plain[STOCK], counters[STOCK], lazy=True)
        for name in plan.errata_servers:
            arms[arm_of(name, PLAIN)] = _arm(here, servers[name], plain[name], counters[name], lazy=True)
        for arm, frame in ((MUX_1, 1), (MUX_64, 64)):
            for name in plan.errata_servers:
                arms[arm_of(name, arm)] = _arm(here, servers[name], mux[name], counters[name], frame=frame)
        notes = [
            "On plain sockets 64 are opened at a time and one that is open has answered a handshake, a read of its "
            "state, or a reset; over mux all are opened at once."
        ]
        return await alternate(plan, arms, notes)


SCENARIOS = (
    Scenario(
        "opens",
        "opening sessions, on any thread",
        run,
        METRICS,
        (Budget(MUX_64, "factory_per_s", ">=", 60, to=STOCK), Budget(MUX_1, "factory_per_s", ">=", 60, to=STOCK)),
        pairs=True,
    ),
)
