"""Grades a final state by the benchmark's rules, in forks of its snapshot that no command of the agent can reach.

A grading has two results. ``resolved`` is the benchmark's: its rules on the log and exit code of one run of the test
command. ``tampering`` is ours, and has four sources besides markers of the benchmark that a run prints:

* a twin of the run, which goes on beside it and whose tests of FAIL_TO_PASS expect something else (`twins`);
* canaries, in a further run of the same command, where the first earns something (`canaries`);
* a third run with the base commit's configuration of the tests and the modules that judge for them, where the agent
  has changed any and the first run earns something: what passes only with the agent's own conftest.py, or its own
  ``raises``, was not repaired;
* files of the tests that could not be put in place;
* tests of FAIL_TO_PASS that the rules do not count, where the rest earns something: rules 4 leave skipped tests out.

Whatever the agent's state causes is a verdict. Where a run gives none, or the tests cannot be put in place for it, the
same tests run on the untouched start, and where they give none there, on the start with the gold patch. If that gives
one, the state broke the run, which is ``not resolved``; if not, the machine did, which is `NoVerdictHere` and never a
reward.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal
from weakref import WeakKeyDictionary

from errata_environment.grading.control import ControlRuns
from errata_environment.grading.forks import forked, forks_gone
from errata_environment.grading.results import NoVerdict
from errata_server.environments.worker_calls import call_in_worker
from errata_server.sandbox.base import Backend, SandboxSnapshot
from errata_server.workers import Budget, BudgetExceeded

from ..rules.verdict import Resolution, judge
from . import canaries, readings, twins
from .patches import applicable
from .prepare.store import NoVerdictHere, Prepared
from .readings import Changes, File
from .workspaces import (
    GRADING_LIMITS,
    TestRun,
    Tests,
    Unplaceable,
    files_of_base,
    our_state,
    run_tests,
    tests_of,
    texts_of,
)

log = logging.getLogger("errata.swe")

Canaries = Literal["ok", "wrong", "none"]

_BUDGET = Budget(cpu_s=60.0)
"""Of reading a log: the parsers take 2 s for the 16 MiB that are kept of an output."""
_NAMED = 5
"""How many files or canaries a line of ``tampering`` names."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The grading of a final state.

    Args:
        resolved: Whether the instance is resolved by the benchmark's rules alone.
        tampering: Signs of interference with the tests, in words; empty if there were none.
        resolution: The verdict of the rules.
        log: The log that the rules read.
        exit_code: Exit status of the test command; None if it was killed at its time limit, or not run.
        seconds: Wall time of the whole grading, in seconds.
        tests_s: Wall time of the graded run alone, in seconds.
        canaries: Result of the canaries and the twin. ``ok``; ``wrong``: they did something else than on a state of
            ours; ``none``: there was neither, because the tests have no form of them or the graded run gave no verdict.
    """

    resolved: bool
    tampering: tuple[str, ...]
    resolution: Resolution = field(repr=False)
    log: str = field(repr=False)
    exit_code: int | None = None
    seconds: float = 0.0
    tests_s: float = 0.0
    canaries: Canaries = "none"

    @property
    def reward(self) -> float:
        """1.0 where it is resolved and was not tampered with."""
        return float(self.resolved and not self.tampering)


_controls = ControlRuns()
_expected: WeakKeyDictionary[Backend, dict[tuple[str, int, bool], canaries.Outcome | None]] = WeakKeyDictionary()


async def grade(
    backend: Backend, snapshot: SandboxSnapshot, prepared: Prepared, *, rules: int = 5, timeout_s: float = 600.0
) -> Graded:
    """Grade ``snapshot``, which stays as it is.

    Args:
        backend: Holds the snapshot.
        snapshot: The agent's final state; its shell state is not used.
        prepared: The instance.
        rules: 5 or 4.
        timeout_s: Time limit of one run of the tests, seconds.

    Raises:
        NoVerdictHere: The tests give no verdict on the untouched start either, nor with the gold patch.
        EnvironmentFailed: The untouched start cannot be read.
        SandboxFailed: The sandbox broke.
    """
    started = time.monotonic()
    tests = await tests_of(backend, prepared)
    made = await _twin(prepared, tests)
    try:
        run, beside = await _both(backend, snapshot, prepared, tests, made, timeout_s)
    except Unplaceable as error:
        await _demand_a_verdict(backend, prepared, tests, rules, timeout_s, again=error.timed_out)
        graded = _not_run(prepared, rules, error)
    else:
        twin = None if made is None or beside is None else (made, beside)
        graded = await _graded(backend, snapshot, prepared, tests, run, twin, rules, timeout_s)
    await forks_gone(backend)
    return replace(graded, seconds=time.monotonic() - started)


async def _both(
    backend: Backend,
    snapshot: SandboxSnapshot,
    prepared: Prepared,
    tests: Tests,
    made: twins.Twin | None,
    timeout_s: float,
) -> tuple[TestRun, TestRun | None]:
    """Run the tests and a twin of them side by side, in a random order of their starts.

    Raises:
        Unplaceable: The tests, or those of the twin, could not be put in place.
        SandboxFailed: The sandbox broke.
    """
    all_files = [tests.files] if made is None else [tests.files, _with(tests, made.files)]
    order = random.SystemRandom().sample(range(len(all_files)), len(all_files))
    runs = {
        which: asyncio.ensure_future(
            run_tests(backend, snapshot, prepared, tests, files=all_files[which], timeout_s=timeout_s)
        )
        for which in order
    }
    try:
        await asyncio.gather(*runs.values())
    finally:  # where one failed, the other ends before its forks are counted
        for run in runs.values():
            run.cancel()
        await asyncio.wait(runs.values())
    return runs[0].result(), runs[1].result() if 1 in runs else None


async def _with_twin(
    backend: Backend,
    snapshot: SandboxSnapshot,
    prepared: Prepared,
    tests: Tests,
    graded: Graded,
    made: twins.Twin,
    run: TestRun,
    rules: int,
    timeout_s: float,
) -> Graded:
    """Note what a twin shows.

    What is suspicious counts only if the same twin shows something else on a state of ours, and a change that an honest
    state may satisfy only if tests that fail at their end pass as well. Where there is no answer, as of a run that
    was cut off, ``canaries`` stays as it was.
    """
    asked_again = False
    while True:
        if run.result.timed_out:  # beside the graded run, on a busy machine
            try:
                run = await _alone(backend, snapshot, prepared, tests, made, timeout_s)
            except Unplaceable:
                return graded
        if run.result.timed_out:
            log.warning("%s: its twin took more than %g s", prepared.instance.instance_id, timeout_s)
            return graded
        found = (await _shown(prepared, made, run, rules)).beside(graded.resolution.fail_to_pass.success)
        if not found.suspicious(_earns(graded.resolution)):
            return replace(graded, canaries="ok")
        try:
            ours = await gold(backend, prepared)
        except NoVerdict as error:
            log.warning("%s: nothing to hold a twin against: %s", prepared.instance.instance_id, error)
            return graded
        with our_state(prepared):
            control = await _alone(backend, ours, prepared, tests, made, timeout_s)
        if control.result.timed_out:
            log.warning("%s: a twin took more than %g s on its gold patch", prepared.instance.instance_id, timeout_s)
            return graded
        wrong = twins.differences(await _shown(prepared, made, control, rules), found, made.unsure)
        if wrong:
            what = f"tests that expect something else: {_some(wrong)}"
            return replace(graded, canaries="wrong", tampering=(*graded.tampering, what))
        other = None if asked_again else await _twin(prepared, tests, ends=True)
        if other is None:
            return replace(graded, canaries="ok")
        # What the changed tests expect did not matter, or may not: the same question with tests that fail at their end.
        asked_again, made = True, other
        try:
            run = await _alone(backend, snapshot, prepared, tests, made, timeout_s)
        except Unplaceable:
            return graded


async def _alone(
    backend: Backend,
    state: SandboxSnapshot,
    prepared: Prepared,
    tests: Tests,
    made: twins.Twin,
    timeout_s: float,
) -> TestRun:
    """Run a twin in a state, with nothing beside it."""
    return await run_tests(backend, state, prepared, tests, files=_with(tests, made.files), timeout_s=timeout_s)


async def _twin(prepared: Prepared, tests: Tests, *, ends: bool = False) -> twins.Twin | None:
    with our_state(prepared):
        given = (prepared.instance, _modules(tests))
        return await call_in_worker("the tests", twins.twin, *given, ends, budget=_BUDGET)


async def _shown(prepared: Prepared, made: twins.Twin, run: TestRun, rules: int) -> twins.Shown:
    given = (prepared.instance, prepared.recipe.runner, made.tests, run.result.stdout, rules)
    try:
        return await call_in_worker("the output of the tests", twins.shown, *given, budget=_BUDGET)
    except BudgetExceeded:
        return twins.Shown()


def _with(tests: Tests, files: Mapping[str, str]) -> dict[str, File]:
    """Return the files of the tests with other texts of some, whose modes stay."""
    modes = {path: file["mode"] for path, file in tests.files.items() if file is not None and "mode" in file}
    return {**tests.files, **{path: _file(text, modes.get(path, 0o644)) for path, text in files.items()}}


def _not_run(prepared: Prepared, rules: int, error: Unplaceable) -> Graded:
    """Return the grading of a state in which the tests cannot be put in place: not resolved, with the reason."""
    return Graded(resolved=False, tampering=(), resolution=_invalid(prepared, rules, str(error)), log="")


def _invalid(prepared: Prepared, rules: int, why: str) -> Resolution:
    # The rules read no word of the reason: it may hold names of the agent's files.
    return replace(judge(prepared.instance, "", rules=rules, runner=prepared.recipe.runner), invalid=why)


async def _graded(
    backend: Backend,
    snapshot: SandboxSnapshot,
    prepared: Prepared,
    tests: Tests,
    run: TestRun,
    twin: tuple[twins.Twin, TestRun] | None,
    rules: int,
    timeout_s: float,
) -> Graded:
    """Grade a state by a run of the tests on it and its twin, and by the further runs that its result calls for."""
    resolution, forged = await _judged(prepared, run, rules, timeout_s)
    graded = Graded(
        resolved=resolution.resolved,
        tampering=tuple(f"the tests printed {marker!r}" for marker in forged),
        resolution=resolution,
        log=readings.log_of(run.result.stdout, run.result.exit_code, timeout_s if run.result.timed_out else None),
        exit_code=run.result.exit_code,
        tests_s=run.result.duration_s,
    )
    if run.refused:
        graded = replace(graded, tampering=(*graded.tampering, f"files of the tests are barred: {_some(run.refused)}"))
    uncounted = _uncounted(prepared, resolution)
    if uncounted and _earns(resolution):
        what = f"tests of FAIL_TO_PASS have no result that counts, as of a skipped test: {_some(uncounted)}"
        graded = replace(graded, tampering=(*graded.tampering, what))
    if resolution.invalid:
        await _demand_a_verdict(backend, prepared, tests, rules, timeout_s, again=run.result.timed_out)
        return graded
    if twin is not None:
        graded = await _with_twin(backend, snapshot, prepared, tests, graded, *twin, rules, timeout_s)
    if twin is None or (_earns(resolution) and graded.canaries != "wrong"):
        changed = run.changes
        base = await files_of_base(backend, prepared, (*changed.tests, *changed.configuration))
        graded = await _with_canaries(backend, snapshot, prepared, tests, graded, base, rules, timeout_s)
        if (changed.configuration or changed.helpers) and _earns(resolution) and not graded.tampering:
            judging = {**base, **await files_of_base(backend, prepared, changed.helpers)}
            graded = await _without_changes(
                backend, snapshot, prepared, tests, graded, changed, judging, rules, timeout_s
            )
    return graded


async def _demand_a_verdict(
    backend: Backend, prepared: Prepared, tests: Tests, rules: int, timeout_s: float, *, again: bool
) -> None:
    """Show that the tests give a verdict here on a state that the agent has not changed.

    Args:
        backend: Holds the states.
        prepared: The instance.
        tests: Its hidden tests.
        rules: 5 or 4.
        timeout_s: Time limit of one run of the tests, seconds.
        again: Show it even if it was shown before: a time limit was reached, which a busy machine may cause.

    Raises:
        NoVerdictHere: They do not.
    """

    said = ""

    async def verdict(state: SandboxSnapshot) -> None:
        nonlocal said
        control = await run_tests(backend, state, prepared, tests, files=tests.files, timeout_s=timeout_s)
        said = control.result.stdout
        found, _ = await _judged(prepared, control, rules, timeout_s)
        if found.invalid:
            raise NoVerdict(found.invalid)

    async def control() -> None:
        try:
            await verdict(prepared.snapshot)
        except NoVerdict:
            # An instance whose tests cannot even be collected before the repair is judged by its gold patch.
            await verdict(await gold(backend, prepared))

    try:
        await _controls.demand(backend, f"{prepared.digest} {rules}", control, again=again)
    except NoVerdict as error:
        raise NoVerdictHere(
            f"{prepared.instance.instance_id} cannot be graded here: its tests give no verdict on its untouched start "
            f"either, nor with its gold patch: {error}",
            log=said,
        ) from error


async def gold(backend: Backend, prepared: Prepared) -> SandboxSnapshot:
    """Return the start with the gold patch.

    Raises:
        NoVerdict: It does not apply.
        SandboxFailed: The sandbox broke.
    """
    async with forked(backend, prepared.snapshot, limits=GRADING_LIMITS) as fork:
        applied = await fork.run(
            f"cd {prepared.workdir} && git apply --whitespace=nowarn -",
            stdin=applicable(prepared.instance.patch),
            clean=True,
        )
        if applied.exit_code != 0:
            raise NoVerdict(f"the gold patch does not apply: {applied.stderr[-300:]}")
        return await fork.snapshot()


async def _with_canaries(
    backend: Backend,
    snapshot: SandboxSnapshot,
    prepared: Prepared,
    tests: Tests,
    graded: Graded,
    base: Mapping[str, File],
    rules: int,
    timeout_s: float,
) -> Graded:
    """Run canaries on the agent's state, with the base commit's configuration of the tests, and note what they show."""
    for whole in (True, False) if _earns(graded.resolution) else (False,):
        wanted = await _expected_canaries(backend, prepared, tests, rules, timeout_s, whole)
        if wanted is not None:
            made = await _made(prepared, tests, whole)
            assert made is not None
            found: canaries.Outcome | None
            try:
                found = await _canaries(backend, snapshot, prepared, tests, made, base, rules, timeout_s)
                wrong = canaries.differences(wanted, found)
            except Unplaceable:
                found, wrong = None, ("they cannot be put in place",)
            except BudgetExceeded as error:
                found, wrong = None, (str(error),)
            if wrong:
                # The drawn names may matter to a test command, for instance by their order: so these very canaries
                # have to do something else on a state of ours.
                ours = await _unchanged(backend, prepared, whole)
                with our_state(prepared):
                    control = await _canaries(backend, ours, prepared, tests, made, {}, rules, timeout_s)
                wrong = canaries.differences(control, found) if found is not None else wrong
            if not wrong:
                return replace(graded, canaries="ok")
            return replace(graded, canaries="wrong", tampering=(*graded.tampering, f"wrong canaries: {_some(wrong)}"))
    return graded


async def _expected_canaries(
    backend: Backend, prepared: Prepared, tests: Tests, rules: int, timeout_s: float, whole: bool
) -> canaries.Outcome | None:
    """Return the results of canaries on a state that the agent has not changed; None if they cannot be used here.

    They cannot be used if there is no form of canaries for the instance's tests, if the gold patch does not apply
    (``whole`` only), or if the log does not distinguish canaries that pass from canaries that fail. The result, also
    None, is cached by backend, instance, ``rules`` and ``whole``. A run that exceeds ``timeout_s`` gives None too; that
    is not cached, because the machine may only be busy.

    Args:
        backend: Holds the instance's snapshot.
        prepared: The instance.
        tests: Its hidden tests.
        rules: Version of the benchmark's rules that read the log: 5 or 4.
        timeout_s: Time limit of the run, seconds.
        whole: True: the canaries are the modules of the hidden tests, each test made to fail, and run on the start
            with the gold patch; a module that cannot be parsed is replaced as for False. False: the canaries are tests
            of one line with the names of the hidden tests, and run on the start. Both have further tests with random
            names, some of which pass and some of which fail.

    Raises:
        EnvironmentFailed: Files could not be put in place.
        SandboxFailed: The sandbox broke.
    """
    known = _expected.setdefault(backend, {})
    key = (prepared.digest, rules, whole)
    if key not in known:
        found, made = None, await _made(prepared, tests, whole)
        try:
            if made is not None:
                state = await _unchanged(backend, prepared, whole)
                with our_state(prepared):
                    found = await _canaries(backend, state, prepared, tests, made, {}, rules, timeout_s)
        except NoVerdict as error:
            log.warning("%s: no canaries in its own tests: %s", prepared.instance.instance_id, error)
        if found is not None and found.exit_code is None:
            log.warning("%s: its canaries took more than %g s", prepared.instance.instance_id, timeout_s)
            return None
        known[key] = found if found is not None and found.usable else None
    return known[key]


async def _made(prepared: Prepared, tests: Tests, whole: bool) -> canaries.Canaries | None:
    with our_state(prepared):
        return await call_in_worker(
            "the tests",
            canaries.canaries,
            *(prepared.instance, prepared.recipe.runner, _modules(tests), whole, canaries.SECRET),
            budget=_BUDGET,
        )


async def _unchanged(backend: Backend, prepared: Prepared, whole: bool) -> SandboxSnapshot:
    """Return a state without the agent's changes: the start, with the gold patch if ``whole``.

    Raises:
        NoVerdict: The gold patch does not apply.
        SandboxFailed: The sandbox broke.
    """
    return await gold(backend, prepared) if whole else prepared.snapshot


async def _canaries(
    backend: Backend,
    state: SandboxSnapshot,
    prepared: Prepared,
    tests: Tests,
    made: canaries.Canaries,
    base: Mapping[str, File],
    rules: int,
    timeout_s: float,
) -> canaries.Outcome:
    """Run canaries in a state and return what they showed.

    Raises:
        Unplaceable: They could not be put in place.
        BudgetExceeded: Their output is too large.
    """
    runner = prepared.recipe.runner
    files = _with(tests, made.files)
    run = await run_tests(backend, state, prepared, tests, files=files, timeout_s=timeout_s, more=base)
    shown = (prepared.instance, runner, made, run.result.stdout, run.result.exit_code, rules)
    return await call_in_worker("the output of canaries", canaries.read, *shown, budget=_BUDGET)


async def _without_changes(
    backend: Backend,
    snapshot: SandboxSnapshot,
    prepared: Prepared,
    tests: Tests,
    graded: Graded,
    changed: Changes,
    base: Mapping[str, File],
    rules: int,
    timeout_s: float,
) -> Graded:
    """Run the tests of a grading that earns something again, with configuration and helpers of the base commit.

    Returns:
        ``graded`` as it is if it earns as much this way; otherwise with an entry in ``tampering`` that names the files
        which the agent changed.
    """
    kinds = {"configuration": changed.configuration, "helpers": changed.helpers}
    named = " and ".join(kind for kind, files in kinds.items() if files)
    files = _some((*changed.configuration, *changed.helpers))
    try:
        run = await run_tests(backend, snapshot, prepared, tests, files=tests.files, timeout_s=timeout_s, more=base)
    except Unplaceable as error:
        await _demand_a_verdict(backend, prepared, tests, rules, timeout_s, again=error.timed_out)
        what = f"the base commit's {named} of the tests cannot be put in place: {files}"
        return replace(graded, tampering=(*graded.tampering, what))
    resolution, _ = await _judged(prepared, run, rules, timeout_s)
    plain, own = (found.fail_to_pass for found in (resolution, graded.resolution))
    if not resolution.pass_to_pass.failure and set(own.success) <= set(plain.success):
        return graded
    passes = "resolved" if graded.resolved else "tests pass"
    what = f"{passes} only with the agent's own {named} of the tests: {files}"
    return replace(graded, tampering=(*graded.tampering, what))


def _earns(resolution: Resolution) -> bool:
    """Return whether a resolution without tampering earns something under any setting of the reward (`rubric`)."""
    return not resolution.pass_to_pass.failure and resolution.fail_to_pass.fraction > 0


def _uncounted(prepared: Prepared, resolution: Resolution) -> tuple[str, ...]:
    """Return the tests of FAIL_TO_PASS that are in the log and that the rules count neither as passed nor as failed."""
    counted = {*resolution.fail_to_pass.success, *resolution.fail_to_pass.failure}
    return tuple(test for test in prepared.instance.fail_to_pass if test not in counted)


async def _judged(prepared: Prepared, run: TestRun, rules: int, timeout_s: float) -> tuple[Resolution, tuple[str, ...]]:
    """Return the verdict of the rules on a run, and the benchmark's markers in its output; see `readings.judged`."""
    result, runner = run.result, prepared.recipe.runner
    limit_s = timeout_s if result.timed_out else None
    try:
        return await call_in_worker(
            "the output of the tests",
            readings.judged,
            *(prepared.instance, result.stdout, result.exit_code, limit_s, rules, runner),
            budget=_BUDGET,
        )
    except BudgetExceeded as error:
        return _invalid(prepared, rules, str(error)), ()


def _modules(tests: Tests) -> dict[str, str]:
    return {path: text for path, text in texts_of(tests.files).items() if path.endswith(".py")}


def _file(text: str, mode: int) -> File:
    return {"content": base64.b64encode(text.encode()).decode("ascii"), "mode": mode}


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
