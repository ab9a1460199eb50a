"""What plays showed: the recovery class an environment can have, what differs, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from errata_protocol.differences import Cause, Difference, differences, normalised
from errata_protocol.environment import Recovery
from errata_protocol.json_path import Path, every_item, without, written

MAX_EXCEPTED_CHARS = 100
"""A longer text that holds a time is not excepted: too much else would not be compared."""

_EXCEPTABLE = (Cause.TIME, Cause.IDENTIFIER, Cause.ADDRESS)


class Outcome(StrEnum):
    """How a probe ended."""

    VERIFIED = "verified"
    """Sessions came back after ``kill -9`` and were forked, served as advised."""
    IMPOSSIBLE = "impossible"
    """The environment answers otherwise when its requests are run again."""
    UNCLEAR = "unclear"
    """The actions did too little to tell."""


@dataclass(frozen=True, slots=True)
class Found:
    """A field that differed, at its first difference.

    Args:
        request: Number of the request, 0 for the first reset.
        path: Where in the answer, as ``--volatile`` takes it.
        how: Both values, around the first character that differs.
        cause: Likely cause; ``hash order`` where the same hash seed gave the same value; None where none is known.
        excepted: It is among the volatile fields of the advice.
    """

    request: int
    path: str
    how: str
    cause: str | None
    excepted: bool


@dataclass(slots=True)
class Verdict:
    """Answer of a probe.

    Args:
        target: What was probed.
        environment: Its name.
        served: The recovery class it has as it is.
        recovery: The class it can have.
        outcome: Whether that was verified.
        options: What ``errata serve TARGET`` needs for it.
        requests: How many requests a play made.
        answers: How many of these had different answers, and how many were errors.
        differs: What differed between two plays.
        state_differs: What only ``state()`` showed, which recovery does not compare.
        why: What stands against a better class, in one line each.
        snapshot_lines: ``snapshot()`` and ``restore()`` for this class, where flags do not help.
    """

    target: str
    environment: str
    served: Recovery
    recovery: Recovery = Recovery.NONE
    outcome: Outcome = Outcome.UNCLEAR
    options: tuple[str, ...] = ()
    requests: int = 0
    answers: tuple[int, int] = (0, 0)
    differs: list[Found] = field(default_factory=list)
    state_differs: list[Found] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    snapshot_lines: list[str] = field(default_factory=list)


Answers = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Compared:
    """Fields that differ between plays, by path with every index as ``[*]``."""

    volatile: dict[Path, Found]
    hash_order: dict[Path, Found]
    real: dict[Path, Found]


def compared(first: Answers, second: Answers, same_seed: Answers) -> Compared:
    """Sort the differences between plays by what they need.

    Args:
        first: One play.
        second: Another one, under another hash seed.
        same_seed: Another one, under the first's hash seed.

    Returns:
        What may be excepted; what the hash seed alone decides; and what differs for real.
    """
    again = _first_of(first, same_seed)
    other = {path: found for path, found in _first_of(first, second).items() if path not in again}
    volatile, hash_order, real = {}, {}, {}
    other_game = min((number for number, found in again.values() if not _exceptable(found)), default=len(first))
    for path, (number, difference) in {**again, **other}.items():
        if _exceptable(difference):
            volatile[path] = _found(number, difference, str(difference.cause), excepted=True)
        elif path in other and number <= other_game:  # later on it is another game, whatever the hash seed
            hash_order[path] = _found(number, difference, "hash order", excepted=False)
        else:
            cause = difference.cause
            real[path] = _found(number, difference, str(cause) if cause is not None else None, excepted=False)
    return Compared(volatile, hash_order, real)


def _found(number: int, difference: Difference, cause: str | None, *, excepted: bool) -> Found:
    return Found(number, written(every_item(difference.path)), difference.how, cause, excepted)


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
    """Leave out the turn of error sites, which the server counts: a fork's begin at 0."""
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


def left(one: Answers, other: Answers, but: Sequence[Path]) -> list[Found]:
    """Return what differs between two lists of answers outside the paths ``but``."""

    def cut(answer: dict[str, Any]) -> Any:
        value: Any = answer
        for path in but:
            value = without(value, path)
            if path[:1] == ("metadata",):
                value = without(value, ("observation", *path))
        return value

    found = _first_of([cut(a) for a in one], [cut(b) for b in other])
    return [
        _found(number, difference, str(difference.cause) if difference.cause else None, excepted=False)
        for number, difference in found.values()
    ]
