"""What a user of the terminal feels: a trivial step against plain bash, state(t), idle sessions.

    python bench/terminal_server.py [--json] [--smoke]

A step goes client -> socket -> session -> sandbox -> snapshot -> synced commit -> reply, in a server of its own; plain
`bash -c :` is a subprocess of this one. The two alternate, and the ratio is taken per round.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from errata_bench.latencies import percentile, spread_ms
from errata_protocol.environment import SnapshotRef
from errata_server.journal import DeliveryRow, EpisodeRow, IndexedJournal
from errata_server.process import ServerProcess
from terminal_env import TerminalAction, TerminalEnv


async def trivial_step(server: ServerProcess, rounds: int, steps: int) -> dict[str, Any]:
    """A step of `:` against `bash -c :`, alternating; milliseconds."""
    ratios, ours, plain = [], [], []
    async with TerminalEnv(server.url) as env:
        await env.reset()
        await env.step(TerminalAction(command=":"))
        for _ in range(rounds):
            one, other = [], []
            for _ in range(steps):
                started = time.perf_counter()
                await env.step(TerminalAction(command=":"))
                one.append(time.perf_counter() - started)
                started = time.perf_counter()
                subprocess.run(["bash", "-c", ":"], check=True)
                other.append(time.perf_counter() - started)
            ratios.append(percentile(sorted(one), 0.5) / percentile(sorted(other), 0.5))
            ours += one
            plain += other
    return {
        "step_p50_ms": percentile(sorted(ours), 0.5) * 1e3,
        "step_p95_ms": percentile(sorted(ours), 0.95) * 1e3,
        "bash_p50_ms": percentile(sorted(plain), 0.5) * 1e3,
        "ratio_p50_median_of_rounds": statistics.median(ratios),
        "ratio_p50_rounds": [round(r, 2) for r in ratios],
    }


async def state_at(server: ServerProcess, asked: int) -> dict[str, Any]:
    """state(t) over the socket in an episode of 50 steps; milliseconds."""
    async with TerminalEnv(server.url) as env:
        await env.reset()
        for n in range(50):
            await env.step(TerminalAction(command=f"seq {n} | tail -3"))
        took = []
        for n in range(asked):
            started = time.perf_counter()
            await env.state_at(n * 7919 % 51)
            took.append(time.perf_counter() - started)
    return spread_ms(took)


async def journal_reads(sizes: list[int], asked: int) -> dict[str, Any]:
    """Reading one delivery by (eid, t), uniform random, by size of the journal; milliseconds, warm."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        journal = IndexedJournal(Path(scratch) / "journal")
        payload = b"x" * 1200
        digest = hashlib.sha256(payload).digest()
        written = 0
        for size in sizes:
            while written < size:
                rows: list[Any] = []
                for n in range(written, min(size, written + 5000)):
                    eid, t = f"ep_{n // 100:012d}", n % 100
                    if t == 0:
                        rows.append(EpisodeRow(eid=eid, sid=f"s{n // 100}", environment="bench", created=0.0))
                    rows.append(
                        DeliveryRow(
                            eid=eid,
                            t=t,
                            sid=f"s{n // 100}",
                            id=None,
                            kind="step",
                            request=b"{}",
                            request_sha=digest,
                            status="ok",
                            payload=payload,
                            digest=digest,
                            semantic_digest=digest,
                            state=b"s" * 900,
                            refs=(SnapshotRef("layer", f"l{n}", "sha256:0"),),
                            created=0.0,
                            reward=0.0,
                        )
                    )
                await journal.commit(*rows)
                written = min(size, written + 5000)
            took = []
            for n in range(asked):
                at = n * 104729 % size
                started = time.perf_counter()
                assert journal.delivery(f"ep_{at // 100:012d}", at % 100) is not None
                took.append(time.perf_counter() - started)
            found[str(size)] = spread_ms(took)
        journal.close()
    return found


async def idle_sessions(server: ServerProcess, data_dir: Path, sessions: int) -> dict[str, Any]:
    """Memory, disk and processes of open sessions that do nothing."""
    async with TerminalEnv(server.url) as first:
        await first.reset()
        await first.step(TerminalAction(command=":"))
        memory, disk, processes = _memory(server), _disk(data_dir), _processes()
        opened = []
        for _ in range(sessions):
            env = TerminalEnv(server.url)
            await env.connect()
            await env.reset()
            opened.append(env)
        result = {
            "sessions": sessions,
            "disk_kib_each": (_disk(data_dir) - disk) / sessions,
            "server_rss_kib_each": (_memory(server) - memory) / sessions,
            "processes_more": _processes() - processes,
        }
        for env in opened:
            await env.close()
    return result


def _memory(server: ServerProcess) -> int:
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise LookupError("no VmRSS")


def _disk(directory: Path) -> int:
    done = subprocess.run(["du", "-sk", str(directory / "sandboxes")], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[0])


def _processes() -> int:
    return sum(1 for entry in Path("/proc").iterdir() if entry.name.isdigit())


async def measure(small: bool) -> dict[str, Any]:
    """Run everything."""
    machine = f"{platform.machine()} {platform.release()} python {platform.python_version()}"
    result: dict[str, Any] = {"machine": machine}
    with tempfile.TemporaryDirectory() as scratch, ServerProcess("terminal", Path(scratch)) as server:
        result["trivial_step"] = await trivial_step(server, *((2, 10) if small else (7, 60)))
        result["state_at_over_ws"] = await state_at(server, 50 if small else 1000)
        result["idle"] = await idle_sessions(server, Path(scratch), 20 if small else 300)
    result["journal_read"] = await journal_reads([1000] if small else [1_000, 100_000], 200 if small else 2000)
    return result


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="small and quick: shows that it runs, measures nothing")
    options = parser.parse_args()
    result = asyncio.run(measure(options.smoke))
    if options.json:
        print(json.dumps(result))
        return
    for name, figures in result.items():
        print(name)
        for key, value in figures.items() if isinstance(figures, dict) else [("", figures)]:
            print(f"    {key:32} {value:.3f}" if isinstance(value, float) else f"    {key:32} {value}")


if __name__ == "__main__":
    main()
