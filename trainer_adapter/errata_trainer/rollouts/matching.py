"""Matches the tool calls of a transcript to the deliveries of an environment.

Neither side has everything: calls of unknown tools or with wrong arguments never reach the environment, one tool may
make several steps, the environment may act by itself (a submit at the end), and a trainer may drop results that no
longer fit. Both sides have the turns in the same order. Within a turn the order may differ: synchronous tools run
before asynchronous ones.

Turns are aligned with runs of deliveries by dynamic programming over a score for each possible match. The common case,
in which each turn is answered by the next deliveries, is recognised first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .deliveries import Delivery

_ARGUMENTS = 2
_TEXT = 2
_NAME = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """The calls of one assistant message that were executed.

    Attributes:
        calls: Name and arguments of each, in the student's order; arguments are None where they are no object.
        texts: Name and text of the tool results that followed, an error that a trainer wrapped bare as well; None if
            results are not known.
        most: Most calls that can have been answered.
        errors: Number of results that are errors made by a trainer, whose calls delivered nothing.
    """

    calls: tuple[tuple[str, Mapping[str, Any] | None], ...]
    texts: frozenset[tuple[str, str]] | None
    most: int
    errors: int = 0


class _Turn(NamedTuple):
    calls: list[tuple[str, str | None]]
    texts: frozenset[tuple[str, str]] | None
    most: int
    errors: int


class _Sent(NamedTuple):
    name: str
    key: str | None
    text: str | None
    delivered: bool


def match(turns: Sequence[Asked], deliveries: Sequence[Delivery]) -> list[list[int | None]]:
    """Return, for each call of each turn, the index of its delivery; None for calls that have none.

    Args:
        turns: Calls of each turn, in order.
        deliveries: Deliveries in the order in which they were made.
    """
    asked = [
        _Turn([(name, arguments_key(a)) for name, a in one.calls], one.texts, one.most, one.errors) for one in turns
    ]
    sent = [_Sent(one.name, arguments_key(one.arguments), one.text, one.t is not None) for one in deliveries]
    plain = _plain(asked, sent)
    return plain if plain is not None else _aligned(asked, sent)


def arguments_key(arguments: Mapping[str, Any] | None) -> str | None:
    """Return a key that is equal for a tool call's arguments and for those of the request it led to.

    An action's fields that are not set do not count, and ``"1"`` is 1: trainers do not check types, environments
    convert them.
    """
    if arguments is None:
        return None
    given = {str(name): _plain_value(value) for name, value in arguments.items() if value not in (None, "", [], {})}
    return json.dumps(given, sort_keys=True)


def _plain_value(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, Mapping | list | tuple) else str(value)


def _evidence(call: tuple[str, str | None], sent: _Sent, texts: frozenset[tuple[str, str]] | None) -> int:
    """Return the score of a delivery as the answer to a call; 0 if it cannot be."""
    name, key = call
    if sent.name and name != sent.name:
        return 0
    if sent.key is not None:
        if key != sent.key:
            return 0  # texts alone prove nothing: many commands say nothing, and all alike
        return _ARGUMENTS + (_TEXT if _answered(name, sent, texts) else 0)
    if sent.text is not None:
        return _TEXT if _answered(name, sent, texts) else 0
    return _NAME  # nothing more is known of it


def _answered(name: str, sent: _Sent, texts: frozenset[tuple[str, str]] | None) -> bool:
    return sent.text is not None and texts is not None and (name, sent.text) in texts


def _plain(turns: Sequence[_Turn], deliveries: Sequence[_Sent]) -> list[list[int | None]] | None:
    """Return the match in which the next deliveries answer each turn, or None if any score contradicts it."""
    at = 0
    result: list[list[int | None]] = []
    for turn in turns:
        found: list[int | None] = [None] * len(turn.calls)
        while at < len(deliveries):
            best = _best(turn, deliveries[at], found)
            full = _ARGUMENTS if deliveries[at].text is None or turn.texts is None else _ARGUMENTS + _TEXT
            if best is None or best[0] < full:
                break
            found[best[1]] = at
            at += 1
        delivered = sum(one is not None and deliveries[one].delivered for one in found)
        if delivered != turn.most - turn.errors:
            return None  # one is somewhere else
        result.append(found)
    return result


def _aligned(turns: Sequence[_Turn], deliveries: Sequence[_Sent]) -> list[list[int | None]]:
    """Return the match with the highest total score; the earliest of equals."""
    count = len(deliveries)
    best = [0] * (count + 1)  # evidence of the turns so far within the first p deliveries
    choices: list[list[tuple[int, tuple[int | None, ...]]]] = []
    for turn in turns:
        nothing: tuple[int | None, ...] = (None,) * len(turn.calls)
        after = list(best)
        chosen = [(p, nothing) for p in range(count + 1)]  # p: where the turn's run of deliveries begins
        for begin in range(count):
            # A run may hold deliveries that answer no call, from a tool that acts twice, but not many.
            for end, score, found in _runs(turn, deliveries, begin, 2 * turn.most + 1):
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
    turn: _Turn, deliveries: Sequence[_Sent], begin: int, longest: int
) -> list[tuple[int, int, tuple[int | None, ...]]]:
    """Return end, evidence and match of each run from ``begin`` on that ends with a match."""
    found: list[int | None] = [None] * len(turn.calls)
    score = matched = delivered = 0
    runs = []
    for index in range(begin, min(begin + longest, len(deliveries))):
        sent = deliveries[index]
        best = _best(turn, sent, found) if not sent.delivered or delivered < turn.most - turn.errors else None
        if best is None:
            if index == begin:
                return []  # the same run without it begins one later
            continue
        found[best[1]] = index
        score += best[0]
        matched += 1
        delivered += sent.delivered
        runs.append((index + 1, score, tuple(found)))
        if matched == turn.most:
            break
    return runs


def _best(turn: _Turn, sent: _Sent, found: Sequence[int | None]) -> tuple[int, int] | None:
    """Return the score and index of the call that a delivery answers best; the first of equals."""
    best: tuple[int, int] | None = None
    for index, call in enumerate(turn.calls):
        if found[index] is None:
            score = _evidence(call, sent, turn.texts)
            if score and (best is None or score > best[0]):
                best = (score, index)
    return best
