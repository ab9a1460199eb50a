"""state(t) of any episode, by the size of the journal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from errata_server.journal import journal_in

from .. import page_cache
from ..budgets import Budget
from ..figures import Round
from ..filled_journal import DELIVERIES, fill
from ..scenario import Found, Metric, Plan, Scenario, alternate
from ..stage import Stage, stage, target

SMALL = "small journal"
LARGE = "large journal"
SMALL_EPISODES = 10
COLD_READS = 500
WARM_READS = 2000

METRICS = (
    Metric("deliveries", "deliveries in the journal", compared=False),
    Metric("cold_p50_ms", "page cache dropped, median", "ms"),
    Metric("cold_p99_ms", "page cache dropped, 99th percentile", "ms"),
    Metric("warm_p50_ms", "warm, median", "ms"),
    Metric("warm_p99_ms", "warm, 99th percentile", "ms"),
    Metric("left_cached", "share of the journal still cached after dropping", compared=False),
    Metric("load_average", "load average", compared=False),
)


def _arm(here: Stage, name: str, episodes: int) -> Callable[[], Awaitable[Round]]:
    data_dir = here.directory / name
    number = 0

    async def measure() -> Round:
        nonlocal number
        number += 2
        server = await here.errata(target("any-thread"), name=name)  # a new server: SQLite's own cache is empty
        load = await here.load("http", server)
        files = sorted(journal_in(data_dir).iterdir())
        await load.do("metric", name="errata_ready")  # the connection is open, and each route was used once
        left = page_cache.drop(files)
        asked = {"episodes": episodes, "deliveries": DELIVERIES}
        cold = await load.do("read_states", reads=COLD_READS, seed=number, **asked)
        page_cache.fill(files)
        warm = await load.do("read_states", reads=WARM_READS, seed=number + 1, **asked)
        await here.end()
        return {
            "deliveries": float(episodes * DELIVERIES),
            "cold_p50_ms": cold["p50_ms"],
            "cold_p99_ms": cold["p99_ms"],
            "warm_p50_ms": warm["p50_ms"],
            "warm_p99_ms": warm["p99_ms"],
            "left_cached": left,
        }

    return measure


async def run(plan: Plan) -> Found:
    """Read at uniform random (eid, t) over HTTP, after the page cache was dropped, and again after it was filled."""
    async with stage(plan) as here:
        arms = {}
        for name, episodes in ((SMALL, SMALL_EPISODES), (LARGE, max(plan.sessions, SMALL_EPISODES))):
            plan.progress(f"writing {episodes * DELIVERIES:,} deliveries")
            await fill(here.directory / name, episodes, "FreeEcho")
            arms[name] = _arm(here, name, episodes)
        notes = [
            f"GET /episodes/{{eid}}/states/{{t}}, one at a time; each episode has {DELIVERIES} deliveries of 1 KiB."
        ]
        return await alternate(plan, arms, notes)


SCENARIOS = (
    Scenario(
        "state-at",
        "state(t), uniform random, by the size of the journal",
        run,
        METRICS,
        (
            Budget(SMALL, "warm_p99_ms", "<=", 5, at=None),
            Budget(LARGE, "warm_p99_ms", "<=", 5),
        ),
        smoke_sessions=20,
        baseline=SMALL,
        descriptors=0,
        counted="episodes",
    ),
)
