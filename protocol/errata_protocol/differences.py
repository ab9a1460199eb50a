"""Compares two payloads of the same request field by field, and guesses why they differ.

They are compared after `normalised`, which removes differences that do not come from the environment:

- Addresses in Python's ``<... object at 0x7f3c5a1d2e80>``. Each is replaced by its number in order of appearance, so
  that one object printed twice and two objects stay distinguishable.
- The order of items in the text of a set, ``{'a', 'b'}``, if all items are literals.

Nothing else is changed: not the order of a list, and no number that only looks like an address. Journaled bytes are
never normalised, only the values that are compared.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .json_path import Path, written

BEFORE, AFTER = 24, 40
"""Characters shown of a text before and after the first that differs."""


class Absent:
    """The value of a field that one side does not have."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = Absent()


class Cause(StrEnum):
    """Why two values differ, as far as the values show it."""

    TIME = "a time or duration"
    ADDRESS = "a memory address"
    IDENTIFIER = "a random name or id"
    ORDER = "the same items in another order"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs.

    Args:
        path: Path of the field.
        was: The first value, `ABSENT` if the first side does not have the field.
        now: The second value, `ABSENT` if the second side does not have the field.
    """

    path: Path
    was: Any
    now: Any

    @property
    def where(self) -> str:
        """The path as text."""
        return written(self.path)

    @property
    def how(self) -> str:
        """Both values in one line, each cut to a window around the first character that differs."""
        if self.was is ABSENT:
            return f"was not there and is {_window(self.now, 0)}"
        if self.now is ABSENT:
            return f"was {_window(self.was, 0)} and is not there any more"
        if isinstance(self.was, list) and isinstance(self.now, list) and len(self.was) != len(self.now):
            length = f"had {len(self.was)} items and has {len(self.now)}: "
        else:
            length = ""
        was, now = _text(self.was), _text(self.now)
        at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
        place = f"from character {at} on " if isinstance(self.was, str) and isinstance(self.now, str) else ""
        return f"{place}{length}was {_window(self.was, at)} and is {_window(self.now, at)}"

    @property
    def cause(self) -> Cause | None:
        """The likely cause; None if the values do not show one."""
        was, now = self.was, self.now
        if isinstance(was, str) and isinstance(now, str):
            return _cause_of_texts(was, now)
        if _is_number(was) and _is_number(now):
            name = next((part for part in reversed(self.path) if isinstance(part, str)), "")
            if name != "reward" and (_TIME_NAME.search(name) or _near(float(was), float(now))):
                return Cause.TIME
            return Cause.IDENTIFIER if _ID_NAME.search(name) else None
        if isinstance(was, list) and isinstance(now, list) and _reordered(was, now):
            return Cause.ORDER
        return None


def differences(was: Any, now: Any) -> list[Difference]:
    """Return all fields in which two decoded JSON values differ, in order of keys; empty if they are equal.

    Numbers are compared as RFC 8785 writes them: 1 and 1.0 are equal, 1 and true are not. A list with the same items in
    another order is one difference. An observation's metadata is in a payload twice, and is reported once.
    """
    found: list[Difference] = []
    _compare(was, now, (), found)
    twice = {d.path for d in found if d.path[:1] == ("metadata",)}
    return [d for d in found if not (d.path[:2] == ("observation", "metadata") and d.path[1:] in twice)]


def _compare(was: Any, now: Any, path: Path, found: list[Difference]) -> None:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            if key not in was or key not in now:
                found.append(Difference((*path, key), was.get(key, ABSENT), now.get(key, ABSENT)))
            else:
                _compare(was[key], now[key], (*path, key), found)
    elif isinstance(was, list) and isinstance(now, list):
        if len(was) != len(now) or _reordered(was, now):
            found.append(Difference(path, was, now))
            return
        for index, (a, b) in enumerate(zip(was, now, strict=True)):
            _compare(a, b, (*path, index), found)
    elif isinstance(was, bool) != isinstance(now, bool) or was != now:
        found.append(Difference(path, was, now))


def summary(found: list[Difference], most: int = 4) -> str:
    """Return differences as one line: the first ``most`` of them with both values, and the number of the others."""
    lines = [f"{difference.where} {difference.how}" for difference in found[:most]]
    if len(found) > most:
        lines.append(f"{len(found) - most} more")
    return "; ".join(lines)


# -- normalising -------------------------------------------------------------------------------------------------------

_REPR_ADDRESS = re.compile(r"(?<= at 0x)[0-9A-Fa-f]{6,16}(?=[>;,])")
_LITERAL = re.compile(
    r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|\bNone\b|\bTrue\b|\bFalse\b"""
)
_SET = re.compile(rf"\{{(?:{_LITERAL.pattern})(?:, (?:{_LITERAL.pattern}))+\}}")


