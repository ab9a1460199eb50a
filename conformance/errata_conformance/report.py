"""Results as text, JSON and JUnit XML."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from .results import WRONG, Outcome, Result, grouped
from .statements import Statement, statements


def broken(results: Sequence[Result], strict: bool = False) -> list[Result]:
    """Return the broken statements in the order of the checks.

    Args:
        results: Results in the order of the checks.
        strict: Include each SHOULD that is not followed.
    """
    return [root for root, _ in grouped(results) if strict or root.outcome is Outcome.FAILED]


def level(statement: str) -> str:
    """Return MUST or SHOULD, the level of a statement."""
    known: Statement | None = statements().get(statement)
    return known.level if known is not None else "MUST"


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of checks by outcome."""
    found = Counter(result.outcome.value for result in results)
    return {outcome.value: found[outcome.value] for outcome in Outcome}


def as_text(results: Sequence[Result], verbose: bool = False) -> str:
    """Return a report for people: what is broken, what is not followed, then findings, then what was not tested."""
    lines: list[str] = []
    for root, consequences in sorted(grouped(results), key=lambda one: one[0].outcome is Outcome.NOT_FOLLOWED):
        said = "BROKEN" if root.outcome is Outcome.FAILED else "not followed:"
        strength = level(root.statement) if root.outcome is Outcome.FAILED else "SHOULD"
        lines.append(f"{said} {root.statement} ({strength}): {root.check}")
        lines.append(f"    {root.detail}")
        if root.statement in statements():
            lines.append(f"    text: {_cut(statements()[root.statement].text)}")
        for one in consequences:
            lines.append(
                f"  - consequence: {one.statement}: {one.check}" + (f"\n      {one.detail}" if verbose else "")
            )
    for outcome in (
        Outcome.FINDING,
        Outcome.NOT_SUPPORTED,
        Outcome.NOT_APPLICABLE,
        Outcome.NOT_TESTED,
        *((Outcome.PASSED,) if verbose else ()),
    ):
        same = [one for one in results if one.outcome is outcome]
        if outcome is not Outcome.FINDING and not verbose:
            reasons: dict[str, list[str]] = {}
            for one in same:
                reasons.setdefault(one.detail, []).append(one.statement)
            lines += [f"{outcome.value}: {', '.join(dict.fromkeys(ids))}: {why}" for why, ids in reasons.items()]
            continue
        lines += [
            f"{outcome.value}: {one.statement}: {one.check}" + (f": {one.detail}" if one.detail else "") for one in same
        ]
    lines.append(
        ", ".join(f"{number} {name}" for name, number in counts(results).items() if number) or "no check was run"
    )
    return "\n".join(lines)


def as_json(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Return a report as JSON.

    Args:
        results: Results in the order of the checks.
        about: Further members of the report, such as the URL.
    """
    wrong: dict[Outcome, list[dict[str, Any]]] = {outcome: [] for outcome in WRONG}
    for root, consequences in grouped(results):
        wrong[root.outcome].append(
            {
                "statement": root.statement,
                "level": level(root.statement),
                "check": root.check,
                "detail": root.detail,
                "consequences": [f"{one.statement}: {one.check}" for one in consequences],
            }
        )
    report = {
        **about,
        "counts": counts(results),
        "broken": wrong[Outcome.FAILED],
        "not_followed": wrong[Outcome.NOT_FOLLOWED],
        "results": [asdict(one) for one in results],
    }
    return json.dumps(report, indent=1)


def as_junit(results: Sequence[Result], name: str) -> str:
    """Return the results as JUnit XML, for CI systems.

    There is one ``testsuite``, called ``name``, with a ``testcase`` for each result. Checks that failed or were blocked
    are failures; all others but those that passed are skipped.
    """
    number = counts(results)
    failures = number["failed"] + number["blocked"]
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(len(results)),
        failures=str(failures),
        skipped=str(len(results) - failures - number["passed"]),
    )
    for one in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=one.statement, name=one.check, time=f"{one.seconds:.3f}"
        )
        if one.outcome in (Outcome.FAILED, Outcome.BLOCKED):
            kind = one.outcome.value if one.blocked_by is None else f"blocked by {one.blocked_by}"
            ElementTree.SubElement(case, "failure", message=_xml(one.detail[:300]), type=kind).text = _xml(one.detail)
        elif one.outcome is not Outcome.PASSED:
            ElementTree.SubElement(case, "skipped", message=_xml(f"{one.outcome.value}: {one.detail}"))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _cut(text: str) -> str:
    return text if len(text) <= 220 else text[:217] + "…"


def _xml(text: str) -> str:
    """Return a text without the characters that XML 1.0 does not allow."""
    return "".join(
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "\ufffd"
        for c in text
    )
