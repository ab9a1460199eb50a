"""Values of a record as JSON: plain values of what is written, and checks of the type of what is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
"""Texts of the floats for which JSON has no number."""


def plain_of(value: Any, where: str) -> Any:
    """Return a value as plain JSON types.

    Args:
        value: Value of nested mappings, lists and scalars.
        where: Name of the value in error messages.

    Raises:
        TypeError: JSON has no such value, or a key is no text; the message names the place.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return number_of(value)
    # loops, for a comprehension is a frame more: a student's nesting must not end here before it does in the encoder
    if isinstance(value, Mapping):
        table = {}
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: keys of JSON objects are texts")
            table[key] = plain_of(inner, f"{where}.{key}")
        return table
    if isinstance(value, list | tuple):
        row = []
        for number, inner in enumerate(value):
            row.append(plain_of(inner, f"{where}[{number}]"))
        return row
    raise TypeError(f"{where} is a {type(value).__name__}: JSON has no such value")


def number_of(value: float) -> float | str:
    """Return a float as JSON has it: one that is not finite is one of `NOT_FINITE`."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def float_of(value: Any, name: str) -> float:
    """Return the float of a JSON value.

    Args:
        value: Number, or one of `NOT_FINITE`.
        name: Name of the field in the error message.

    Raises:
        TypeError: It is neither.
    """
    if type(value) not in (int, float) and not (type(value) is str and value in NOT_FINITE):
        raise TypeError(f"{name} is {value!r:.80}: it has to be a number, or one of {', '.join(sorted(NOT_FINITE))}")
    return float(value)


def of_type(value: Any, kind: type, name: str, meaning: str) -> Any:
    """Return a value that has exactly the type ``kind``.

    Args:
        value: Value that was read.
        kind: Type that it has to have.
        name: Name of the field in the error message.
        meaning: Name of the type in the error message, e.g. ``an integer``.

    Raises:
        TypeError: It has another type.
    """
    if type(value) is not kind:  # true is an int to Python
        raise TypeError(f"{name} is {value!r:.80}: it has to be {meaning}")
    return value
