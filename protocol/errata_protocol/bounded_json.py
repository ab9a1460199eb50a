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
    if may_be_infinite(text) and has_infinity(value):
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


def may_be_infinite(text: str) -> bool:
    """Return whether JSON text may hold a number that a double cannot hold; False is certain."""
    return _MAYBE_INFINITE.search(text) is not None


def has_infinity(value: Any) -> bool:
    """Return whether a decoded value is or holds an infinite number."""
    level = [value]
    while level:
        if any(isinstance(found, float) and math.isinf(found) for found in level):
            return True
        level = [inner for outer in level for inner in _members(outer) if isinstance(inner, dict | list | float)]
    return False


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        return iter(value.values())
    return iter(value if isinstance(value, list) else ())


def no_constant(name: str) -> None:
    """Refuse NaN and infinities, which are no JSON, as ``parse_constant`` of Python's decoder.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"{name} is not JSON")


# json.loads would make a decoder for each call.
_DECODER = json.JSONDecoder(parse_constant=no_constant)
