"""What the durable journal costs: rows a second and CPU a row with many sessions, and reads by its size.

    python bench/journal.py [--baseline CHECKOUT] [--dir PATH] [--rounds N] [--sessions N] [--json] [--smoke]
    python bench/journal.py --reads [--rows 1000,10000,100000,1000000] [--dir PATH] [--json]

The first writes one delivery of each session, in a random order and in groups committed together, each a commit of its
own; CPU is that of the whole process, the commits' own futures included. Each figure is a process of its own;
stores, checkouts and group sizes take turns within a round, and ratios are taken per round. A baseline is a checkout
whose journal is in `errata_server.journal.SqliteJournal` or in `IndexedJournal`.

The second fills journals of some sizes and reads deliveries at random (eid, t), warm, and says how long an open takes.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GROUPS = (64, 256, 1024)
PAYLOAD = b"p" * 512
EPISODE = 100
"""Deliveries of an episode in the journal that is read."""


def opened(directory: Path) -> Any:
    """Open the durable journal of the checkout that PYTHONPATH names."""
    from errata_server import journal

    if hasattr(journal, "SqliteJournal"):
        return journal.SqliteJournal(directory / "journal.db")
    return journal.IndexedJournal(directory / "journal")


def ids_of(n: int) -> tuple[str, str]:
    """Return the eid and sid of episode n: in no order, as a server draws them."""
    drawn = hashlib.sha256(f"{n}".encode()).hexdigest()
    return f"ep_{drawn[:22]}", f"s_{drawn[22:44]}"


def rows_of(n: int, first: int, last: int) -> list[Any]:
    """Return deliveries ``first`` to ``last - 1`` of episode n."""
    from errata_server.journal import DeliveryRow

    sha = hashlib.sha256(PAYLOAD).digest()
    eid, sid = ids_of(n)
    return [
        DeliveryRow(
            eid, t, sid, t + 1, "step", b'{"command":":"}', sha, "ok", PAYLOAD, sha, sha, b"state", (), 1.0, 0.5
        )
        for t in range(first, last)
    ]


async def begin(journal: Any, episodes: int) -> None:
    """Commit sessions and episodes."""
    from errata_server.journal import EpisodeRow, SessionRow

    for at in range(0, episodes, 500):
        records: list[Any] = []
        for n in range(at, min(at + 500, episodes)):
            eid, sid = ids_of(n)
            records += [SessionRow(sid, "e", "none", 1, 1.0), EpisodeRow(eid, sid, "e", 1.0)]
        await journal.commit(*records)


def measure(directory: Path, sessions: int, group: int, seconds: float) -> dict[str, float]:
    """Return durable rows a second and CPU a row in microseconds. Imports late: PYTHONPATH names the checkout."""

    async def run() -> dict[str, float]:
        journal = opened(directory)
        await begin(journal, sessions)
        done, t, wall, cpu, chance = 0, 0, 0.0, 0.0, random.Random(1)
        while wall < seconds:
            rows = [row for n in chance.sample(range(sessions), sessions) for row in rows_of(n, t, t + 1)]
            t += 1
            began, used = time.perf_counter(), time.process_time()
            for at in range(0, sessions, group):
                await asyncio.gather(*(journal.commit(row) for row in rows[at : at + group]))
            wall += time.perf_counter() - began
            cpu += time.process_time() - used
            done += sessions
        began, used = time.perf_counter(), time.process_time()
        journal.close()  # what waited for the index counts too
        cpu += time.process_time() - used
        wall += time.perf_counter() - began
        return {"rows_s": done / wall, "cpu_us": cpu / done * 1e6}

    return asyncio.run(run())


def measure_reads(directory: Path, rows: int, reads: int) -> dict[str, float]:
    """Return percentiles of one read in milliseconds, how long filling and opening took, and bytes a row."""

    async def fill() -> None:
        journal = opened(directory)
        episodes = max(1, rows // EPISODE)
        await begin(journal, episodes)
        for n in range(episodes):
            await journal.commit(*rows_of(n, 0, min(EPISODE, rows)))
        journal.close()

    began = time.perf_counter()
    asyncio.run(fill())
    filled = time.perf_counter() - began
    began = time.perf_counter()
    journal = opened(directory)
    opening = time.perf_counter() - began
    chance, took = random.Random(1), list[float]()
    for _ in range(reads):
        n, t = chance.randrange(max(1, rows // EPISODE)), chance.randrange(min(EPISODE, rows))
        began = time.perf_counter()
        found = journal.delivery(ids_of(n)[0], t)
        took.append((time.perf_counter() - began) * 1e3)
        assert found is not None and found.t == t
    journal.close()
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    took.sort()
    return {
        "p50_ms": took[len(took) // 2],
        "p99_ms": took[len(took) * 99 // 100],
        "open_s": opening,
        "fill_us_a_row": filled / rows * 1e6,
        "bytes_a_row": size / rows,
    }


def in_process(checkout: Path, directory: Path | None, arguments: list[str]) -> dict[str, float]:
    """Run one measurement on the sources of a checkout."""
    path = os.pathsep.join(str(checkout / part) for part in ("protocol", "server"))
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [sys.executable, __file__, "--one", "--dir", scratch, *arguments]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))


def writes(args: argparse.Namespace) -> dict[str, Any]:
    """Measure writing in alternating rounds."""
    checkouts = {"journal": ROOT, **({"baseline": args.baseline.resolve()} if args.baseline else {})}
    fixed = ["--sessions", str(args.sessions), "--seconds", str(args.seconds)]
    rounds = [
        {
            (name, group): in_process(checkout, args.dir, [*fixed, "--group", str(group)])
            for group in GROUPS
            for name, checkout in checkouts.items()
        }
        for _ in range(args.rounds)
    ]
    found: dict[str, Any] = {}
    for group in GROUPS:
        for what in ("rows_s", "cpu_us"):
            for name in checkouts:
                values = [r[name, group][what] for r in rounds]
                found[f"{name}, groups of {group}, {what}"] = {
                    "median": statistics.median(values),
                    "spread": [min(values), max(values)],
                    "rounds": values,
                    "ratio_to_baseline": statistics.median(
                        r[name, group][what] / r["baseline", group][what] for r in rounds
                    )
                    if args.baseline
                    else None,
                }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="checkout whose journal is the baseline")
    parser.add_argument("--dir", type=Path, help="where to write; its disk is what is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--reads", action="store_true", help="measure reads by the size of the journal instead")
    parser.add_argument("--rows", default="1000,10000,100000,1000000", help="sizes for --reads")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="one short round of each")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if args.group:
            print(json.dumps(measure(args.dir, args.sessions, args.group, args.seconds)))
        else:
            print(json.dumps(measure_reads(args.dir, int(args.rows), 2000)))
        return
    if args.smoke:
        args.rounds, args.seconds, args.sessions, args.rows = 1, 0.1, 500, "1000"
    found: dict[str, Any] = {}
    if not args.reads or args.smoke:
        found |= writes(args)
    if args.reads or args.smoke:
        for rows in args.rows.split(","):
            found[f"{int(rows):,} rows"] = in_process(ROOT, args.dir, ["--rows", rows])
    found["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for name, values in found.items():
        if "median" in values:
            ratio = f"{values['ratio_to_baseline']:5.2f} x baseline" if values["ratio_to_baseline"] else ""
            print(f"{name:42} {values['median']:10,.1f}   {ratio}")
        else:
            print(
                f"{name:42} " + "  ".join(f"{k} {v if isinstance(v, str) else round(v, 3)}" for k, v in values.items())
            )


if __name__ == "__main__":
    main()
