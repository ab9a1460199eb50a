"""All sessions opened at the same moment, within the 10 s that OpenEnv's client waits for a connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..budgets import Budget
from ..figures import Round
from ..plain_load import CONNECT_S
from ..scenario import MUX_64, PLAIN, STOCK, Found, Metric, Plan, Scenario, alternate
from ..stage import stage, target

METRICS = (
    Metric("opened", "open within 10 s, first try", compared=False),
    Metric("opened_after_retry", "open after one retry each", compared=False),
    Metric("usable", "of these, answered a reset within 60 s", compared=False),
    Metric("last_opened_s", "until the last one was open", "s", compared=False),
    Metric("load_average", "load average", compared=False),
)


def _plain(plan: Plan, which: str) -> Callable[[], Awaitable[Round]]:
    async def measure() -> Round:
        async with stage(plan) as here:  # a new server each time: stock goes on working for clients that have given up
            server = await (here.stock("any-thread") if which == STOCK else here.errata(target("any-thread")))
            load = await here.load("plain", server)
            return await load.do("burst", sessions=plan.sessions)

    return measure


def _mux(plan: Plan) -> Callable[[], Awaitable[Round]]:
    async def measure() -> Round:
        async with stage(plan) as here:
            server = await here.errata(target("any-thread"))
            load = await here.load("mux", server)
            found = await load.do("open", sessions=plan.sessions, then="reset", limit_s=CONNECT_S)
            return {"opened": found["opened"], "usable": found["opened"], "last_opened_s": found["seconds"]}

    return measure


async def run(plan: Plan) -> Found:
    """Open all sessions at once on a new server in each arm and round."""
    arms = {STOCK: _plain(plan, STOCK), PLAIN: _plain(plan, PLAIN), MUX_64: _mux(plan)}
    notes = ["On plain sockets one is open when its handshake is done; over mux, when its reset is answered."]
    return await alternate(plan, arms, notes)


SCENARIOS = (
    Scenario(
        "burst",
        "all sessions opened at once",
        run,
        METRICS,
        (
            Budget(MUX_64, "opened", ">=", 1, share=True),
            Budget(PLAIN, "opened", ">=", 0.9, share=True),
            Budget(PLAIN, "opened_after_retry", ">=", 1, share=True),
        ),
    ),
)
