"""Terminal sessions held open at once, each having run a real command in its sandbox."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

from ..budgets import Budget
from ..figures import Round
from ..scenario import MUX_64, Found, Metric, Plan, Scenario, alternate
from ..stage import stage

COMMAND = {"tool": "run", "command": "true"}

METRICS = (
    Metric("held", "sessions held open at once, each after a command"),
    Metric("opens_per_s", "opens with reset a second", "1/s"),
    Metric("steps_per_s", "commands (`true`) a second", "1/s"),
    Metric("p50_ms", "a command with all sessions waiting for one, median", "ms"),
    Metric("p99_ms", "the same, 99th percentile", "ms"),
    Metric("server_cpu_us", "server's CPU a command, its sandboxes' not counted", "us"),
    Metric("kib_per_session", "server's resident memory a session", "KiB"),
    Metric("disk_kib_per_session", "disk a session, journal included", "KiB"),
    Metric("sandboxes_held", "sandboxes with a directory of their own while they are held"),
    Metric("processes_held", "processes while they are held, without the server's own"),
    Metric("close_s", "until all were closed", "s"),
    Metric("sandboxes_left", "sandboxes left after closing"),
    Metric("processes_left", "processes left after closing, likewise"),
    Metric("load_average", "load average"),
)


def descendants(pid: int) -> set[int]:
    """Return the descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(") ", 1)[1].split()
            except OSError:
                continue  # the process has ended
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    left = [pid]
    while left:
        children = parents.get(left.pop(), [])
        found.update(children)
        left += children
    return found


def disk_kib(directory: Path) -> int:
    """Return the size of a directory on the disk."""
    done = subprocess.run(["du", "-sk", str(directory)], capture_output=True, text=True)
    return int(done.stdout.split()[0])  # du reports files that vanish while it runs, and counts the rest


def live(data_dir: Path) -> int:
    """Return the number of sandboxes with a directory of their own."""
    return sum(1 for _ in (data_dir / "sandboxes" / "live").glob("*/*"))


async def run(plan: Plan) -> Found:
    """Open all sessions, run a command in each, measure, close all; on a new server in each round."""

    async def measure() -> Round:
        async with stage(plan) as here:
            server = await here.errata("terminal")
            data_dir = here.directory / "errata"
            load = await here.load("mux", server)
            await load.do("open", sessions=1)
            await load.do("step", seconds=60, action=COMMAND, limit=1)
            await load.do("close")
            own = len(descendants(server.process.pid))
            rss, disk = server.rss_kib(), disk_kib(data_dir)
            opened = await load.do("open", sessions=plan.sessions)
            cpu = server.cpu_s()
            stepped = await load.do("step", seconds=3600, action=COMMAND, limit=1)
            cpu = server.cpu_s() - cpu
            found = {
                "held": stepped["steps"],
                "opens_per_s": opened["opens_per_s"],
                **{key: stepped[key] for key in ("steps_per_s", "p50_ms", "p99_ms")},
                "server_cpu_us": cpu / plan.sessions * 1e6,
                "kib_per_session": (server.rss_kib() - rss) / plan.sessions,
                "disk_kib_per_session": (disk_kib(data_dir) - disk) / plan.sessions,
                "sandboxes_held": float(live(data_dir)),
                "processes_held": float(len(descendants(server.process.pid)) - own),
            }
            plan.progress(f"{plan.sessions} terminals are open; closing them")
            found["close_s"] = (await load.do("close"))["seconds"]
            end = time.monotonic() + 60
            while live(data_dir) and time.monotonic() < end:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.2)
            found["sandboxes_left"] = float(live(data_dir))
            found["processes_left"] = float(len(descendants(server.process.pid)) - own)
            return found

    return await alternate(plan, {MUX_64: measure})


SCENARIOS = (
    Scenario(
        "terminal",
        "terminal sessions held at once",
        run,
        METRICS,
        (
            Budget(MUX_64, "held", ">=", 1, share=True),
            Budget(MUX_64, "sandboxes_left", "<=", 0, at=None),
            Budget(MUX_64, "processes_left", "<=", 0, at=None),
        ),
        smoke_sessions=10,
        rounds=1,
        baseline=None,
    ),
)
