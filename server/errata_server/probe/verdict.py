"""The result of a probe: the recovery class an environment can have, what differed between plays, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from errata_protocol.differences import Cause, Difference, differences, normalised
from errata_protocol.environment import Recovery
from errata_protocol.json_path import Path, every_item, without, written

MAX_EXCEPTED_CHARS = 100
"""Longest text with a time or id in it that may be excepted: the rest of the text is not compared either."""

_EXCEPTABLE = (Cause.TIME, Cause.IDENTIFIER, Cause.ADDRESS)


class Outcome(StrEnum):
    """How a probe ended."""

    VERIFIED = "verified"
    """With the advised options, a session and a fork of it continued after ``kill -9``."""
    IMPOSSIBLE = "impossible"
    """Answers differ when the requests run again."""
    UNCLEAR = "unclear"
    """The answers were too few to judge by."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field that differed between two plays, at its first difference.

    Args:
        request: Index of the request, from 0.
        path: Path of the field in the answer, as ``--volatile`` takes it.
        how: Both values, around the first character that differs.
        cause: Likely cause; ``hash order`` if the same hash seed gave the same value; None if unknown.
        excepted: Whether the advice has it among the volatile fields.
    """

    request: int
    path: str
    how: str
    cause: str | None
    excepted: bool


@dataclass(slots=True)
class Verdict:
    """Result of a probe.

    Args:
        target: The target that was probed.
        environment: Its name.
        served: Recovery class without further options.
        recovery: Recovery class that it can have.
        outcome: Whether that was verified.
        options: Options that ``errata serve TARGET`` needs for it.
        requests: Number of requests in a play.
        answers: Number of different answers, and number of errors.
        differs: Fields that differed between plays.
        state_differs: Fields of ``state()`` that differed; recovery does not compare them.
        why: Reasons against a better class, one line each.
        snapshot_lines: Code of ``snapshot()`` and ``restore()`` for the class, if no option helps.
        limit: What a low limit of sessions means for forks; None if there is none.
    """

    target: str
    environment: str
    served: Recovery
    recovery: Recovery = Recovery.NONE
    outcome: Outcome = Outcome.UNCLEAR
    options: tuple[str, ...] = ()
    requests: int = 0
    answers: tuple[int, int] = (0, 0)
    differs: list[FieldDifference] = field(default_factory=list)
    state_differs: list[FieldDifference] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    snapshot_lines: list[str] = field(default_factory=list)
    limit: str | None = None


Answers = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Compared:
    """Fields that differ between plays, by path with every index as ``[*]``.

    Args:
        volatile: Fields that may be excepted: times, identifiers and addresses.
        hash_order: Fields that the hash seed alone decides.
        real: All others.
    """

    volatile: dict[Path, FieldDifference]
    hash_order: dict[Path, FieldDifference]
    real: dict[Path, FieldDifference]


def compared(first: Answers, second: Answers, same_seed: Answers) -> Compared:
    """Sort the differences between plays by their cause.

    Args:
        first: Answers of one play.
        second: Answers of a play with another hash seed.
        same_seed: Answers of another play with the first one's hash seed.
    """
    again = _first_of(first, same_seed)
    other = {path: found for path, found in _first_of(first, second).items() if path not in again}
    volatile, hash_order, real = {}, {}, {}
    diverged = min((number for number, found in again.values() if not _exceptable(found)), default=len(first))
    for path, (number, difference) in {**again, **other}.items():
        if _exceptable(difference):
            volatile[path] = _field_difference(number, difference, str(difference.cause), excepted=True)
        elif path in other and number <= diverged:  # after a real difference, any other may follow from it
            hash_order[path] = _field_difference(number, difference, "hash order", excepted=False)
        else:
            cause = difference.cause
            real[path] = _field_difference(
                number, difference, str(cause) if cause is not None else None, excepted=False
            )
    return Compared(volatile, hash_order, real)


def _field_difference(number: int, difference: Difference, cause: str | None, *, excepted: bool) -> FieldDifference:
    return FieldDifference(number, written(every_item(difference.path)), difference.how, cause, excepted)


def _exceptable(difference: Difference) -> bool:
    if difference.cause not in _EXCEPTABLE or difference.path[:1] in (("done",), ("error",), ("reward",)):
        return False
    return not isinstance(difference.was, str) or max(len(difference.was), len(difference.now)) <= MAX_EXCEPTED_CHARS


def _first_of(one: Answers, other: Answers) -> dict[Path, tuple[int, Difference]]:
    found: dict[Path, tuple[int, Difference]] = {}
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        for difference in differences(_comparable(a), _comparable(b)):
            found.setdefault(every_item(difference.path), (number, difference))
    return found


def _comparable(answer: Any) -> Any:
    return normalised(_without_turns(answer))


def _without_turns(value: Any) -> Any:
    """Return the value without ``t`` in error sites, which the server counts from 0 in a fork."""
    if isinstance(value, list):
        return [_without_turns(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without(inner, "t") if key in ("error_site", "error_sites") else _without_turns(inner)
        for key, inner in value.items()
    }


def _without(sites: Any, key: str) -> Any:
    if isinstance(sites, list):
        return [_without(site, key) for site in sites]
    return {k: v for k, v in sites.items() if k != key} if isinstance(sites, dict) else sites


def remaining_differences(one: Answers, other: Answers, but: Sequence[Path]) -> list[FieldDifference]:
    """Return the differences between two lists of answers, each path once, except below the paths ``but``.

    A path that begins with ``metadata`` also applies to the metadata of the observation.
    """

    def cut(answer: dict[str, Any]) -> Any:
        value: Any = answer
        for path in but:
            value = without(value, path)
            if path[:1] == ("metadata",):
                value = without(value, ("observation", *path))
        return value

    found = _first_of([cut(a) for a in one], [cut(b) for b in other])
    return [
        _field_difference(number, difference, str(difference.cause) if difference.cause else None, excepted=False)
        for number, difference in found.values()
    ]
