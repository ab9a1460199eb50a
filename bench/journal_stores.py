"""The segment log against SQLite alone, end to end: steps a second and CPU a step of servers under load.

    python bench/journal_stores.py [--dir PATH] [--rounds N] [--sessions N] [--seconds S] [--json] [--smoke]

Three servers (`errata_bench.sqlite_journal`) hold the same number of sessions of an asynchronous echo environment open.
In each round every one is stepped over mux, with frames of 1 and of 64 envelopes, one after the other and in the
reverse order in every second round; ratios to SQLite are taken round by round. A ratio above 1 is the segments'
advantage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from errata_bench.figures import Round
from errata_bench.scenario import ACTION, Plan, alternate
from errata_bench.servers import Server
from errata_bench.stage import stage, stepping, target

STORES = ("segments", "frames", "rows")
FRAMES = (1, 64)


async def measured(plan: Plan) -> dict[str, Any]:
    """Return the rounds of each store and frame, and the segments' ratios to both forms of SQLite."""
    async with stage(plan) as here:
        servers: dict[str, Server] = {}
        for store in STORES:
            command = [sys.executable, "-m", "errata_bench.sqlite_journal", store, target("async")]
            places = str(2 * plan.sessions + 10)
            command += ["--sessions", places, "--data-dir", str(here.directory / store)]
            servers[store] = await here._start(partial(Server._announced, command, None))

        async def step(store: str, frame: int) -> Round:
            load = await here.opened("mux", servers[store])
            return await stepping(servers[store], load, plan.seconds, action=ACTION, frame=frame)

        arms = {f"{store}, frames of {frame}": partial(step, store, frame) for frame in FRAMES for store in STORES}
        found = await alternate(plan, arms)
    if found.failed:
        raise SystemExit(f"failed: {found.failed}")
    rounds = found.arms
    ratios = {}
    for frame in FRAMES:
        ours = rounds[f"segments, frames of {frame}"]
        for store in STORES[1:]:
            other = rounds[f"{store}, frames of {frame}"]
            pairs = list(zip(ours, other, strict=True))
            for name, values in (
                ("steps/s", [a["steps_per_s"] / b["steps_per_s"] for a, b in pairs]),
                ("CPU a step", [b["server_cpu_us"] / a["server_cpu_us"] for a, b in pairs]),
            ):
                ratios[f"{name}, frames of {frame}, over {store}"] = {
                    "median": statistics.median(values), "spread": [min(values), max(values)], "rounds": values,
                }  # fmt: skip
    return {"rounds": {arm: [dict(one) for one in of] for arm, of in rounds.items()}, "ratios": ratios}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="its disk is what is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.sessions, args.seconds = 1, 20, 0.3
    args.dir.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        args.sessions, args.rounds, args.seconds, 16, args.dir, args.smoke, partial(print, file=sys.stderr, flush=True)
    )
    found = asyncio.run(measured(plan))
    found["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for arm, of in found["rounds"].items():
        steps, cpu = ([one[key] for one in of] for key in ("steps_per_s", "server_cpu_us"))
        print(f"{arm:26} {statistics.median(steps):9,.0f} steps/s   {statistics.median(cpu):6.1f} us CPU a step")
    for name, values in found["ratios"].items():
        low, high = values["spread"]
        print(f"{name:40} {values['median']:5.2f} x   ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
