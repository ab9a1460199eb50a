"""Shows that an instance can be graded here: each time it fails with the empty patch and passes with the gold patch."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, Limits, Sandbox

from ...dataset import Instance
from ...recipes import Recipe
from ...rules.verdict import Resolution, compose_log, judge
from ..patches import applicable
from .reach import fix_in_reach
from .sources import build_key
from .store import (
    VALIDATOR,
    Catalogue,
    NotPrepared,
    Prepared,
    Validation,
    demand,
    end_of_log,
    prepared_digest,
    problems_of,
)

RUNS = 3
RULES = 5
TIMEOUT_S = 1800.0
"""Of one run of an instance's tests: the benchmark's own default."""

TEST_LIMITS = Limits(
    memory_bytes=4 * 1024**3,
    pids=512,
    file_size_bytes=1024**3,
    disk_bytes=2 * 1024**3,
    inodes=200_000,
    cpu_s=2 * 3600,
    keep_bytes=64 * 1024**2,
)
_SHOWN = 5

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an instance's tests.

    Args:
        resolution: The verdict of the benchmark's rules.
        seconds: Duration of the test command, in seconds.
        log: The log that was judged.
        tampering: Signs that the grader took for interference with the tests, in words.
    """

    resolution: Resolution
    seconds: float
    log: str = ""
    tampering: tuple[str, ...] = ()


Grader = Callable[[Backend, Prepared, str], Awaitable[Run]]
"""Runs the tests of an instance on its start with a patch."""


async def run_tests(backend: Backend, prepared: Prepared, patch: str) -> Run:
    """Run an instance's tests on its start with a patch, as the benchmark does.

    Args:
        backend: Has the start.
        prepared: The instance.
        patch: Unified diff; empty: none.

    Raises:
        EnvironmentFailed: A patch does not apply.
        SandboxFailed: The sandbox broke.
    """
    sandbox = await backend.restore(prepared.snapshot, limits=TEST_LIMITS)
    instance = prepared.instance
    try:
        await applied(sandbox, prepared, "gold", patch)
        await applied(sandbox, prepared, "test", instance.test_patch)
        result = await sandbox.run(
            f"cd {prepared.workdir} && {{ {prepared.test_command}\n}} 2>&1",
            clean=True,
            env=prepared.env,
            timeout_s=TIMEOUT_S,
        )
    finally:
        await sandbox.destroy()
    log = compose_log(result.stdout, result.exit_code)
    resolution = judge(instance, log, result.exit_code, RULES, runner=prepared.recipe.runner)
    return Run(resolution, result.duration_s, log)


async def applied(sandbox: Sandbox, prepared: Prepared, name: str, patch: str) -> None:
    """Apply a patch to the work tree; does nothing for an empty one.

    Raises:
        EnvironmentFailed: It does not apply.
    """
    if not patch.strip():
        return
    result = await sandbox.run(
        f"cd {prepared.workdir} && git apply --verbose --whitespace=nowarn -",
        clean=True,
        env=prepared.env,
        stdin=applicable(patch),
    )
    demand(result, f"{prepared.instance.instance_id}: its {name} patch does not apply to its source: git apply")


async def validate(
    catalogue: Catalogue,
    instance: Instance,
    recipe: Recipe,
    *,
    runs: int = RUNS,
    grader: Grader = run_tests,
    progress: Progress = lambda line: None,
) -> Validation:
    """Run an instance's tests with the empty and with the gold patch, keep what that shows, and return it.

    Args:
        catalogue: Catalogue that has the instance prepared.
        instance: The instance.
        recipe: The recipe of the instance.
        runs: Number of test runs with each patch, the empty and the gold one.
        grader: Function that runs the tests.
        progress: Function that is called with one line for the search and one for each run.

    Raises:
        NotPrepared: It was not prepared.
        SandboxFailed: The sandbox broke.
    """
    prepared = await catalogue.find(instance, recipe, validated=False, flaky=False)
    build = catalogue.store.find(instance, build_key(instance, recipe))
    if build is None:
        raise NotPrepared(
            f"{instance.instance_id} was dropped from the store meanwhile: run `errata swe prepare` again"
        )
    found: dict[str, list[Run]] = {"empty": [], "gold": []}
    problems: list[str] = []
    try:
        progress(f"{instance.instance_id}: searching what its sessions can read for its fix")
        problems += [
            f"its sessions can read the fix: {place}" for place in await fix_in_reach(catalogue.backend, prepared)
        ]
        for number in () if problems else range(1, runs + 1):
            for side, patch in (("empty", ""), ("gold", instance.patch)):
                run = await grader(catalogue.backend, prepared, patch)
                found[side].append(run)
                counts = _counts(run.resolution)
                progress(
                    f"{instance.instance_id}: {side} patch, run {number} of {runs}: "
                    f"{', '.join(f'{name} {passed}/{total}' for name, (passed, total) in counts.items())} "
                    f"in {run.seconds:.1f} s"
                )
    except EnvironmentFailed as error:
        problems += problems_of(error)
    flaky: tuple[str, ...] = ()
    if not problems:
        problems, flaky = judged(found["empty"], found["gold"])
    validation = Validation(
        digest=prepared_digest(instance, recipe, build),
        problems=tuple(problems),
        flaky=flaky,
        runs=runs,
        before=_counts(found["empty"][-1].resolution) if found["empty"] else {},
        after=_counts(found["gold"][-1].resolution, leave_out=flaky) if found["gold"] else {},
        seconds=round(statistics.median(run.seconds for run in found["gold"]), 2) if found["gold"] else 0.0,
        rules=found["gold"][-1].resolution.rules if found["gold"] else "",
        validator=VALIDATOR,
    )
    catalogue.store.keep(replace(build, validation=validation))
    return validation


