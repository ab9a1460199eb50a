"""What swe_bench_lite costs: opening a warm session, grading, and many sessions that run and submit at once.

    python bench/swe_sessions.py [--json] [--smoke]
    python bench/swe_sessions.py --dataset FILE --recipes FILE --store DIR [--instance ID ...] [--rounds N] [--json]

Everything goes through a server in a process of its own, on the bundled instances. An opening and a trivial command
alternate, and the ratio is taken per round. A submit alternates with the bare test run: the same test files, put into
a session's tree, and the instance's test command as an agent would run it; and with an empty run of the same runner.
The second form measures gradings alone, on instances that `errata swe prepare` has prepared in DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import posixpath
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from typing import Any

from errata_bench.latencies import percentile
from errata_server.process import ServerProcess
from swe_bench_lite_env import SweBenchLiteEnv
from swe_bench_lite_env.dataset import Instance, load_dataset
from swe_bench_lite_env.recipes import Recipe, load_recipes
from swe_bench_lite_env.rules.directives import test_files
from swe_bench_lite_env.server.offered import bundled

EMPTY_RUN = "echo 'def test_nothing(): pass' > {file} && {runner} -rA {file}"
"""Beside the tests, so that what their runner loads for any test is loaded."""
TEST_TIMEOUT_S = 600.0


async def seconds(call: Awaitable[Any]) -> tuple[float, Any]:
    """Return how long a call took, and its result."""
    started = time.perf_counter()
    result = await call
    return time.perf_counter() - started, result


async def opening(server: ServerProcess, rounds: int, each: int) -> dict[str, Any]:
    """A reset onto a prepared instance against the command `:`, alternating; milliseconds."""
    names = [one.instance_id for one in bundled()[0]]
    ratios, opens, commands = [], [], []
    async with SweBenchLiteEnv(server.url) as env:
        for name in names:
            await env.reset(instance_id=name)
        for _ in range(rounds):
            opened, ran = [], []
            for n in range(each):
                took, _ = await seconds(env.reset(instance_id=names[n % len(names)]))
                opened.append(took)
                await env.run(":")  # the first command of a session begins its shell
                took, _ = await seconds(env.run(":"))
                ran.append(took)
            ratios.append(percentile(sorted(opened), 0.5) / percentile(sorted(ran), 0.5))
            opens += opened
            commands += ran
    return {
        "open_p50_ms": percentile(sorted(opens), 0.5) * 1e3,
        "open_p95_ms": percentile(sorted(opens), 0.95) * 1e3,
        "command_p50_ms": percentile(sorted(commands), 0.5) * 1e3,
        "ratio_p50_median_of_rounds": statistics.median(ratios),
        "ratio_p50_rounds": [round(ratio, 2) for ratio in ratios],
    }


async def grading(
    server: ServerProcess, instances: Iterable[Instance], recipes: Mapping[str, Recipe], rounds: int
) -> dict[str, Any]:
    """A submit of the gold patch against the bare test run, and an empty run, by instance; medians, seconds."""
    found = {}
    async with SweBenchLiteEnv(server.url) as env:
        for instance in instances:
            bare, empty, graded = [], [], []
            command = recipes[instance.instance_id].test_command
            nothing = posixpath.join(posixpath.dirname(test_files(instance.test_patch)[0]), "test_nothing.py")
            for _ in range(rounds):
                await env.reset(instance_id=instance.instance_id)
                for patch in (instance.patch, instance.test_patch):
                    assert (await env.apply_patch(patch)).observation.error_kind is None
                took, run = await seconds(env.run(command, timeout_s=TEST_TIMEOUT_S))
                assert run.observation.exit_code in (0, 1), run.observation.stdout  # 1: of excluded tests some fail
                bare.append(took)
                took, run = await seconds(env.run(EMPTY_RUN.format(file=nothing, runner=command.split()[0])))
                assert run.observation.exit_code == 0, run.observation.stdout
                empty.append(took)
                await env.reset(instance_id=instance.instance_id)
                await env.apply_patch(instance.patch)
                took, end = await seconds(env.submit())
                assert end.reward == 1.0, instance.instance_id
                graded.append(took)
            middle = [statistics.median(values) for values in (bare, empty, graded)]
            found[instance.instance_id] = {
                "bare_s": middle[0],
                "empty_run_s": middle[1],
                "submit_s": middle[2],
                "allowed_s": 1.2 * middle[0] + 1.0 + middle[1],
            }
    return found


async def many(server: ServerProcess, data_dir: Path, sessions: int) -> dict[str, Any]:
    """Open sessions at once, run a command in each, submit all; every other one with the gold patch."""
    instances = list(bundled()[0])
    chosen = [instances[n % len(instances)] for n in range(sessions)]
    repaired = [n // len(instances) % 2 == 0 for n in range(sessions)]
    async with SweBenchLiteEnv(server.url) as env:
        for instance in instances:  # what the first session of each costs is shared by the others
            await env.reset(instance_id=instance.instance_id)
            await env.run(":")
    memory, disk, processes = _memory(server), _disk(data_dir), len(_descendants(server))
    envs = [SweBenchLiteEnv(server.url) for _ in chosen]
    result: dict[str, Any] = {"sessions": sessions, "cores": os.cpu_count()}
    try:
        took, _ = await seconds(
            asyncio.gather(*(_open(env, instance.instance_id) for env, instance in zip(envs, chosen, strict=True)))
        )
        result["open_all_s"] = took
        took, runs = await seconds(asyncio.gather(*(env.run("git status --short; echo $PWD") for env in envs)))
        assert {run.observation.stdout for run in runs} == {"/testbed\n"}
        result["run_all_s"] = took
        for env, instance, repair in zip(envs, chosen, repaired, strict=True):
            if repair:
                await env.apply_patch(instance.patch)
        result["memory_kib_each"] = (_memory(server) - memory) / sessions
        result["disk_kib_each"] = (_disk(data_dir) - disk) / sessions
        result["processes_each"] = (len(_descendants(server)) - processes) / sessions
        submits = asyncio.ensure_future(seconds(asyncio.gather(*(env.submit() for env in envs))))
        peak = 0
        while not submits.done():
            peak = max(peak, _memory(server))
            await asyncio.wait([submits], timeout=1.0)
        took, ends = await submits
        result["submit_all_s"] = took
        result["memory_peak_mib"] = peak / 1024
        result["verdicts_right"] = sum(
            end.done and end.reward == float(repair) for end, repair in zip(ends, repaired, strict=True)
        )
        result["disk_kib_each_after"] = (_disk(data_dir) - disk) / sessions
    finally:
        await asyncio.gather(*(env.close() for env in envs))
    return result


async def _open(env: SweBenchLiteEnv, instance_id: str) -> None:
    await env.connect()
    await env.reset(instance_id=instance_id)


def _descendants(server: ServerProcess) -> list[int]:
    """Return the server and all processes below it, those of its sandboxes included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [server.process.pid]
    for pid in found:
        found += children.get(pid, [])
    return found


