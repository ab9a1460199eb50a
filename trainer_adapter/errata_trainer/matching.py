"""Which delivery answered which tool call of a transcript.

A transcript and a journal tell the same episode from two sides, and neither holds all of it: calls of unknown tools
or with other arguments never reach the environment, a tool may act more than once, the environment may act on its own
(a submit at the end), and a trainer takes results back that do not fit, after the tool ran. Turns come in the same
order on both sides. Within a turn the order is not kept: synchronous tools run before asynchronous ones.

So the alignment of turns with runs of deliveries is the one of the greatest evidence, found by dynamic programming;
the plain case, in which everything fits at once, is taken without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .deliveries import Delivery

_ARGUMENTS = 2
_TEXT = 2
_NAME = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """The calls of one assistant message that were executed.

    Attributes:
        calls: Name and arguments of each, in the student's order; arguments are None where they are no object.
        texts: Name and text of the tool results that followed, an error that a trainer wrapped bare as well; None
            where results are not known.
        most: How many of the calls can have been answered.
    """

    calls: tuple[tuple[str, Mapping[str, Any] | None], ...]
    texts: frozenset[tuple[str, str]] | None
    most: int


def match(turns: Sequence[Asked], deliveries: Sequence[Delivery]) -> list[list[int | None]]:
    """Return, for each call of each turn, the index of its delivery; None for calls that have none.

    Args:
        turns: In order.
        deliveries: In order of their making.
    """
    plain = _plain(turns, deliveries)
    return plain if plain is not None else _aligned(turns, deliveries)


def evidence(call: tuple[str, Mapping[str, Any] | None], delivery: Delivery, asked: Asked) -> int:
    """Return how much speaks for a delivery as the answer to a call; 0 forbids it."""
    name, arguments = call
    if delivery.name and name != delivery.name:
        return 0
    answered = delivery.text is not None and asked.texts is not None and (name, delivery.text) in asked.texts
    if delivery.arguments is not None:
        # Texts alone prove nothing: many commands say nothing, and all alike.
        same = arguments is not None and same_arguments(arguments, delivery.arguments)
        return _ARGUMENTS + _TEXT * answered if same else 0
    if delivery.text is not None:
        return _TEXT * answered
    return _NAME  # nothing more is known of it


def same_arguments(called: Mapping[str, Any], delivered: Mapping[str, Any]) -> bool:
    """Whether a request carries a call's arguments.

    An action's fields that are not set do not count, and ``"1"`` is 1: trainers do not check types, environments
    convert them.
    """
    called, delivered = _given(called), _given(delivered)
    return called.keys() == delivered.keys() and all(_alike(called[name], delivered[name]) for name in called)


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value not in (None, "", [], {})}


def _alike(one: Any, other: Any) -> bool:
    if one == other:
        return True
    return isinstance(one, str) != isinstance(other, str) and str(one) == str(other)


def _plain(turns: Sequence[Asked], deliveries: Sequence[Delivery]) -> list[list[int | None]] | None:
    """Return the match in which every turn is answered at once by the next deliveries, if all evidence agrees."""
    at = 0
    result: list[list[int | None]] = []
    for asked in turns:
        found: list[int | None] = [None] * len(asked.calls)
        while at < len(deliveries):
            delivery = deliveries[at]
            best = _best(asked, delivery, found)
            full = _ARGUMENTS if delivery.text is None or asked.texts is None else _ARGUMENTS + _TEXT
            if best is None or best[0] < full:
                break
            found[best[1]] = at
            at += 1
        if found.count(None):
            return None  # one was not delivered, or is somewhere else
        result.append(found)
    return result


def _aligned(turns: Sequence[Asked], deliveries: Sequence[Delivery]) -> list[list[int | None]]:
    """Return the match of the greatest evidence; among equals, the earliest."""
    count = len(deliveries)
    best = [0] * (count + 1)  # evidence of the turns so far within the first p deliveries
    choices: list[list[tuple[int, tuple[int | None, ...]]]] = []
    for asked in turns:
        nothing: tuple[int | None, ...] = (None,) * len(asked.calls)
        after = list(best)
        chosen = [(p, nothing) for p in range(count + 1)]  # p: where the turn's run of deliveries begins
        for begin in range(count):
            # A run may hold deliveries that answer no call, from a tool that acts twice, but not many.
            for end, score, found in _runs(asked, deliveries, begin, 2 * asked.most + 1):
                if best[begin] + score > after[end]:
                    after[end] = best[begin] + score
                    chosen[end] = (begin, found)
        # What is left behind a run belongs to nobody here.
        for p in range(1, count + 1):
            if after[p - 1] >= after[p]:
                after[p] = after[p - 1]
                chosen[p] = chosen[p - 1]
        best = after
        choices.append(chosen)
    result: list[list[int | None]] = []
    at = count
    for chosen in reversed(choices):
        at, found = chosen[at]
        result.append(list(found))
    return result[::-1]


def _runs(
    asked: Asked, deliveries: Sequence[Delivery], begin: int, longest: int
) -> list[tuple[int, int, tuple[int | None, ...]]]:
    """Return end, evidence and match of each run from ``begin`` on that ends with a match."""
    found: list[int | None] = [None] * len(asked.calls)
    score = matched = 0
    runs = []
    for index in range(begin, min(begin + longest, len(deliveries))):
        best = _best(asked, deliveries[index], found)
        if best is None:
            if index == begin:
                return []  # the same run without it begins one later
            continue
        found[best[1]] = index
        score += best[0]
        matched += 1
        runs.append((index + 1, score, tuple(found)))
        if matched == asked.most:
            break
    return runs


def _best(asked: Asked, delivery: Delivery, found: Sequence[int | None]) -> tuple[int, int] | None:
    """Return evidence and index of the call that a delivery answers best; the first among equals."""
    best: tuple[int, int] | None = None
    for index, call in enumerate(asked.calls):
        if found[index] is None:
            score = evidence(call, delivery, asked)
            if score and (best is None or score > best[0]):
                best = (score, index)
    return best
