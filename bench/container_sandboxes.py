"""Sandboxes of the namespace and the docker backend, one after the other: open, command, snapshot, fork.

    python bench/container_sandboxes.py [--rounds N] [--json] [--smoke]

Needs the base tree, and a broker with the same tree as image ``errata/base:default`` (ERRATA_SANDBOXD_SOCKET). Prints
milliseconds: median and highest. Without a broker it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from errata_server.sandbox.base import Backend
from errata_server.sandbox.docker.backend import DockerBackend
from errata_server.sandbox.docker.backend_type import broker_socket
from errata_server.sandbox.namespace.backend import NamespaceBackend

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


async def measure(rounds: int) -> dict[str, Times]:
    """Return the times of each backend."""
    found: dict[str, Times] = {}
    with tempfile.TemporaryDirectory(prefix="errata-bench-") as place:
        backends = {
            "namespace": NamespaceBackend(Path(place) / "namespace"),
            "docker, no pool": DockerBackend(Path(place) / "cold", broker_socket(), spare=0),
            "docker, pool": None,
        }
        for name in backends:
            found[name] = defaultdict(list)
        for name, backend in backends.items():
            # The two of the broker are of one owner, and a start removes what the other has.
            made = backend or DockerBackend(Path(place) / "pool", broker_socket(), spare=2)
            await made.start()
            await one_round(made, defaultdict(list))
            for _ in range(rounds):
                await asyncio.sleep(0.5)  # for the pool to fill
                await one_round(made, found[name])
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
