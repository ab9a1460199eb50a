"""Rules for failing tests."""

from __future__ import annotations

import re
from collections.abc import Sequence

from errata_protocol.detect.benign import is_pytest
from errata_protocol.detect.place import INLINE_FILES, is_own, last_own_frame, relative_file, site
from errata_protocol.detect.python_traceback import Frame
from errata_protocol.detect.rules.build import blames_file
from errata_protocol.detect.rules.commands import lacks_command
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.runner import Runner
from errata_protocol.detect.stacks import find_crash
from errata_protocol.detect.test_report import FailedTest, is_failure_summary
from errata_protocol.detect.test_runners import RUNNERS
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite

MAX_SITES = 20


def runs_pytest(turn: Turn) -> bool:
    """Return whether the action calls pytest."""
    return any(is_pytest(c) for c in turn.action.invocations)


def hides_failure(turn: Turn) -> bool:
    """Return whether the action calls pytest and its standard output ends with a pytest summary of failures.

    If the exit status is 0, which is not checked here, the action hid it, e.g. with ``| tail`` or ``|| true``.
    """
    last = next((line for line in reversed(turn.stdout) if line.strip()), "")
    return is_failure_summary(last.strip()) and runs_pytest(turn)


def _python_tests(turn: Turn) -> Finding | None:
    report = turn.report
    if report is None:
        return None
    return Finding(tuple(_site(turn, t) for t in report.failed[:MAX_SITES]))


def _site(turn: Turn, test: FailedTest) -> ErrorSite:
    if test.test_id is not None and "_FailedTest." in test.test_id:
        return _unknown_test(turn, test, test.test_id.rsplit(".", 1)[-1])
    frame = last_own_frame(turn, [f for f in test.frames if f.file not in INLINE_FILES])
    if frame is None:
        return site(test.line, "message", test_id=test.test_id)
    return site(test.line, "traceback", file=relative_file(turn, frame.file), number=frame.line, test_id=test.test_id)


def _unknown_test(turn: Turn, test: FailedTest, name: str) -> ErrorSite:
    """Return the site of a test name that unittest could not load: the argument that ends with it."""
    for call in reversed(turn.action.invocations):
        for word in call.words[1:]:
            if word.value == name or word.value.endswith(f".{name}"):
                return site(test.line, "message", test_id=word.value, span=word.inner)
    return site(test.line, "message")


_COUNTED = re.compile(
    r"\b[1-9]\d* (?:(?:out )?of \d+ )?(?:\w+ ){0,2}(?:fail(?:ed|ures?|ing|s)?)\b|"
    r"\bfail(?:ed|ures?|s)?(?: tests?)?[:=]? *[1-9]\d*\b",
    re.IGNORECASE,
)
"""How the runners that are not in the table count failures: ``1 of 3 tests failed``, ``Failures: 1``."""


_ANY_FAILED = re.compile("|".join(re.sub(r"\?P<\w+>", "?:", r.failed.pattern) for r in RUNNERS))


def _other_tests(turn: Turn) -> Finding | None:
    if not turn.mentions("fail", "not ok", "errors: "):
        return None
    lines = turn.reported
    summaries = [line for line in lines if _ANY_FAILED.match(line)]
    failed = [r for r in RUNNERS if any(r.failed.match(line) for line in summaries)]
    if not failed:
        return _unknown_runner(turn)
    if all(_not_run(r, lines) for r in failed) and blames_file(turn):
        return None  # the rule for builds has the file and the line
    # The summaries of some runners are alike, and make or npm may run several: the first that names a test counts.
    return Finding(_runner_sites(turn, next((r for r in failed if r.first_failing(lines)), failed[0])))


def _unknown_runner(turn: Turn) -> Finding | None:
    """Return the finding for a count of failures in a run of tests whose runner is not in the table.

    Otherwise a word of its report decided, such as the ``No such file`` of a failing test.
    """
    if not turn.action.runs_tests:
        return None
    counted = next((line for line in turn.reported if _COUNTED.search(line)), None)
    if counted is None or blames_file(turn) or lacks_command(turn):
        return None
    return Finding((site(counted),))


def _not_run(runner: Runner, lines: Sequence[str]) -> bool:
    """Return whether every failure that a runner reports is that tests could not be built."""
    not_run = runner.not_run
    return not_run is not None and all(not_run.match(line) for line in lines if runner.failed.match(line))


def _runner_sites(turn: Turn, runner: Runner) -> tuple[ErrorSite, ...]:
    """Return the site of the first failing test: the first line of the workspace that its part of the report names."""
    lines = turn.reported
    found = runner.first_failing(lines)
    if found is None:
        return (_unnamed(turn, next(line for line in lines if runner.failed.match(line))),)
    first, match = found
    named = match.groupdict()
    part = runner.part(lines, first, match)
    frame = _first_frame(turn, runner, part)
    file = frame.file if frame else named.get("file") or _whole_file(turn, runner, part)
    return (
        site(
            lines[first],
            file=relative_file(turn, file) if file else None,
            number=frame.line if frame else None,
            test_id=named.get("id"),
        ),
    )


def _unnamed(turn: Turn, line: str) -> ErrorSite:
    """Return the site of a run that ended before the runner named a test: where a program crashed, if one did."""
    crash = find_crash(turn.reported, turn.may_crash_in)
    frame = last_own_frame(turn, crash.frames) if crash else None
    if crash is None or frame is None:
        return site(line)
    return site(crash.line, "traceback", file=relative_file(turn, frame.file), number=frame.line)


def _first_frame(turn: Turn, runner: Runner, part: Sequence[str]) -> Frame | None:
    if runner.frame is None:
        return None
    for line in part:
        match = runner.frame.search(line)
        if match and (frame := last_own_frame(turn, [Frame(match.group("file"), int(match.group("line")))])):
            return frame
    return None


def _whole_file(turn: Turn, runner: Runner, part: Sequence[str]) -> str | None:
    """Return the first file of the agent that a part names without a line; None without one."""
    pattern = runner.whole_file
    files = (m["file"] for line in part if (m := pattern.match(line))) if pattern else ()
    return next((file for file in files if is_own(turn, file)), None)


RULES = (
    Rule(
        "tests.python",
        ErrorKind.TEST_FAILURE,
        "A report of pytest, unittest or SymPy's runner with failures or errors; with exit 0 too, when the action runs "
        "pytest and the last line of the output is its summary with failures.",
        "The first failing test's id, and the last frame of its traceback inside the workspace.",
        _python_tests,
    ),
    Rule(
        "tests.other",
        ErrorKind.TEST_FAILURE,
        "The failure summary of another runner: "
        + ", ".join(r.name for r in RUNNERS)
        + "; of one that is not known, a count of failures where the action runs tests.",
        "The first failing test's id, and the first line of the workspace that its own part of the report names.",
        _other_tests,
    ),
)
