"""Sandboxes of the namespace and the docker backend in alternating rounds: open, command, snapshot, fork, grading.

    python bench/container_sandboxes.py [--rounds N] [--json] [--smoke]

Needs the base tree, and a broker (``--memory-mib 8192``) with the same tree as image ``errata/base:default``, at
ERRATA_SANDBOXD_SOCKET. Prints milliseconds: median and highest. Without a broker it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from errata_server.sandbox.base import Backend
from errata_server.sandbox.docker.backend import DockerBackend
from errata_server.sandbox.docker.backend_type import broker_socket
from errata_server.sandbox.namespace.backend import NamespaceBackend
from swe_bench_lite_env.server.environment import SESSION_LIMITS
from swe_bench_lite_env.server.grading import grade
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.starts import starts_on

INSTANCE = "errata-examples__confkit-1"
Times = dict[str, list[float]]


async def timed(times: Times, name: str, call):
    """Await a call and keep its milliseconds."""
    began = time.perf_counter()
    result = await call
    times[name].append((time.perf_counter() - began) * 1000)
    return result


async def one_round(backend: Backend, times: Times) -> None:
    """Measure one session."""
    began = time.perf_counter()
    box = await backend.open()
    await box.run("true")
    times["open and first command"].append((time.perf_counter() - began) * 1000)
    for _ in range(3):
        await timed(times, "command", box.run("echo 1 > f"))
    await box.run("mkdir d; for i in {1..50}; do echo $i > d/$i; done")
    snapshot = await timed(times, "snapshot of 50 files", box.snapshot())
    began = time.perf_counter()
    fork = await backend.restore(snapshot)
    assert (await fork.run("cat d/7")).stdout == "7\n"
    times["fork and first command"].append((time.perf_counter() - began) * 1000)
    await fork.destroy()
    await timed(times, "destroy", box.destroy())


async def graded(backend: Backend, times: Times) -> None:
    """Grade the gold patch of a bundled instance of swe_bench_lite."""
    dataset, recipes = bundled()
    instance = next(one for one in dataset if one.instance_id == INSTANCE)
    prepared, sandbox = await starts_on(backend).open(instance, recipes[INSTANCE], SESSION_LIMITS, bundled=True)
    try:
        applied = await sandbox.run(f"cd {prepared.workdir} && git apply -", stdin=instance.patch.encode())
        assert applied.exit_code == 0, applied.stderr
        state = await sandbox.snapshot()
        found = await timed(times, f"grading of {INSTANCE}", grade(backend, state, prepared))
        assert found.resolved
    finally:
        await sandbox.destroy()


async def measure(rounds: int) -> dict[str, Times]:
    """Return the times of each backend."""
    found: dict[str, Times] = {}
    with tempfile.TemporaryDirectory(prefix="errata-bench-") as place:
        backends = {
            "namespace": lambda: NamespaceBackend(Path(place) / "namespace"),
            "docker, no pool": lambda: DockerBackend(Path(place) / "cold", broker_socket(), spare=0),
            "docker, pool": lambda: DockerBackend(Path(place) / "pool", broker_socket(), spare=2),
        }
        for name in backends:
            found[name] = defaultdict(list)
        halves = (rounds + 1) // 2
        # The two of the broker are of one owner, and a start removes what the other has: never both at once.
        for name, make in [*backends.items(), *backends.items()]:
            os.environ["ERRATA_SWE_STORE"] = f"{place}/store of {name.partition(',')[0]}"  # each builds on its own base
            made = make()
            await made.start()
            await one_round(made, defaultdict(list))
            if name != "docker, pool":
                await graded(made, defaultdict(list))
            for _ in range(halves):
                await asyncio.sleep(0.5)  # for the pool to fill
                await one_round(made, found[name])
                if name != "docker, pool":
                    await graded(made, found[name])
            await made.collect([])
            await made.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not broker_socket().is_socket():
        print(f"no broker on {broker_socket()}: start `errata sandboxd`; nothing was measured")
        return
    found = asyncio.run(measure(1 if options.smoke else options.rounds))
    if options.json:
        print(json.dumps(found))
        return
    for name, times in found.items():
        for what, values in times.items():
            print(f"{name:16} {what:24} {statistics.median(values):8.1f} {max(values):8.1f}")


if __name__ == "__main__":
    main()