def _memory(server: ServerProcess) -> int:
    """Return the proportional set size of the server and its sandboxes, KiB."""
    total = 0
    for pid in _descendants(server):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def _disk(directory: Path) -> int:
    done = subprocess.run(["du", "-sk", str(directory)], check=False, capture_output=True, text=True)
    return int(done.stdout.split()[0])  # files that end while it counts are errors that count nothing


async def measure(small: bool) -> dict[str, Any]:
    """Run everything."""
    machine = f"{platform.machine()} {platform.release()} python {platform.python_version()}"
    result: dict[str, Any] = {"machine": machine}
    with tempfile.TemporaryDirectory() as scratch:
        data_dir = Path(scratch) / "data"
        env = {"ERRATA_SWE_STORE": str(Path(scratch) / "store")}
        with ServerProcess("swe_bench_lite", data_dir, env=env) as server:
            result["opening"] = await opening(server, *((2, 7) if small else (7, 28)))
            result["grading"] = await grading(server, *bundled(), 1 if small else 5)
        # A server of its own: memory that another measurement freed would serve these sessions, and not be counted.
        with ServerProcess("swe_bench_lite", data_dir, env=env) as server:
            result["many"] = await many(server, data_dir, 14 if small else 200)
    return result


async def measure_real(dataset: Path, recipe_file: Path, store: Path, names: list[str], rounds: int) -> dict[str, Any]:
    """Measure gradings of instances of a data set."""
    machine = f"{platform.machine()} {platform.release()} python {platform.python_version()}"
    recipes = load_recipes(recipe_file)
    wanted = names or list(recipes)
    instances = [one for one in load_dataset(str(dataset)) if one.instance_id in wanted]
    env = {
        "ERRATA_SWE_DATASET": str(dataset),
        "ERRATA_SWE_RECIPES": str(recipe_file),
        "ERRATA_SWE_STORE": str(store),
    }
    with (
        tempfile.TemporaryDirectory() as scratch,
        ServerProcess("swe_bench_lite", Path(scratch) / "data", "--step-timeout", "1800", env=env) as server,
    ):
        return {"machine": machine, "grading": await grading(server, instances, recipes, rounds)}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="small and quick: shows that it runs, measures nothing")
    parser.add_argument("--dataset", type=Path, help="measure gradings of instances of this file instead")
    parser.add_argument("--recipes", type=Path, help="their recipes")
    parser.add_argument("--store", type=Path, help="where errata swe prepare has put them")
    parser.add_argument("--instance", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.dataset:
        if not (options.recipes and options.store):
            parser.error("--dataset needs --recipes and --store")
        given = (options.dataset, options.recipes, options.store, options.instance, options.rounds)
        result = asyncio.run(measure_real(*given))
    else:
        result = asyncio.run(measure(options.smoke))
    if options.json:
        print(json.dumps(result))
        return
    for name, figures in result.items():
        print(name)
        for key, value in figures.items() if isinstance(figures, dict) else [("", figures)]:
            if isinstance(value, dict):
                value = ", ".join(f"{part} {number:.3f}" for part, number in value.items())
            print(f"    {key:32} {value:.3f}" if isinstance(value, float) else f"    {key:32} {value}")


if __name__ == "__main__":
    main()
