"""Reports of the JVM's test runners. Their frames name a file without its directory, and most are not the project's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from errata_protocol.detect.runner import Runner, below, until

_FRAME = re.compile(
    r"^(?:\[\w+\] )?\s*at (?:[\w.-]*/)*(?P<class>[\w.$]+)\.[\w$<>]+"
    r"\((?P<file>[\w$-]+\.(?:java|kt|groovy|scala)):(?P<line>\d+)\)$"
)
_ID = re.compile(r"(?:(?P<class>[\w.$]+)[.#]\w+|\w+\((?P<in>[\w.$]+)\)|(?P<suite>[\w.$]+) > .*)")


def _own_frames(lines: Sequence[str], test: re.Match[str]) -> Sequence[str]:
    """Return the frames of the test's class and of its package's first two parts, innermost first."""
    named = _ID.match(test["id"])
    name = (named["class"] or named["in"] or named["suite"]) if named else ""
    package, _, simple = name.rpartition(".")
    root = ".".join(package.split(".")[:2]) + "." if "." in package else f"{name}."
    frames = ((line, match["class"]) for line in lines if (match := _FRAME.match(line)))
    return [line for line, of in frames if of.startswith(root) or of.split("$")[0].rpartition(".")[2] == simple]


_JUNIT_END = re.compile(r"^(?:\[ERROR\] )?(?:\S+ +(?:-- )?Time elapsed: |Tests run: |Failures:|\d+\) )")


def _junit_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    return _own_frames(until(lines, first + 1, _JUNIT_END), test)


_GRADLE_END = re.compile(r"^(?=.* (?:FAILED|PASSED|SKIPPED)$)\S.* > |^\d+ tests? completed, |^> Task |^FAILURE: ")
_GRADLE_PLACE = re.compile(r"^\s+[\w.$]+(?:: .*)? at [\w$-]+\.\w+:\d+$")


def _gradle_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the own frames of a test; Gradle's short form names the line of the test instead."""
    part = until(lines, first + 1, _GRADLE_END)
    return [*_own_frames(part, test), *(line for line in part if _GRADLE_PLACE.match(line))]


_SBT_FRAME = re.compile(
    r"^(?!(?:\[\w+\] )?\s*at (?:java|javax|jdk|sun|scala|sbt|munit|org\.scalatest|org\.junit|org\.specs2)\b)"
    r".*[(: ](?P<file>[\w$./-]+\.(?:scala|java|kt)):(?P<line>\d+)(?:\)|$| )"
)

JVM_RUNNERS = (
    Runner(
        "junit",
        re.compile(r"^(?:\[ERROR\] )?Tests run: \d+, +Failures: (?:[1-9]|\d+, +Errors: [1-9])"),
        (
            re.compile(
                r"^(?:\[ERROR\] )?\s*(?:\d+\) )?(?P<id>[\w.$]+\.\w+|\w+\([\w.$]+\))(?:\([^()]*\))?(?:\[\d+\])?"
                r"(?:[: ].*(?:<<<|FAIL|expected|»)|$)"
            ),
        ),
        _FRAME,
        _junit_part,
    ),
    Runner(
        "gradle",
        re.compile(r"^\d+ tests? completed, [1-9]\d* failed"),
        (re.compile(r"^(?=.* FAILED$)(?P<id>[^\s>].* > .*\S) FAILED$"),),
        re.compile(r"(?:\(| at )(?P<file>[\w$-]+\.(?:java|kt|groovy|scala)):(?P<line>\d+)\)?$"),
        _gradle_part,
    ),
    Runner(
        "sbt, scalatest, munit",
        re.compile(
            r"^(?:\[\w+\] )?(?:\*\*\* [1-9]\d* (?:TESTS?|SUITES?) (?:FAILED|ABORTED) \*\*\*|Failed tests:|"
            r"(?:Failed|Error): Total \d+, |==> X )"
        ),
        (
            re.compile(r"^(?:\[\w+\] )?\s*- (?P<id>\S.*) \*\*\* FAILED \*\*\*"),
            re.compile(r"^(?:\[\w+\] )?==> X (?P<id>\S.*?) +[\d.]+s(?: |$)"),
            re.compile(r"^\[error\] Test (?P<id>\S+) failed: "),
            re.compile(r"^\[error\] +[x!] (?P<id>\S.*)"),
            re.compile(r"^\[error\] \t(?P<id>[\w.$]+)$"),
        ),
        _SBT_FRAME,
        below(r"^(?:\[\w+\] )?(?:\s*- |==> [X+]|\S+:$|Run completed|Tests: |Failed: |Failed tests:|Passed: )"),
    ),
)
