"""Durable commits a second of the journal's stores, one at a time and in groups, against another checkout.

    python bench/journal.py [--baseline CHECKOUT] [--dir PATH] [--rounds N] [--json] [--smoke]

Each figure is a process of its own; stores and checkouts take turns within a round, and ratios are taken per round. A
commit is one delivery with a payload of 512 bytes; ``grouped`` has 256 sessions that each wait for their commit.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GROUP = 256


def measure(store: str, directory: Path, seconds: float) -> dict[str, float]:
    """Return commits a second, ungrouped and grouped, and the CPU time of a grouped one, which no busy disk changes.

    Imports late: the checkout is chosen by PYTHONPATH.
    """
    from errata_server.journal import DeliveryRow, EpisodeRow, SessionRow, SqliteJournal

    payload = b"p" * 512
    sha = hashlib.sha256(payload).digest()

    def row(n: int, t: int) -> DeliveryRow:
        return DeliveryRow(
            f"e{n}", t, f"s{n}", None, "step", b'{"command":":"}', sha, "ok", payload, sha, sha, b"state", (), 1.0, 0.5
        )

    def opened() -> Any:
        if store == "sqlite":
            return SqliteJournal(directory / "journal.db")
        from errata_server.journal import DirectoryDisk, LogJournal

        return LogJournal(DirectoryDisk(directory / "log"))

    async def run() -> dict[str, float]:
        journal = opened()
        for n in range(GROUP):
            await journal.commit(SessionRow(f"s{n}", "e", "none", 1, 1.0), EpisodeRow(f"e{n}", f"s{n}", "e", 1.0))
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            await journal.commit(row(0, done))
            done += 1
        ungrouped = done / (time.perf_counter() - began)
        counts = [done] + [0] * (GROUP - 1)
        before, began, cpu = sum(counts), time.perf_counter(), time.process_time()

        async def session(n: int) -> None:
            while time.perf_counter() - began < seconds:
                await journal.commit(row(n, counts[n]))
                counts[n] += 1

        await asyncio.gather(*(session(n) for n in range(GROUP)))
        grouped = (sum(counts) - before) / (time.perf_counter() - began)
        cpu_us = (time.process_time() - cpu) / (sum(counts) - before) * 1e6
        journal.close()
        return {"ungrouped": ungrouped, "grouped": grouped, "grouped_cpu_us": cpu_us}

    return asyncio.run(run())


def in_process(store: str, checkout: Path, directory: Path | None, seconds: float) -> dict[str, float]:
    """Run `measure` on the sources of a checkout."""
    path = os.pathsep.join(str(checkout / part) for part in ("protocol", "server"))
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [sys.executable, __file__, "--one", store, "--dir", scratch, "--seconds", str(seconds)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="checkout whose SqliteJournal is the baseline")
    parser.add_argument("--dir", type=Path, help="where to write; its disk is what is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="one short round")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.dir, args.seconds)))
        return
    if args.smoke:
        args.rounds, args.seconds = 1, 0.2
    kinds: dict[str, tuple[str, Path]] = {"sqlite": ("sqlite", ROOT), "log": ("log", ROOT)}
    if args.baseline:
        kinds = {"baseline": ("sqlite", args.baseline.resolve()), **kinds}
    first = next(iter(kinds))
    rounds = [
        {name: in_process(store, checkout, args.dir, args.seconds) for name, (store, checkout) in kinds.items()}
        for _ in range(args.rounds)
    ]
    found: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "rounds": rounds,
    }
    for name in kinds:
        for how in ("ungrouped", "grouped", "grouped_cpu_us"):
            rates = [r[name][how] for r in rounds]
            ratios = [r[name][how] / r[first][how] for r in rounds]
            found[f"{name} {how}"] = {
                "median": statistics.median(rates),
                "spread": [min(rates), max(rates)],
                f"ratio_to_{first}_median": statistics.median(ratios),
            }
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for name, values in found.items():
        if name not in ("machine", "rounds"):
            ratio = values[f"ratio_to_{first}_median"]
            print(f"{name:25} {values['median']:10,.0f}   {ratio:5.2f} x {first}")


if __name__ == "__main__":
    main()
