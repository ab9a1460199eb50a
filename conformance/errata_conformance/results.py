"""What a check finds, and how it says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    BLOCKED = "blocked"
    """The check could not reach its own statement because another one is broken."""
    FINDING = "finding"
    """A known defect of the released OpenEnv server, in a profile of that server."""
    NOT_SUPPORTED = "not supported"
    """The server does not offer the extension. This is no pass."""
    NOT_TESTED = "not tested"
    """The check needs something that was not given, such as an action that fails."""


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Args:
        statement: What was checked, as ``R-016-7``, or ``base.NAME`` of a profile.
        check: Name of the check; unique with its statement.
        outcome: How it ended.
        detail: What was expected and what came, or why the check did not run. Empty for a pass.
        blocked_by: The statement that is broken, for `Outcome.BLOCKED`.
        seconds: How long the check took.
    """

    statement: str
    check: str
    outcome: Outcome
    detail: str = ""
    blocked_by: str | None = None
    seconds: float = 0.0


class Broken(Exception):
    """The statement that is being checked does not hold. The text says what was expected and what came."""


class Blocked(Exception):
    """Another statement than the checked one does not hold.

    Args:
        statement: Which.
        detail: What was expected and what came.
    """

    def __init__(self, statement: str, detail: str) -> None:
        super().__init__(detail)
        self.statement = statement


class NotTested(Exception):
    """The check needs something that is not there; the text names it."""


class NotSupported(Exception):
    """The server does not offer what the check is about."""


class KnownDefect(Exception):
    """A defect that the released server is known to have.

    Args:
        detail: What came.
        issue: Where it is reported.
    """

    def __init__(self, detail: str, issue: str) -> None:
        super().__init__(f"{detail} ({issue})")


def ensure(condition: object, detail: str) -> None:
    """Go on if the condition holds.

    Raises:
        Broken: It does not hold.
    """
    if not condition:
        raise Broken(detail)


def grouped(results: Iterable[Result]) -> list[tuple[Result, list[Result]]]:
    """Return the broken statements in the order of the checks, each with the checks that it blocked.

    A statement that only blocked others, and has no failed check of its own, is broken too. Its result then names the
    check that found it.
    """
    results = list(results)
    roots: dict[str, Result] = {}
    for result in results:
        if result.outcome is Outcome.FAILED:
            roots.setdefault(result.statement, result)
    for result in results:
        if result.outcome is Outcome.BLOCKED and result.blocked_by is not None and result.blocked_by not in roots:
            roots[result.blocked_by] = Result(
                result.blocked_by, f"found by {result.statement}: {result.check}", Outcome.FAILED, result.detail
            )
    consequences: dict[str, list[Result]] = {statement: [] for statement in roots}
    for result in results:
        if result.outcome is Outcome.FAILED and result is not roots[result.statement]:
            consequences[result.statement].append(result)
        elif result.outcome is Outcome.BLOCKED and result.blocked_by is not None:
            consequences[result.blocked_by].append(result)
    return [(root, consequences[statement]) for statement, root in roots.items()]
