"""What a lease costs a commit, and what a take-over of a data directory costs: its copy and its new index.

    python bench/take_over.py [--dir PATH] [--deliveries N] [--rounds N] [--json] [--smoke]

A journal of N small deliveries in episodes of 100 is taken over and opened, each round into a new directory. A look at
the lease is what a group commit does twice with a lease, and never without one. All is CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from errata_server.journal import DeliveryRow, EpisodeRow, IndexedJournal, JournalConfig, SessionRow
from errata_server.journal.segments_type import SegmentsType
from errata_server.runtime.lease import Lease, LeaseWriter, now_ns

TURNS = 100
LOOKS = 100_000


async def fill(directory: Path, deliveries: int) -> None:
    """Commit the deliveries, all episodes' turns together, as sessions that step at one time do."""
    journal = IndexedJournal(directory, fsync=False)
    episodes = max(1, deliveries // TURNS)
    for n in range(episodes):
        sid, eid = f"s{n:08d}", f"ep_{n:08d}"
        await journal.commit(
            SessionRow(sid=sid, environment="echo", recovery="reexecute", seed=1, created=1.0),
            EpisodeRow(eid=eid, sid=sid, environment="echo", created=1.0),
        )
    for t in range(TURNS):
        await asyncio.gather(*(journal.commit(row(n, t)) for n in range(episodes)))
    journal.close()


def row(n: int, t: int) -> DeliveryRow:
    """Return delivery ``t`` of episode ``n``."""
    payload = json.dumps({"observation": {"text": f"{n} {t}"}, "reward": 0.0, "done": False}).encode()
    request = json.dumps({"message": f"{n} {t}"}).encode()
    return DeliveryRow(
        eid=f"ep_{n:08d}", t=t, sid=f"s{n:08d}", id=t + 1, kind="step" if t else "reset", request=request,
        request_sha=sha256(request).digest(), status="ok", payload=payload, digest=sha256(payload).digest(),
        semantic_digest=None, state=None, refs=(), created=1.0, reward=0.0,
    )  # fmt: skip


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return how many seconds of CPU a call took, and its result."""
    began = time.process_time()
    found = call()
    return time.process_time() - began, found


def measured(directory: Path, deliveries: int, rounds: int) -> dict[str, Any]:
    """Return the figures of each round."""
    asyncio.run(fill(directory / "first", deliveries))
    LeaseWriter(directory / "lease").grant(1, now_ns() + 3_600_000_000_000)
    lease, store = Lease(directory / "lease"), SegmentsType()
    found: dict[str, list[float]] = {"look_us": [], "copy_s": [], "open_s": [], "again_s": []}
    for n in range(rounds):
        target = directory / f"taken-{n}"
        found["look_us"].append(timed(lambda: [lease.is_valid() for _ in range(LOOKS)])[0] / LOOKS * 1e6)
        found["copy_s"].append(timed(lambda to=target: store.take_over(directory / "first", to))[0])  # type: ignore[misc]
        for name in ("open_s", "again_s"):
            seconds, journal = timed(lambda to=target: store.open(JournalConfig(to, is_ours=lease.is_valid)))  # type: ignore[misc]
            found[name].append(seconds)
            journal.close()
    size = sum(path.stat().st_size for path in (directory / "first").glob("*.log"))
    return {"deliveries": deliveries, "segment_bytes": size, **found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="its disk is what is measured")
    parser.add_argument("--deliveries", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="one small round")
    args = parser.parse_args()
    if args.smoke:
        args.deliveries, args.rounds = 1_000, 1
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        found = measured(Path(directory), args.deliveries, args.rounds)
    found["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['deliveries']:,} deliveries, {found['segment_bytes'] / 2**20:,.1f} MiB of segments")
    for name in ("look_us", "copy_s", "open_s", "again_s"):
        values = found[name]
        print(f"{name:8} {statistics.median(values):9.3f}   ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
