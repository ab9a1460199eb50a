"""Every socket is cut while all sessions step; then the sessions continue."""

from __future__ import annotations

from ..budgets import Budget
from ..figures import Round
from ..scenario import ACTION, MUX_64, Found, Metric, Plan, Scenario, alternate
from ..stage import stage, target

METRICS = (
    Metric("first_answer_s", "first session resumed after", "s"),
    Metric("all_resumed_s", "all resumed after", "s"),
    Metric("first_stepped_s", "first session has answered its next step after", "s"),
    Metric("all_stepped_s", "all have answered their next step after", "s"),
    Metric("replies_missed", "replies that were under way and were sent again"),
    Metric("load_average", "load average"),
)


async def run(plan: Plan) -> Found:
    """Cut, connect, resume and step once in each session, in each round."""
    async with stage(plan) as here:
        errata = await here.errata(target("any-thread"))
        load = await here.load("mux", errata)
        await load.do("open", sessions=plan.sessions)

        async def measure() -> Round:
            cut = await load.do("cut_while_stepping", action=ACTION, after_s=plan.seconds / 4)
            return await load.do("resume", since=cut["cut_at"], action=ACTION)

        notes = [
            "Each session's next reply has to name the delivery that its id asks for: no step acted twice or was lost.",
            "Stock has nothing to compare: the sessions that its clients open end with their sockets.",
        ]
        return await alternate(plan, {MUX_64: measure}, notes)


SCENARIOS = (
    Scenario(
        "resume",
        "all sockets cut, all sessions resumed",
        run,
        METRICS,
        (Budget(MUX_64, "all_resumed_s", "<=", 3),),
        baseline=None,
    ),
)
