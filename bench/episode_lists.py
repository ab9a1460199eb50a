"""What lists of episodes and sums over them cost in a large journal, and how long its index takes to make again.

    python bench/episode_lists.py [--episodes N] [--repeats N] [--dir PATH] [--json] [--smoke]

Fills a journal with episodes of several environments, tasks, statuses and error kinds, each with a few deliveries, and
asks for pages of 50 as a server does: from the request's parameters to the bytes of its answer, HTTP apart. A filter
that nothing matches has to look at each episode. Each figure is the median of so many repeats, warm, by one reader.
Then the index is removed and the journal opened again, as at the first start of a version with another index.
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
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from errata_protocol.episode_lists import EpisodeFilter, EpisodeOrder
from errata_server.episodes.reads import JournalReads
from errata_server.journal import DeliveryRow, EpisodeRow, IndexedJournal, SessionChange, SessionRow
from errata_server.journal.index import INDEX
from errata_server.runtime.store import Store

BEGAN = 1_700_000_000.0
OWNER = hashlib.sha256(b"token").hexdigest()
ENVIRONMENTS = ("terminal_env", "swe_bench_lite_env", "count")
KINDS = ("path_not_found", "timeout", "nonzero_exit", "syntax_error", "test_failed", "command_not_found")
TURNS = 4
AT_ONCE = 500

LISTS: dict[str, tuple[EpisodeFilter, EpisodeOrder]] = {
    "newest": (EpisodeFilter(), EpisodeOrder()),
    "oldest": (EpisodeFilter(), EpisodeOrder(descending=False)),
    "by last activity": (EpisodeFilter(), EpisodeOrder("last")),
    "by reward": (EpisodeFilter(), EpisodeOrder("reward")),
    "by deliveries": (EpisodeFilter(), EpisodeOrder("deliveries")),
    "by errors": (EpisodeFilter(), EpisodeOrder("errors")),
    "by errors of a kind": (
        EpisodeFilter(error_kind="timeout"), EpisodeOrder.of("errors", True, EpisodeFilter(error_kind="timeout"))
    ),
    "environment and kind, by reward": (
        EpisodeFilter(environment="count", error_kind="timeout"), EpisodeOrder("reward", False)
    ),
    "one task": (EpisodeFilter(task="django__django-11099"), EpisodeOrder()),
    "status open": (EpisodeFilter(status="open"), EpisodeOrder()),
    "status closed": (EpisodeFilter(status="closed"), EpisodeOrder()),
    "status done, reward and time": (
        EpisodeFilter(status="done", reward_min=1.0, created_from=BEGAN + 3600), EpisodeOrder("last")
    ),
    "text in 1 of 500 tasks": (EpisodeFilter(text="DJANGO-11099"), EpisodeOrder()),
    "text that nothing has": (EpisodeFilter(text="no such text"), EpisodeOrder()),
    "kind that nothing has": (EpisodeFilter(error_kind="none"), EpisodeOrder()),
    "reward that nothing has": (EpisodeFilter(reward_min=99.0), EpisodeOrder()),
}  # fmt: skip


SUMS: dict[str, tuple[EpisodeFilter, int]] = {
    "by day": (EpisodeFilter(), 86_400),
    "by hour": (EpisodeFilter(), 3_600),
    "by hour, one environment and kind": (EpisodeFilter(environment="count", error_kind="timeout"), 3_600),
    "by hour, text in 1 of 500 tasks": (EpisodeFilter(text="DJANGO-11099"), 3_600),
    "in one": (EpisodeFilter(), 366 * 86_400),
}


def ids_of(n: int) -> tuple[str, str]:
    """Return the eid and sid of episode n: in no order, as a server draws them."""
    drawn = hashlib.sha256(f"{n}".encode()).hexdigest()
    return f"ep_{drawn[:22]}", f"s_{drawn[22:44]}"


def records_of(n: int, chance: random.Random) -> list[Any]:
    """Return the rows of episode n, its session's among them."""
    eid, sid = ids_of(n)
    created = BEGAN + 10.0 * n
    task = f"django__django-{11_000 + chance.randrange(500)}"
    payload = json.dumps({"observation": {"task_id": task, "output": "o" * 400}, "reward": None, "done": False})
    sha = hashlib.sha256(payload.encode()).digest()
    environment = chance.choice(ENVIRONMENTS)
    rows: list[Any] = [
        SessionRow(sid, environment, "reexecute", 1, created, principal=OWNER),
        EpisodeRow(eid, sid, environment, created, principal=OWNER),
    ]
    ends, errs = chance.random() < 0.85, chance.random() < 0.5
    for t in range(TURNS):
        kind = chance.choice(KINDS) if errs and t else None
        rows.append(
            DeliveryRow(
                eid,
                t,
                sid,
                t + 1,
                "step" if t else "reset",
                b'{"command":":"}',
                sha,
                "ok",
                payload.encode(),
                sha,
                sha,
                None,
                (),
                created + t,
                chance.choice((None, 0.0, 0.25, 1.0)),
                ends and t == TURNS - 1,
                kind,
                kind and f"{kind}.{chance.randrange(3)}",
            )
        )
    status = chance.choice(("open", *["closed"] * 17, "lost", "expired"))
    if status != "open":
        rows.append(SessionChange(sid, status=status))
    return rows


