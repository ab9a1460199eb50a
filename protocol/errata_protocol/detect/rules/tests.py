"""Rules for failing tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from errata_protocol.detect.benign import is_pytest
from errata_protocol.detect.place import INLINE_FILES, last_own_frame, relative_file, site
from errata_protocol.detect.python_traceback import Frame
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.test_report import FailedTest, is_failure_summary
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


@dataclass(frozen=True, slots=True)
class Runner:
    """A test runner other than pytest and unittest.

    Args:
        name: Its name, for the documentation.
        failed: Matches a line that reports failures in a run.
        test: Matches a line that names a failing test, with the group ``id``; None if the runner prints no names.
        frame: Matches a line with ``file`` and ``line`` of the failure, after the test's line.
    """

    name: str
    failed: re.Pattern[str]
    test: re.Pattern[str] | None = None
    frame: re.Pattern[str] | None = None


_NODE_FRAME = re.compile(r"^\s+at (?:.*\()?(?:file://)?(?P<file>/[^():\s]+):(?P<line>\d+):\d+\)?$")
RUNNERS = (
    Runner(
        "go test",
        re.compile(r"^(?:--- FAIL: |FAIL\t)"),
        re.compile(r"^\s*--- FAIL: (?P<id>\S+)"),
        re.compile(r"^\s+(?P<file>[\w./-]+\.go):(?P<line>\d+): "),
    ),
    Runner(
        "cargo test",
        re.compile(r"^test result: FAILED\."),
        re.compile(r"^test (?P<id>\S+)(?: - .*)? \.\.\. FAILED"),
        re.compile(r"panicked at (?:'.*', )?(?P<file>[^\s:]+\.rs):(?P<line>\d+)"),
    ),
    Runner(
        "jest",
        re.compile(r"^Tests?(?: Files| Suites)?:? +\d+ failed"),
        re.compile(r"^\s*(?:●|×|FAIL) (?P<id>.*\S)"),
        re.compile(r"^\s+(?:at .*\(|❯ )(?P<file>[^():\s]+):(?P<line>\d+):\d+\)?$"),
    ),
    Runner("mocha", re.compile(r"^\s+\d+ failing$"), re.compile(r"^\s+\d+\) (?P<id>.*\S)"), _NODE_FRAME),
    Runner(
        "node --test",
        re.compile(r"^(?:# |ℹ )fail [1-9]"),
        re.compile(r"^\s*(?:not ok \d+ - |✖ )(?P<id>.*?)(?: \([\d.]+ms\))?$"),
        re.compile(r"(?:^\s+at (?:.*\()?(?:file://)?|location: ')(?P<file>/[^():\s]+):(?P<line>\d+):\d+"),
    ),
    Runner(
        "TAP",
        re.compile(r"^not ok \d+"),
        re.compile(r"^not ok \d+ -? ?(?P<id>.*\S)"),
        re.compile(r"^# +(?:at|in test file|\(in test file) (?P<file>\S+?),? line (?P<line>\d+)"),
    ),
    Runner(
        "rspec",
        re.compile(r"^\d+ examples?, [1-9]\d* failures?"),
        re.compile(r"^rspec (?P<id>\S+:\d+)"),
        re.compile(r"^\s+# (?P<file>\./\S+?):(?P<line>\d+):in"),
    ),
    Runner(
        "minitest",
        re.compile(r"^\d+ (?:runs|tests), \d+ assertions, (?:[1-9]\d* failures|\d+ failures, [1-9]\d* errors)"),
        re.compile(r"^(?:Failure:|Error:)?\s*(?P<id>\w+#\w+|test_\w+\(\w+\))"),
        re.compile(r"\[?(?P<file>[\w./-]+\.rb):(?P<line>\d+)\]?"),
    ),
    Runner("ctest", re.compile(r"^\d+% tests passed, [1-9]\d* tests? failed"), re.compile(r"^\s+\d+ - (?P<id>\S+) \(")),
    Runner("prove", re.compile(r"^Result: FAIL$"), re.compile(r"^(?P<id>\S+\.t) \.+")),
    Runner(
        "doctest", re.compile(r"^\*\*\*Test Failed\*\*\* "), re.compile(r'^File "[^"]+", line \d+, in (?P<id>\S+)$')
    ),
    Runner(
        "junit",
        re.compile(r"^(?:\[ERROR\] )?Tests run: \d+, +Failures: (?:[1-9]|\d+, +Errors: [1-9])"),
        re.compile(r"^(?:\[ERROR\] )?\s*(?:\d+\) )?(?P<id>[\w.]+[.(]\w+\)?)(?:[: ].*(?:<<<|FAIL|expected)|$)"),
    ),
    Runner(
        "phpunit",
        re.compile(r"^Tests: \d+, Assertions: \d+, (?:Failures|Errors): [1-9]"),
        re.compile(r"^\d+\) (?P<id>\S+::\S+)"),
        re.compile(r"^(?P<file>/\S+\.php):(?P<line>\d+)$"),
    ),
    Runner(
        "googletest",
        re.compile(r"^\[  FAILED  \] \d+ tests?"),
        re.compile(r"^\[  FAILED  \] (?P<id>\S+\.\S+?)(?: \(\d+ ms\))?$"),
    ),
)
_DOCTEST_PLACE = re.compile(r'^File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


def _other_tests(turn: Turn) -> Finding | None:
    if not turn.mentions("fail", "not ok"):
        return None
    for runner in RUNNERS:
        lines = turn.reported
        if any(runner.failed.match(line) for line in lines):
            return Finding(_runner_sites(turn, runner))
    return None


def _runner_sites(turn: Turn, runner: Runner) -> tuple[ErrorSite, ...]:
    """Return the site of the first failing test: the first line of the workspace that its report names."""
    lines = turn.reported
    first = next((i for i, line in enumerate(lines) if runner.test and runner.test.match(line)), None)
    failed = next(line for line in lines if runner.failed.match(line))
    if first is None or runner.test is None:
        return (site(failed),)
    match = runner.test.match(lines[first])
    assert match is not None
    frame = _frame_after(turn, runner, lines, first)
    if runner.name == "doctest" and (place := _DOCTEST_PLACE.match(lines[first])):
        frame = Frame(place.group("file"), int(place.group("line")))
    if frame is None:
        return (site(lines[first], test_id=match.group("id")),)
    return (site(lines[first], file=relative_file(turn, frame.file), number=frame.line, test_id=match.group("id")),)


def _frame_after(turn: Turn, runner: Runner, lines: tuple[str, ...], first: int) -> Frame | None:
    if runner.frame is None:
        return None
    search: Callable[[str], re.Match[str] | None] = runner.frame.search
    for line in lines[first + 1 : first + 400]:
        match = search(line)
        if match and (frame := last_own_frame(turn, [Frame(match.group("file"), int(match.group("line")))])):
            return frame
    return None


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
        "The failure summary of another runner: " + ", ".join(r.name for r in RUNNERS) + ".",
        "The first failing test's id, and the first line of the workspace that its report names.",
        _other_tests,
    ),
)
