"""Forks of a final state in which tests run: what a state may not decide for itself is put in place before.

In every such fork the files that the test patch names, and the test modules of the base commit, are those of the base
commit with the test patch; byte code and caches are gone, ``HOME`` and the directories for temporary files are empty,
and no shell state of the agent is used.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from errata_protocol.errors import EnvironmentFailed
from errata_server.environments.worker_calls import call_in_worker
from errata_server.grading.forks import forked
from errata_server.grading.results import NoVerdict
from errata_server.grading.staging import staged
from errata_server.sandbox.base import Backend, CommandResult, Limits, Sandbox, SandboxSnapshot
from errata_server.workers import Budget, BudgetExceeded

from ..rules.directives import test_files
from . import readings
from .patches import applicable
from .prepare.store import Prepared
from .readings import NO_CHANGES, Changes, File, Survey

GRADING_LIMITS = Limits(
    memory_bytes=4 * 1024**3,
    pids=512,
    file_size_bytes=1024**3,
    disk_bytes=2 * 1024**3,
    inodes=200_000,
    cpu_s=2 * 3600,
    keep_bytes=16 * 1024**2,
)
_OUR_LIMITS = replace(GRADING_LIMITS, keep_bytes=64 * 1024**2)
"""Of a state without changes of the agent, whose files are read."""
_OUR_BUDGET = Budget(answer_bytes=96 * 1024**2)

_SCRIPT = Path(__file__).with_name("inside") / "workspace.py"
_COMMAND = "exec /usr/bin/python3 -I -S /grading/workspace.py"
_TIMEOUT_S = 300.0
_CLEAR = ("/tmp", "/var/tmp", "/dev/shm")
_RUNNERS = ("_pytest", "attr", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py", "pytest", "toml", "tomli")
SURVEY = {
    "kinds": {
        "test": r"(^|/)(test_[^/]*|[^/]*_test|tests)\.py$",
        "configuration": (
            r"(^|/)(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|[^/]*\.pth|entry_points\.txt"
            r"|sitecustomize\.py|usercustomize\.py|runtests\.py)$|^bin/[^/]*test[^/]*$|(^|/)tests/.*\.py$"
        ),
    },
    "modules": sorted({*sys.stdlib_module_names, *_RUNNERS}),
    "most": 50_000,
    "most_bytes": 4 * 1024**2,
}
"""Which files of a repository are surveyed. ``test``: test modules. ``configuration``: what can change how tests run
without being code under test. ``module``: a module outside of any package, with a name of the standard library or of a
test runner's; one that the base commit does not have stands in front of the real one. A state with more than ``most``
of all these, or whose names take more than ``most_bytes``, gets no verdict but "not resolved"."""


class Unplaceable(NoVerdict):
    """The tests could not be put in place in a state, because of its files or of the machine; the message says how.

    Args:
        message: What happened.
        timed_out: It took too long, which a busy machine may cause.
    """

    def __init__(self, message: str, *, timed_out: bool) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@contextmanager
def our_state(prepared: Prepared) -> Iterator[None]:
    """Turn `Unplaceable` and `BudgetExceeded` into `EnvironmentFailed`, in a state without changes of the agent."""
    try:
        yield
    except (Unplaceable, BudgetExceeded) as error:
        raise EnvironmentFailed(f"{prepared.instance.instance_id}: {error}") from error


@dataclass(frozen=True, slots=True)
class Tests:
    """The tests of an instance's base commit.

    Args:
        files: The files that the test patch names, as they are with it.
        survey: Files of the untouched start, by path.
    """

    files: Mapping[str, File] = field(repr=False)
    survey: Survey = field(repr=False)


_known: WeakKeyDictionary[Backend, dict[str, Tests]] = WeakKeyDictionary()
_KEPT = 64


async def tests_of(backend: Backend, prepared: Prepared) -> Tests:
    """Return the tests of an instance's base commit; the last few results are cached.

    Raises:
        EnvironmentFailed: The test patch does not apply to the start, or the start cannot be read.
        SandboxFailed: The sandbox broke.
    """
    known = _known.setdefault(backend, {})
    if prepared.digest in known:
        return known[prepared.digest]
    patch, name = prepared.instance.test_patch, prepared.instance.instance_id
    async with forked(backend, prepared.snapshot, limits=_OUR_LIMITS) as sandbox:
        with our_state(prepared):
            before = await _ours(sandbox, prepared, survey=True)
        if patch.strip():
            applied = await sandbox.run(
                f"cd {prepared.workdir} && git apply --whitespace=nowarn -",
                stdin=applicable(patch),
                clean=True,
            )
            if applied.exit_code != 0:
                raise EnvironmentFailed(f"the test patch of {name} does not apply: {applied.stderr[-500:]}")
        with our_state(prepared):
            paths = tuple(test_files(patch))
            after = await _ours(sandbox, prepared, read=paths)
    while len(known) >= _KEPT:
        del known[next(iter(known))]
    known[prepared.digest] = tests = Tests(_files(paths, after["read"]), readings.survey_of(before))
    return tests


async def files_of_base(backend: Backend, prepared: Prepared, paths: tuple[str, ...]) -> dict[str, File]:
    """Return files of the untouched start; those that it does not have are None.

    Raises:
        EnvironmentFailed: The start cannot be read.
        SandboxFailed: The sandbox broke.
    """
    if not paths:
        return {}
    async with forked(backend, prepared.snapshot, limits=_OUR_LIMITS) as sandbox:
        with our_state(prepared):
            found = await _ours(sandbox, prepared, read=paths)
    return _files(paths, found["read"])


def _files(paths: tuple[str, ...], read: Mapping[str, File]) -> dict[str, File]:
    """Return all files that were asked for; the answer leaves out those that are not there."""
    return {path: read.get(path) for path in paths}


async def _ours(sandbox: Sandbox, prepared: Prepared, **request: Any) -> dict[str, Any]:
    """Run inside/workspace.py in a state without changes of the agent and return its answer.

    Raises:
        Unplaceable: It gave no answer.
        BudgetExceeded: Its answer is too large.
        SandboxFailed: The sandbox broke.
    """
    nonce, result = await _run(sandbox, prepared, request)
    try:
        return await call_in_worker("the state", readings.answer, result, nonce, budget=_OUR_BUDGET)
    except NoVerdict as error:
        raise _unplaceable(error, result) from error


async def _placed(sandbox: Sandbox, prepared: Prepared, tests: Tests, **request: Any) -> readings.Placed:
    """Run inside/workspace.py in a state of the agent and return what it put in place, and what the agent changed.

    Raises:
        Unplaceable: It gave no answer, or one that is too large.
        SandboxFailed: The sandbox broke.
    """
    nonce, result = await _run(sandbox, prepared, request)
    try:
        return await call_in_worker("the state", readings.placed, result, nonce, tests.survey, frozenset(tests.files))
    except (NoVerdict, BudgetExceeded) as error:
        raise _unplaceable(error, result) from error


async def _run(sandbox: Sandbox, prepared: Prepared, request: dict[str, Any]) -> tuple[str, CommandResult]:
    nonce = secrets.token_hex(16)
    asked: dict[str, Any] = {**request, "nonce": nonce, "root": prepared.workdir}
    if asked.pop("survey", False):
        asked["survey"] = SURVEY
    result = await sandbox.run(
        _COMMAND,
        clean=True,
        mounts={"/grading": staged(_SCRIPT)},
        stdin=json.dumps(asked).encode(),
        timeout_s=_TIMEOUT_S,
    )
    return nonce, result


def _unplaceable(error: Exception, result: CommandResult) -> Unplaceable:
    return Unplaceable(f"its tests could not be put in place: {error}", timed_out=result.timed_out)


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of the test command in a fork.

    Args:
        result: What the command did.
        changes: What the state has changed of the tests' surroundings.
        refused: Files of the tests that could not be put in place.
    """

    result: CommandResult
    changes: Changes = NO_CHANGES
    refused: tuple[str, ...] = ()

    __test__ = False


