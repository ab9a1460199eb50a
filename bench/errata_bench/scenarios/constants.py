"""What a worker costs: CPU and bytes of a step, CPU and memory of a start. CPU time and sizes, no wall time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..figures import Round
from ..scenario import ACTION, Found, Metric, Plan, Scenario, alternate
from ..servers import Server
from ..stage import Stage, stage, target
from .terminal import COMMAND, descendants

ECHO, TERMINAL, WORKER = "echo", "terminal", "start of a worker"
ECHO_STEPS, TERMINAL_STEPS = 20, 2
"""Steps of each session in a round."""

SHARE = 20
"""Sessions of a round for one terminal of it: a command costs some hundred times a step of echo."""

METRICS = (
    Metric("server_cpu_us", "server's CPU a step, its sandboxes' not counted", "us"),
    Metric("sandbox_cpu_us", "CPU a step of the processes below the server", "us"),
    Metric("segment_bytes", "bytes of the journal's segments a step", "B"),
    Metric("index_bytes", "bytes of the journal's index a step", "B"),
    Metric("written_bytes", "bytes a step that reach the storage, in whole pages", "B"),
    Metric("start_cpu_ms", "CPU from a worker's fork to its first connection", "ms"),
    Metric("private_mib", "private memory of a worker without sessions", "MiB"),
    Metric("load_average", "load average"),
)


def sizes(data_dir: Path) -> tuple[int, int]:
    """Return the bytes of a journal's segments, and of its index."""
    found = {path.name: path.stat().st_size for path in (data_dir / "journal").iterdir() if path.is_file()}
    segments = sum(size for name, size in found.items() if name.endswith(".log"))
    return segments, sum(found.values()) - segments


def written(pid: int) -> int:
    """Return the bytes that a process has caused to be written to storage, whole pages of its files."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes:")).split()[1])


def below_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all processes below one, those included that have ended and were waited for."""
    return sum(Server.cpu_s_of(child) + Server.waited_cpu_s_of(child) for child in descendants(pid))


async def _step(here: Stage, server: Server, name: str, frame: int, action: dict[str, Any], limit: int) -> Round:
    load = await here.opened("mux", server)
    pid, data_dir = server.process.pid, here.directory / name
    await server.quiet(64, timeout_s=10)
    (segments, index), io, cpu, below = sizes(data_dir), written(pid), server.cpu_s(), below_cpu_s(pid)
    steps = (await load.do("step", seconds=3600, action=action, frame=frame, limit=limit))["steps"]
    await server.quiet(64, timeout_s=10)  # the index follows the segments
    (segments_after, index_after), io_after = sizes(data_dir), written(pid)
    return {
        "server_cpu_us": (server.cpu_s() - cpu) / steps * 1e6,
        "sandbox_cpu_us": (below_cpu_s(pid) - below) / steps * 1e6,
        "segment_bytes": (segments_after - segments) / steps,
        "index_bytes": (index_after - index) / steps,
        "written_bytes": (io_after - io) / steps,
    }


async def _start(plan: Plan) -> Round:
    async with stage(plan) as here:
        server = await here.errata(target("any-thread"), "--workers", "2")
        worker = server.children()[0]
        return {
            "start_cpu_ms": Server.cpu_s_of(worker) * 1e3,
            "private_mib": Server.private_bytes_of(worker) / 1024**2,
        }


async def run(plan: Plan) -> Found:
    """Step the sessions of both kinds in turn, and start two workers in each round."""
    few = replace(plan, sessions=max(1, plan.sessions // SHARE))
    async with stage(plan) as here, stage(few) as terminals:
        echo = await here.errata(target("any-thread"), name=ECHO)
        terminal = await terminals.errata("terminal", name=TERMINAL)
        arms = {
            f"{ECHO}, frames of {frame}": partial(_step, here, echo, ECHO, frame, ACTION, ECHO_STEPS)
            for frame in (64, 1)
        }
        arms[TERMINAL] = partial(_step, terminals, terminal, TERMINAL, 64, COMMAND, TERMINAL_STEPS)
        arms[WORKER] = partial(_start, plan)
        notes = [f"terminal: {few.sessions} sessions, the command `{COMMAND['command']}`."]
        return await alternate(plan, arms, notes)


SCENARIOS = (
    Scenario(
        "constants",
        "what a worker costs: CPU and bytes of a step, its start",
        run,
        METRICS,
        sessions=1_000,
        smoke_sessions=20,
        baseline=None,
    ),
)
