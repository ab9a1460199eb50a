"""Forks of a final state in which tests run: what a state may not decide for itself is put in place before.

In every such fork the files that the test patch names, and the test modules of the base commit, are those of the base
commit with the test patch; byte code and caches are gone, ``HOME`` and the directories for temporary files are empty,
and no shell state of the agent is used.
"""

from __future__ import annotations

import base64
import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from errata_environment.grading.forks import forked
from errata_environment.grading.results import NoVerdict
from errata_environment.grading.staging import staged
from errata_protocol.errors import EnvironmentFailed
from errata_server.environments.worker_calls import call_in_worker
from errata_server.sandbox.base import Backend, CommandResult, Limits, Sandbox, SandboxSnapshot
from errata_server.workers import Budget, BudgetExceeded

from ..rules.directives import test_files
from ..rules.helpers import ROOTS, asserted, candidates, declared, followed, module_of
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
_DECLARING = ("setup.cfg", "pyproject.toml", "setup.py")
_MOST_LEVELS = 5
"""How often a name is followed from the module that imports it to the one that it comes from."""
_CLEAR = ("/tmp", "/var/tmp", "/dev/shm")
_RUNNERS = ("_pytest", "attr", "exceptiongroup", "iniconfig", "packaging", "pluggy", "py", "pytest", "toml", "tomli")
SURVEY: Mapping[str, Any] = {
    "kinds": {
        "test": r"(^|/)(test_[^/]*|[^/]*_test|tests)\.py$",
        "configuration": (
            r"(^|/)(conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|[^/]*\.pth|entry_points\.txt"
            r"|sitecustomize\.py|usercustomize\.py|runtests\.py)$|^bin/[^/]*test[^/]*$|(^|/)tests/.*\.py$"
        ),
        "helper": (
            r"(^|/)_?(tests?|testing|test_?(utils?|support|helpers?|tools?|lib)|pytester|pytest_?plugin)"
            r"(/.*|\.[^/]*)?\.(py|pyc|so)$"
        ),
    },
    "helpers": [],
    "roots": ROOTS,
    "modules": sorted({*sys.stdlib_module_names, *_RUNNERS}),
    "most": 50_000,
    "most_bytes": 4 * 1024**2,
}
"""Which files of a repository are surveyed. ``test``: test modules. ``configuration``: what can change how tests run
without being code under test. ``helper``: modules that test modules judge with, by where they usually stand; an
instance has more, by their keys (`rules.helpers`). ``module``: a module outside of any package, with a name of the
standard library or of a test runner's; one that the base commit does not have stands in front of the real one. A state
with more than ``most`` of all these, or with names of more than ``most_bytes``, gets no verdict but "not resolved"."""


class Unplaceable(NoVerdict):
    """The tests could not be put in place in a state, because of its files or of the machine; the message says how.

    Args:
        message: Description of what happened.
        timed_out: Whether it took too long, which a busy machine may cause.
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
        helpers: Keys of the modules from which the test files have their assertions (`rules.helpers`).
        repaired: Keys of the modules that the gold patch changes.
    """

    files: Mapping[str, File] = field(repr=False)
    survey: Survey = field(repr=False)
    helpers: tuple[str, ...] = ()
    repaired: frozenset[str] = frozenset()


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
            files = _files(paths, (await _ours(sandbox, prepared, read=paths))["read"])
            helpers = await _helpers(sandbox, prepared, files)
            surveyed = await _ours(sandbox, prepared, survey=helpers)
    while len(known) >= _KEPT:
        del known[next(iter(known))]
    repaired = frozenset(map(module_of, test_files(prepared.instance.patch)))
    known[prepared.digest] = tests = Tests(files, readings.survey_of(surveyed), helpers, repaired)
    return tests


async def _helpers(sandbox: Sandbox, prepared: Prepared, files: Mapping[str, File]) -> tuple[str, ...]:
    """Return the keys of the modules inside the repository from which test files have their assertions."""
    seen = {f"{directory}/conftest.py".lstrip("/") for path in files for directory in _above(path)}
    plain = await _texts(sandbox, prepared, (*seen, *_DECLARING))
    sources = {**texts_of(files), **{path: text for path, text in plain.items() if path in seen}}
    names = list(await call_in_worker("the tests", asserted, sources, budget=_OUR_BUDGET))
    for path in _DECLARING:
        names += await call_in_worker("the tests", declared, plain.get(path, ""), budget=_OUR_BUDGET)
    found: dict[str, None] = {}
    for _ in range(_MOST_LEVELS):
        if not names:
            break
        texts = await _texts(
            sandbox, prepared, tuple(dict.fromkeys(path for name in names for path in candidates(name)))
        )
        defining, further = await call_in_worker("the tests", followed, names, texts, budget=_OUR_BUDGET)
        found.update(dict.fromkeys(map(module_of, defining)))
        names = list(further)
    return tuple(found)


def _above(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]


async def _texts(sandbox: Sandbox, prepared: Prepared, paths: tuple[str, ...]) -> dict[str, str]:
    return texts_of((await _ours(sandbox, prepared, read=paths))["read"])


def texts_of(files: Mapping[str, File]) -> dict[str, str]:
    """Return the texts of files, by path, without links and files that are not there."""
    contents = {path: file["content"] for path, file in files.items() if file is not None and "content" in file}
    return {path: base64.b64decode(content).decode("utf-8", "replace") for path, content in contents.items()}


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
        given = (result, nonce, tests.survey, frozenset(tests.files), tests.repaired)
        return await call_in_worker("the state", readings.placed, *given)
    except (NoVerdict, BudgetExceeded) as error:
        raise _unplaceable(error, result) from error


async def _run(sandbox: Sandbox, prepared: Prepared, request: dict[str, Any]) -> tuple[str, CommandResult]:
    nonce = secrets.token_hex(16)
    asked: dict[str, Any] = {**request, "nonce": nonce, "root": prepared.workdir}
    if "survey" in asked:
        asked["survey"] = {**SURVEY, "helpers": asked["survey"]}
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
        result: Result of the test command.
        changes: Changes that the state has made in the tests' surroundings.
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
        backend: Backend that holds the state.
        state: Snapshot of the state.
        prepared: The prepared instance.
        tests: Tests of the instance.
        files: Files of the tests, which are put in place first; None for one that must not be there.
        timeout_s: Time limit of the command, seconds.
        more: Files of the base commit to put in place too; None puts back the test modules that the state changed.

    Raises:
        Unplaceable: The files could not be put in place.
        EnvironmentFailed: The untouched start cannot be read.
        SandboxFailed: The sandbox broke.
    """
    home = f"/tmp/home-{secrets.token_hex(8)}"
    async with forked(backend, state, limits=GRADING_LIMITS, wait=False) as fork:
        given = {**files, **(more or {})}
        placed = await _placed(fork, prepared, tests, files=given, clear=_CLEAR, home=home, survey=tests.helpers)
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
