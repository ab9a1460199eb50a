"""JSON that another party wrote: decoded with bounds, and every failure is a ``ValueError``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 256
"""Deepest nesting: far deeper than any message or file, and shallow enough for every encoder, printer and validator."""

_MAYBE_INFINITE = re.compile(r"[eE]\+?0*[1-9]\d\d|\d{100}")


def decode(data: bytes | str, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value that JSON text holds.

    Halves of surrogate pairs are kept: rows and patches hold bytes that are not UTF-8 as such.

    Args:
        data: UTF-8 bytes, or text.
        max_depth: Most containers around a value.

    Raises:
        ValueError: It is not UTF-8 or not JSON; it holds NaN, an infinity, a number that a double cannot hold, or an
            integer of more than 4,300 digits; or it is nested too deeply.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        value = _DECODER.decode(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {max_depth} levels") from None
    if text.count("[") + text.count("{") > max_depth and deeper_than(value, max_depth):
        raise ValueError(f"it is nested deeper than {max_depth} levels")
    if _MAYBE_INFINITE.search(text) and any(isinstance(one, float) and math.isinf(one) for one in _values(value)):
        raise ValueError("it holds a number that is beyond what a double holds")
    return value


def deeper_than(value: Any, levels: int) -> bool:
    """Return whether a container is nested in more than ``levels`` others; the outermost one is in none.

    Not recursive: recursion limits differ between Python versions.
    """
    level = [value]
    for _ in range(levels + 1):
        level = [inner for outer in level for inner in _members(outer) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _values(value: Any) -> Iterator[Any]:
    """Yield a value and all that it holds."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(_members(one))


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        return iter(value.values())
    return iter(value if isinstance(value, list) else ())


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# json.loads would make a decoder for each call.
_DECODER = json.JSONDecoder(parse_constant=_no_constant)