def judged(empty: Sequence[Run], gold: Sequence[Run]) -> tuple[list[str], tuple[str, ...]]:
    """Return why an instance must not be served, and the tests of PASS_TO_PASS that are to be left out as flaky."""
    problems = []
    if any(run.resolution.resolved for run in empty):
        problems.append("the empty patch resolves it: its tests do not show the issue")
    tampering = [line for run in (*empty, *gold) for line in run.tampering]
    if tampering:
        problems.append(f"the grader takes its own patches for an interference with the tests: {tampering[0]}")
    invalid = [run for run in gold if run.resolution.invalid]
    if invalid:
        problems.append(f"with the gold patch the run of its tests is invalid: {invalid[0].resolution.invalid}")
        problems += end_of_log(invalid[0].log)
        return problems, ()
    broken = _always(gold, "fail_to_pass")
    if broken:
        problems.append(f"the gold patch does not repair {_some(broken)} of FAIL_TO_PASS")
        problems += end_of_log(gold[0].log)
    wavering = [test for test in _ever(gold, "fail_to_pass") if test not in broken]
    if wavering:
        problems.append(f"with the gold patch {_some(wavering)} of FAIL_TO_PASS passes in some runs only")
    failing = _always(gold, "pass_to_pass")
    if failing:
        problems.append(
            f"with the gold patch {_some(failing)} of PASS_TO_PASS fails every time: if the environment is right and "
            "only this source lacks what they test, name them in exclude_pass_to_pass of the recipe"
        )
    flaky = [test for test in _ever(gold, "pass_to_pass") if test not in failing]
    # One that wavers before the repair only may be shown by the issue itself, unless the runs were valid.
    if not any(run.resolution.invalid for run in empty):
        always = set(_always(empty, "pass_to_pass"))
        flaky += [
            test for test in _ever(empty, "pass_to_pass") if test not in always and test not in (*flaky, *failing)
        ]
    if gold and not broken and not wavering and flaky and len(flaky) == len(_tests(gold[0], "pass_to_pass")):
        problems.append("every test of PASS_TO_PASS is flaky here")
    return problems, tuple(flaky)


def _always(runs: Sequence[Run], group: str) -> list[str]:
    """Return the tests of a group that failed in every run."""
    failures = [getattr(run.resolution, group).failure for run in runs]
    return [test for test in failures[0] if all(test in failure for failure in failures)] if failures else []


def _ever(runs: Sequence[Run], group: str) -> list[str]:
    """Return the tests of a group that failed in any run."""
    return list(dict.fromkeys(test for run in runs for test in getattr(run.resolution, group).failure))


def _tests(run: Run, group: str) -> tuple[str, ...]:
    outcome = getattr(run.resolution, group)
    return (*outcome.success, *outcome.failure)


def _counts(resolution: Resolution, leave_out: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    counts = {}
    for name, outcome in (("fail_to_pass", resolution.fail_to_pass), ("pass_to_pass", resolution.pass_to_pass)):
        passed = sum(test not in leave_out for test in outcome.success)
        counts[name] = passed, passed + sum(test not in leave_out for test in outcome.failure)
    return counts


def _some(tests: Sequence[str]) -> str:
    more = f" and {len(tests) - _SHOWN} more" if len(tests) > _SHOWN else ""
    return ", ".join(tests[:_SHOWN]) + more
