"""What the namespace sandbox costs: a trivial command, a snapshot, a fork, an idle session.

    python bench/sandbox_cost.py [--json] [--rounds 5] [--data-dir DIR] [--base NAME=PATH]

The command is alternated with plain ``bash -c :`` through the same event loop, so that both meet the same load; the
ratio of medians is taken in each round and the median round reported. The data directory decides much: an overlay mount
is a dozen journal entries on ext4, and waits whenever something else on that disk is being synced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from errata_bench.latencies import percentile
from errata_server.sandbox.base import Sandbox
from errata_server.sandbox.files.walk import remove_tree, usage
from errata_server.sandbox.namespace.backend import NamespaceBackend


async def timed_ms(call: Callable[[], Awaitable[object]]) -> float:
    """Return how long ``call`` takes, in ms."""
    started = time.perf_counter()
    await call()
    return (time.perf_counter() - started) * 1000


async def plain() -> None:
    """Run ``bash -c :`` without a sandbox, with the same pipes."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("/bin/bash", "-c", ":", stdout=pipe, stderr=pipe)
    await process.communicate()


async def commands(backend: NamespaceBackend, rounds: int, count: int) -> dict[str, Any]:
    """Measure a trivial command against plain bash."""
    box = await backend.open()
    found = []
    for _ in range(rounds):
        ours, theirs = [], []
        for _ in range(count):
            theirs.append(await timed_ms(plain))
            ours.append(await timed_ms(lambda: box.run(":")))
            # An agent thinks between two commands; without a pause the next one would measure the last one's clean-up.
            await asyncio.sleep(0.01)
        found.append(
            {
                "plain_p50_ms": percentile(sorted(theirs), 0.5),
                "plain_p95_ms": percentile(sorted(theirs), 0.95),
                "sandbox_p50_ms": percentile(sorted(ours), 0.5),
                "sandbox_p95_ms": percentile(sorted(ours), 0.95),
                "ratio_p50": percentile(sorted(ours), 0.5) / percentile(sorted(theirs), 0.5),
            }
        )
    started = time.perf_counter()
    for _ in range(count):
        await box.run(":")
    back_to_back = count / (time.perf_counter() - started)
    boxes = [await backend.open() for _ in range(8)]

    async def many(one: Sandbox) -> None:
        for _ in range(count):
            await one.run(":")

    started = time.perf_counter()
    await asyncio.gather(*(many(one) for one in boxes))
    parallel = 8 * count / (time.perf_counter() - started)
    for one in (box, *boxes):
        await one.destroy()
    middle = sorted(found, key=lambda row: row["ratio_p50"])[len(found) // 2]
    spread = [row["ratio_p50"] for row in found]
    more = {"ratio_min": min(spread), "ratio_max": max(spread)}
    return middle | more | {"per_s_one_session": back_to_back, "per_s_eight_sessions": parallel}


async def snapshots(backend: NamespaceBackend, rounds: int) -> dict[str, Any]:
    """Measure snapshot, fork and digest on a workspace of 2,000 files, with 1 and 50 of them changed."""
    box = await backend.open()
    await box.run("mkdir tree; cd tree; for i in {1..2000}; do printf '%02000d' $i > f$i; done", timeout_s=60.0)
    await box.snapshot()
    await box.merged_digest()
    found: dict[str, Any] = {"unchanged_ms": statistics.median([await timed_ms(box.snapshot) for _ in range(50)])}
    for changed in (1, 50):
        freeze, fork, digest = [], [], []
        for turn in range(5 * rounds):
            await box.run(f"for i in {{1..{changed}}}; do echo {turn} >> f$i; done")
            freeze.append(await timed_ms(box.snapshot))
            snapshot = await box.snapshot()
            fork.append(await timed_ms(lambda: backend.restore(snapshot)))  # noqa: B023 - awaited in this turn
            digest.append(await timed_ms(box.merged_digest))
        found |= {
            f"snapshot_{changed}_ms": statistics.median(freeze),
            f"fork_{changed}_ms": statistics.median(fork),
            f"merged_digest_{changed}_ms": statistics.median(digest),
        }
    return found


async def idle(backend: NamespaceBackend, count: int) -> dict[str, Any]:
    """Measure what an idle session holds: before its first command and after one that wrote a file."""

    def disk() -> int:
        return usage(backend.data_dir, max_entries=10**8, max_bytes=10**15).size_bytes

    def resident_kib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    disk_before, memory_before = disk(), resident_kib()
    boxes = [await backend.open() for _ in range(count)]
    opened, memory = disk(), resident_kib()
    few = boxes[:50]
    for box in few:
        await box.run("echo 1 > f")
    used = disk()
    return {
        "sessions": count,
        "disk_at_open_bytes": (opened - disk_before) / count,
        "disk_after_command_bytes": (used - opened) / len(few),
        "server_memory_bytes": (memory - memory_before) * 1024 / count,
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything on a data directory of its own."""
    bases = {name: Path(path) for name, _, path in (pair.partition("=") for pair in arguments.base)}
    home = Path(tempfile.mkdtemp(prefix="errata-bench-", dir=arguments.data_dir))
    backend = NamespaceBackend(home / "sandboxes", bases=bases)
    try:
        info = await backend.start()
        return {
            "machine": {
                "kernel": platform.release(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
                "load": os.getloadavg()[0],
                "enforces": sorted(info.enforces),
            },
            "command": await commands(backend, arguments.rounds, arguments.count),
            "snapshot": await snapshots(backend, arguments.rounds),
            "idle": await idle(backend, 1000),
        }
    finally:
        await backend.close()
        remove_tree(home / "sandboxes")
        shutil.rmtree(home)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=60, help="commands in a round")
    parser.add_argument("--data-dir", type=Path, default=None, help="where to put the layers (default: TMPDIR)")
    parser.add_argument("--base", action="append", default=[], metavar="NAME=PATH")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for section, values in result.items():
        print(section)
        for name, value in values.items():
            print(f"    {name:28} {value:.3f}" if isinstance(value, float) else f"    {name:28} {value}")


if __name__ == "__main__":
    main()