async def run_tests(
    backend: Backend,
    state: SandboxSnapshot,
    prepared: Prepared,
    tests: Tests,
    *,
    files: Mapping[str, File],
    timeout_s: float,
    more: Mapping[str, File] | None = None,
) -> TestRun:
    """Run the instance's test command in a fork of a state.

    Args:
        backend: Holds the state.
        state: A snapshot.
        prepared: The instance.
        tests: Of the instance.
        files: Put in place first: the tests.
        timeout_s: Time limit of the command, seconds.
        more: Files of the base commit to put in place too; None: those test modules that the state changed.

    Raises:
        Unplaceable: The files could not be put in place.
        EnvironmentFailed: The untouched start cannot be read.
        SandboxFailed: The sandbox broke.
    """
    home = f"/tmp/home-{secrets.token_hex(8)}"
    async with forked(backend, state, limits=GRADING_LIMITS, wait=False) as fork:
        given = {**files, **(more or {})}
        placed = await _placed(fork, prepared, tests, files=given, clear=_CLEAR, home=home, survey=True)
        refused = placed.refused
        altered = placed.changes.tests if more is None else ()
        if altered:
            restored = await files_of_base(backend, prepared, altered)
            refused += (await _placed(fork, prepared, tests, files=restored)).refused
        result = await fork.run(
            f"cd {prepared.workdir} && {{ {prepared.test_command}\n}} 2>&1",
            clean=True,
            env={**prepared.env, "HOME": home},
            timeout_s=timeout_s,
        )
    return TestRun(result, placed.changes, refused)