def normalised(value: Any) -> Any:
    """Return a decoded payload in the form in which it is compared; see the module's docstring."""
    return _normalised(value, {})


def _normalised(value: Any, seen: dict[str, int]) -> Any:
    if isinstance(value, str):
        return _sets_sorted(addresses_numbered(value, seen))
    if isinstance(value, list):
        return [_normalised(item, seen) for item in value]
    if isinstance(value, dict):
        return {key: _normalised(value[key], seen) for key in sorted(value)}
    return value


def addresses_numbered(text: str, seen: dict[str, int]) -> str:
    """Return ``text`` with each address in a Python repr replaced by its number in ``seen``, which new addresses are
    added to."""
    if " at 0x" not in text:
        return text

    def number(found: re.Match[str]) -> str:
        line = text.rfind("\n", 0, found.start()) + 1
        end = text.find("\n", found.end())
        in_angles = "<" in text[line : found.start()] and ">" in text[found.end() : end if end >= 0 else None]
        return f"#{seen.setdefault(found[0], len(seen) + 1)}" if in_angles else found[0]

    return _REPR_ADDRESS.sub(number, text)


def _sets_sorted(text: str) -> str:
    if "{" not in text:
        return text
    return _SET.sub(lambda found: "{" + ", ".join(sorted(_LITERAL.findall(found[0]))) + "}", text)


# -- causes ------------------------------------------------------------------------------------------------------------

_ANY_ADDRESS = re.compile(r"\b0x[0-9A-Fa-f]{6,16}\b")
_TIMES = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"
    r"|\b\d\d?:\d\d:\d\d(\.\d+)?\b"
    r"|\b\d+(\.\d+)?(e-?\d+)? ?(s|ms|us|µs|ns|secs?|seconds?|milliseconds?)\b"
)
_IDS = re.compile(
    r"\b[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\b|/tmp/\w+|\bpid[ =:]{0,2}\d+", re.IGNORECASE
)
_TIME_NAME = re.compile(
    r"(?i)(^|_)(time|times|timestamp|stamp|ts|date|datetime|created|updated|started|ended|elapsed|duration|latency|took"
    r"|s|sec|secs|seconds|ms|us|ns|uptime)(_(at|s|ms|us|ns|seconds|utc))?$"
)
_ID_NAME = re.compile(r"(?i)(^|_)(pid|port|uuid|guid|nonce)$")
_WORDS = re.compile(r"\w+")
_DAY_S = 86_400.0


def _cause_of_texts(was: str, now: str) -> Cause | None:
    for cause, pattern in ((Cause.ADDRESS, _ANY_ADDRESS), (Cause.IDENTIFIER, _IDS), (Cause.TIME, _TIMES)):
        was, now = pattern.sub("#", was), pattern.sub("#", now)
        if was == now:
            return cause
    words = Counter(_WORDS.findall(was))
    return Cause.ORDER if len(words) > 1 and len(was) == len(now) and words == Counter(_WORDS.findall(now)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _near(was: float, now: float) -> bool:
    """Return whether both numbers are times since 1970, in seconds, milliseconds or nanoseconds, that lie within a
    day of each other between 2020 and 2100."""
    return any(
        1.58e9 * unit < min(was, now) and max(was, now) < 4.1e9 * unit and abs(was - now) < _DAY_S * unit
        for unit in (1.0, 1e3, 1e9)
    )


def _reordered(was: list[Any], now: list[Any]) -> bool:
    return was != now and len(was) == len(now) and _items(was) == _items(now)


def _items(values: Iterable[Any]) -> Counter[str]:
    return Counter(json.dumps(value, sort_keys=True) for value in values)


# -- text --------------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _window(value: Any, at: int) -> str:
    text = _text(value)
    first, last = max(0, at - BEFORE), at + AFTER
    shown = json.dumps(text[first:last], ensure_ascii=False) if isinstance(value, str) else text[first:last]
    return ("…" if first else "") + shown + ("…" if last < len(text) else "")
