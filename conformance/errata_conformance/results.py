"""The outcome of a check, and the exceptions by which a check reports it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    """A MUST does not hold."""
    NOT_FOLLOWED = "not followed"
    """A SHOULD does not hold, which a server may have reasons for."""
    BLOCKED = "blocked"
    """The check could not reach its own statement because another one is broken."""
    FINDING = "finding"
    """A known defect of the released OpenEnv server, in a profile of that server."""
    NOT_SUPPORTED = "not supported"
    """The server does not offer the extension. This is no pass."""
    NOT_APPLICABLE = "not applicable"
    """The statement is about servers or environments of another kind, such as those with MCP tools."""
    NOT_TESTED = "not tested"
    """The check needs something that was not given, such as an action that fails, or a less busy machine."""


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Args:
        statement: The statement that was checked, such as ``R-016-7``, or ``base.NAME`` of a profile.
        check: Name of the check; unique within its statement.
        outcome: How it ended.
        detail: What was expected and what came, or why the check did not run; empty for a pass.
        blocked_by: For `Outcome.BLOCKED`, the statement that is broken.
        seconds: Duration of the check.
    """

    statement: str
    check: str
    outcome: Outcome
    detail: str = ""
    blocked_by: str | None = None
    seconds: float = 0.0


class Broken(Exception):
    """The statement that is being checked is broken; the text says what was expected and what came."""


class NotFollowed(Exception):
    """A SHOULD does not hold, in a statement that is a MUST otherwise; the text says what came."""


class Blocked(Exception):
    """A statement other than the checked one is broken, so that the check could not be made.

    Args:
        statement: The broken statement.
        detail: What was expected and what came.
    """

    def __init__(self, statement: str, detail: str) -> None:
        super().__init__(detail)
        self.statement = statement


class NotTested(Exception):
    """The check could not be made; the text says what it needs."""


class NoPlace(NotTested):
    """The server has no place for another session."""


class NotApplicable(Exception):
    """The statement is about servers or environments of another kind; the text says of which."""


class NotSupported(Exception):
    """The server does not offer the extension that the check is about."""


class KnownDefect(Exception):
    """A defect that the released server is known to have.

    Args:
        detail: What came.
        issue: URL of the report.
    """

    def __init__(self, detail: str, issue: str) -> None:
        super().__init__(f"{detail} ({issue})")


def ensure(condition: object, detail: str) -> None:
    """Raise `Broken` unless the condition holds.

    Raises:
        Broken: It does not hold.
    """
    if not condition:
        raise Broken(detail)


WRONG = (Outcome.FAILED, Outcome.NOT_FOLLOWED)
"""The outcomes of a check whose statement does not hold."""


def grouped(results: Iterable[Result]) -> list[tuple[Result, list[Result]]]:
    """Return the statements that do not hold in the order of the checks, each with the checks that it blocked.

    A statement may be broken without a failed check of its own, where it only blocked others. Its result then names the
    check that found it.
    """
    results = list(results)
    roots: dict[str, Result] = {}
    for result in results:
        if result.outcome in WRONG:
            roots.setdefault(result.statement, result)
    for result in results:
        if result.outcome is Outcome.BLOCKED and result.blocked_by is not None and result.blocked_by not in roots:
            roots[result.blocked_by] = Result(
                result.blocked_by, f"found by {result.statement}: {result.check}", Outcome.FAILED, result.detail
            )
    consequences: dict[str, list[Result]] = {statement: [] for statement in roots}
    for result in results:
        if result.outcome in WRONG and result is not roots[result.statement]:
            consequences[result.statement].append(result)
        elif result.outcome is Outcome.BLOCKED and result.blocked_by is not None:
            consequences[result.blocked_by].append(result)
    return [(root, consequences[statement]) for statement, root in roots.items()]