async def fill(journal: IndexedJournal, episodes: int) -> None:
    """Commit the episodes."""
    chance = random.Random(1)
    for at in range(0, episodes, AT_ONCE):
        rows = [row for n in range(at, min(at + AT_ONCE, episodes)) for row in records_of(n, chance)]
        await journal.commit(*rows)


async def timed(call: Callable[[], Awaitable[Any]], repeats: int) -> dict[str, Any]:
    """Return the median and the spread of a call, in milliseconds, after one that is not counted."""
    await call()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        await call()
        took.append((time.perf_counter() - began) * 1e3)
    return {"median_ms": statistics.median(took), "spread_ms": [min(took), max(took)]}


async def measure(directory: Path, episodes: int, repeats: int) -> dict[str, Any]:
    """Return what each list costs, how long the index takes to make, and the size of the files."""
    journal = IndexedJournal(directory)
    await fill(journal, episodes)
    journal.close()
    found: dict[str, Any] = {}
    index = directory / INDEX
    found["files"] = {
        "index_mb": index.stat().st_size / 1e6,
        "all_mb": sum(file.stat().st_size for file in directory.iterdir()) / 1e6,
    }
    index.unlink()
    began = time.perf_counter()
    journal = IndexedJournal(directory)
    found["the index made again"] = {"seconds": time.perf_counter() - began, "rows": episodes * (2 + TURNS)}
    store = Store(None, floor_bytes=0, wait_s=1.0)
    store.open(journal, None)
    reads = JournalReads(store)
    for name, (wanted, order) in LISTS.items():

        async def page(wanted: EpisodeFilter = wanted, order: EpisodeOrder = order) -> bytes:
            listed = await reads.page(limit=50, cursor=None, wanted=wanted, order=order, principal=OWNER)
            return listed.model_dump_json().encode()

        found[f"page: {name}"] = await timed(page, repeats)
    for name, (wanted, bucket_s) in SUMS.items():

        async def sums(wanted: EpisodeFilter = wanted, bucket_s: int = bucket_s) -> bytes:
            found = await reads.aggregates(bucket_s=bucket_s, wanted=wanted, principal=OWNER)
            return found.model_dump_json().encode()

        found[f"aggregates: {name}"] = await timed(sums, repeats)
    store.close()
    journal.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="where to write")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a small journal, each list once")
    args = parser.parse_args()
    if args.smoke:
        args.episodes, args.repeats = 1_000, 1
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        found = asyncio.run(measure(Path(scratch), args.episodes, args.repeats))
    found["episodes"] = {"episodes": args.episodes, "repeats": args.repeats}
    found["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for name, values in found.items():
        shown = (f"{k} {v}" if isinstance(v, str | list) else f"{k} {v:,.1f}" for k, v in values.items())
        print(f"{name:42} " + "  ".join(shown))


if __name__ == "__main__":
    main()
