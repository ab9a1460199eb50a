"""Run schedules by the thousand, or show one; `make simulate SEEDS=0..9999`."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Protocol

from .world import World


class Schedule(Protocol):
    """All that one seed decides: a `World`, or a fleet of them.

    Attributes:
        trace: What happened.
        actions: Actions in the schedule, muted ones included.
    """

    actions: int

    @property
    def trace(self) -> list[str]: ...

    def run(self) -> Schedule:
        """Run it."""

    def seen(self) -> dict[str, int]:
        """Return how often what the schedule is about came to pass."""


BLOCK = 100
"""Seeds that one process runs before it reports."""


def failure(
    seed: int, muted: frozenset[int] = frozenset(), schedule: Callable[..., Schedule] = World, **fault: Any
) -> tuple[Schedule, Exception | None]:
    """Run a schedule and return what broke, None if all promises held.

    Args:
        seed: Which one.
        muted: As `World`.
        schedule: Class of the schedule.
        **fault: As `World`, or as the other class has them.
    """
    world = schedule(seed, muted=muted, **fault)
    try:
        world.run()
    except Exception as error:
        return world, error
    return world, None


def shortest(seed: int, error: Exception, **fault: Any) -> frozenset[int]:
    """Return actions without which the schedule still fails in the same way, as many as a quick search finds."""
    muted: frozenset[int] = frozenset()
    size = failure(seed, **fault)[0].actions
    length = max(1, size // 2)
    while length:
        for start in range(0, size, length):
            tried = muted | frozenset(range(start, start + length))
            if tried != muted and _alike(failure(seed, tried, **fault)[1], error):
                muted = tried
        length //= 2
    return muted


def _alike(one: Exception | None, other: Exception) -> bool:
    return type(one) is type(other) and _shape(str(one)) == _shape(str(other))


def _shape(text: str) -> str:
    return "".join(c for c in text[:80] if not c.isdigit() and c not in "abcdef ")


def _run_block(schedule: type[Schedule], first: int, last: int) -> tuple[int, dict[int, str], Counter[str]]:
    _quiet()
    failed: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for seed in range(first, last + 1):
        world, error = failure(seed, schedule=schedule)
        if error is not None:
            failed[seed] = f"{type(error).__name__}: {str(error)[:200]}"
        seen.update(world.seen())
    return last - first + 1, failed, seen


def _quiet() -> None:
    logging.disable(logging.CRITICAL)  # injected faults are no news
    gc.set_threshold(20_000, 50, 50)


def _run_all(program: str, schedule: type[Schedule], first: int, last: int, jobs: int) -> int:
    started, done, failed, seen = time.monotonic(), 0, dict[int, str](), Counter[str]()
    with ProcessPoolExecutor(jobs) as pool:
        blocks = [pool.submit(_run_block, schedule, n, min(n + BLOCK - 1, last)) for n in range(first, last + 1, BLOCK)]
        for block in as_completed(blocks):
            count, broken, met = block.result()
            done += count
            failed |= broken
            seen.update(met)
            for seed, what in sorted(broken.items()):
                print(f"seed {seed}: {what}\n    {program} --trace {seed}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{done} of {last - first + 1}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    print(f"{done} schedules, {len(failed)} failed, {done / seconds:.0f}/s on {jobs} processes")
    print(", ".join(f"{count} {what}" for what, count in seen.most_common()))
    return 1 if failed else 0


def _show(schedule: type[Schedule], seed: int, *, whole: bool) -> int:
    _quiet()
    world, error = failure(seed, schedule=schedule)
    if error is not None and not whole:
        world, error = failure(seed, shortest(seed, error, schedule=schedule), schedule)
    print("\n".join(world.trace))
    if error is None:
        print("all promises held")
        return 0
    print(f"{type(error).__name__}: {error}")
    return 1


def main(schedule: type[Schedule] = World, program: str = "python -m tests.server.simulated") -> int:
    """Run the command line.

    Args:
        schedule: Class of the schedules.
        program: How the command begins.
    """
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("seeds", nargs="?", default="0..999", help="a number of seeds, or a range: 5000..5999")
    parser.add_argument("--trace", type=int, metavar="SEED", help="show one schedule, shortened where it fails")
    parser.add_argument("--whole", action="store_true", help="do not shorten it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.trace is not None:
        return _show(schedule, args.trace, whole=args.whole)
    first, last = args.seeds.split("..") if ".." in args.seeds else (0, int(args.seeds) - 1)
    return _run_all(program, schedule, int(first), int(last), args.jobs)


if __name__ == "__main__":
    sys.exit(main())
