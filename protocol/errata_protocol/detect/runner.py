"""What the detectors know of one test runner: the lines that report failures, and a test's part of the report."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_LINES = 400
"""How many lines of a test's part are read."""

Part = Callable[[Sequence[str], int, re.Match[str]], Sequence[str]]
"""Returns the lines that belong to a failing test, from all lines, the index of the test's line and its match."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A test runner.

    Args:
        name: Name of the test runner in the documentation.
        failed: Matches a line that reports failures in a run.
        tests: Match a line that stands for a failing test, with the group ``id`` if it names the test, and ``file`` if
            a whole file failed. The first pattern that matches any line decides. Empty if the runner prints no names.
        frame: Matches a line with ``file`` and ``line`` of the failure.
        part: Finds the lines in which ``frame`` and ``whole_file`` are looked for.
        heading: Matches the line before the test's line; None if any line may stand there.
        whole_file: Matches a line with ``file`` alone, for a failure without a frame of the workspace.
        not_run: Matches a line of ``failed`` that stands for tests that could not be built.
    """

    name: str
    failed: re.Pattern[str]
    tests: tuple[re.Pattern[str], ...] = ()
    frame: re.Pattern[str] | None = None
    part: Part = lambda lines, first, test: lines[first + 1 : first + 1 + MAX_LINES]
    heading: re.Pattern[str] | None = None
    whole_file: re.Pattern[str] | None = None
    not_run: re.Pattern[str] | None = None

    def first_failing(self, lines: Sequence[str]) -> tuple[int, re.Match[str]] | None:
        """Return the index and the match of the line that stands for the first failing test, None without one."""
        for pattern in self.tests:
            for index, line in enumerate(lines):
                headed = self.heading is None or (index > 0 and self.heading.match(lines[index - 1]))
                if headed and (match := pattern.match(line)):
                    return index, match
        return None


def until(lines: Sequence[str], start: int, end: re.Pattern[str]) -> Sequence[str]:
    """Return the lines from ``start`` on, before the next one that matches ``end``."""
    stop = min(len(lines), start + MAX_LINES)
    return lines[start : next((i for i in range(start, stop) if end.match(lines[i])), stop)]


def below(end: str) -> Part:
    """Return the part from the test's line, with it, to the next line that matches ``end``."""
    pattern = re.compile(end)
    return lambda lines, first, test: (lines[first], *until(lines, first + 1, pattern))


def above(start: str) -> Part:
    """Return the part above the test's line, after the last line that matches ``start``."""
    pattern = re.compile(start)

    def part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
        del test
        begin = max(0, first - MAX_LINES)
        return lines[next((i + 1 for i in range(first - 1, begin - 1, -1) if pattern.match(lines[i])), begin) : first]

    return part
