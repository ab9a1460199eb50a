"""What is read of a run of the tests, in a worker process: pure functions of texts whose length an agent chooses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from errata_environment.grading.results import NoVerdict, nonced
from errata_server.sandbox.base import CommandResult

from ..dataset import Instance
from ..rules.helpers import module_of
from ..rules.verdict import STOPPED, Resolution, compose_log, forged_markers, judge

File = dict[str, Any] | None
"""A file as inside/workspace.py reads and writes it; None: nothing is there."""

Survey = Mapping[str, tuple[str, str]]
"""Kind and digest of a file, by path."""

MOST_CHANGED = 2_000
"""Most files of the tests' configuration that a state may change: each is restored for further runs."""

_TIMED_OUT = STOPPED[3]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a state has changed of the tests' surroundings.

    Args:
        tests: Test modules of the base commit that were changed or deleted.
        configuration: Files that can change how tests run: changed, added or deleted.
        helpers: Modules inside the repository that judge for the tests: changed, deleted, or added in front of one.
    """

    tests: tuple[str, ...] = ()
    configuration: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()


NO_CHANGES = Changes()


@dataclass(frozen=True, slots=True)
class Placed:
    """What inside/workspace.py did in a state of the agent.

    Args:
        refused: Files of the tests that could not be put in place.
        changes: Changes that the state has made; empty if no survey was asked for.
    """

    refused: tuple[str, ...]
    changes: Changes = NO_CHANGES


def answer(result: CommandResult, nonce: str) -> dict[str, Any]:
    """Return the answer of inside/workspace.py.

    Raises:
        NoVerdict: There is none, or it says that the state has too many files.
    """
    found = nonced(result, nonce)
    if "excess" in found:
        raise NoVerdict(found["excess"])
    return found


def placed(
    result: CommandResult, nonce: str, base: Survey, files: Collection[str], repaired: Collection[str] = ()
) -> Placed:
    """Return what inside/workspace.py did in a state of the agent.

    Args:
        result: The result of its run.
        nonce: The nonce of its answer.
        base: The survey of the untouched start.
        files: Paths that the test patch names, which are no changes of the agent's.
        repaired: Keys of the modules that the gold patch changes (`rules.helpers`).

    Raises:
        NoVerdict: There is no answer, or the state has too many files, or too many changes.
    """
    found = answer(result, nonce)
    changed = changes(base, survey_of(found), files, repaired) if "survey" in found else NO_CHANGES
    if len(changed.configuration) + len(changed.helpers) > MOST_CHANGED:
        raise NoVerdict(f"more than {MOST_CHANGED} files that can change how tests run were changed")
    return Placed(tuple(found["refused"]), changed)


def survey_of(found: Mapping[str, Any]) -> Survey:
    """Return the survey in an answer of inside/workspace.py."""
    return {path: (kind, digest) for path, (kind, digest) in found["survey"].items()}


def changes(base: Survey, survey: Survey, files: Collection[str], repaired: Collection[str] = ()) -> Changes:
    """Return what a surveyed state has changed of the survey ``base``, apart from ``files``. Linear in both.

    A helper that the gold patch changes is code under test: its key is in ``repaired``.
    """
    tests, configuration, helpers = [], [], []
    before_helpers = {(module_of(path), digest) for path, (kind, digest) in base.items() if kind == "helper"}
    after_helpers = {(module_of(path), digest) for path, (kind, digest) in survey.items() if kind == "helper"}
    moved = before_helpers & after_helpers  # the same module with the same text, wherever it lies
    judging = {module for module, _ in before_helpers}.difference(repaired)
    for path in dict.fromkeys((*base, *survey)):
        before, after = base.get(path), survey.get(path)
        if before == after or path in files:
            continue
        kind = (before or after or ("", ""))[0]
        if kind == "test":
            if before is not None:
                tests.append(path)
        elif kind == "helper":
            module, digest = module_of(path), (after or before or ("", ""))[1]
            if module in judging and (module, digest) not in moved:
                helpers.append(path)
        elif before is None or kind != "module":
            configuration.append(path)
    return Changes(tuple(tests), tuple(configuration), tuple(helpers))


def log_of(output: str, exit_code: int | None, timed_out_s: float | None) -> str:
    """Return the log of a run in the benchmark's format.

    Args:
        output: Output of the test command.
        exit_code: Exit status of the test command; None where it was killed at its time limit.
        timed_out_s: Time limit of the test command, in seconds, if it was reached; else None.
    """
    log = compose_log(output, exit_code)
    if timed_out_s is not None:
        log += f"{_TIMED_OUT}\nTimeout error: {timed_out_s:g} seconds exceeded.\n"
    return log


def judged(
    instance: Instance, output: str, exit_code: int | None, timed_out_s: float | None, rules: int, runner: str
) -> tuple[Resolution, tuple[str, ...]]:
    """Return the verdict of the benchmark's rules on a run, and the benchmark's own markers that it printed.

    Of the statuses only those of the instance's tests are kept.

    Args:
        instance: The instance.
        output: Text that the test command printed.
        exit_code: Exit status of the test command; None where it was killed at its time limit.
        timed_out_s: Time limit of the test command, seconds; None if it ended before.
        rules: 5 or 4.
        runner: Name of the test runner, from the recipe.
    """
    found = judge(instance, log_of(output, exit_code, timed_out_s), rules=rules, runner=runner)
    listed = {*instance.fail_to_pass, *instance.pass_to_pass}
    statuses = {test: status for test, status in found.statuses.items() if test in listed}
    return replace(found, statuses=statuses), forged_markers(output)
