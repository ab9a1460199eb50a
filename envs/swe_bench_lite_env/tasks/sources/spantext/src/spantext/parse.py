"""Reads spans."""

from .tokens import tokens
from .units import SECONDS


class SpanInvalid(ValueError):
    """A text that is no span; `at` is the position of what is wrong."""

    def __init__(self, text, at, message):
        super().__init__(f"{text!r}, position {at}: {message}")
        self.at = at


def parse(text):
    """Return the seconds of a span.

    Raises:
        SpanInvalid: It is none.
    """
    parts = list(tokens(text.lower()))
    if not parts:
        raise SpanInvalid(text, 0, "empty")
    if any(part.text == ":" for part in parts):
        return _clock(text, parts)
    total = 0.0
    while parts:
        number = parts.pop(0)
        if number.kind != "number":
            raise SpanInvalid(text, number.at, "a number is expected")
        if not parts or parts[0].kind != "unit":
            raise SpanInvalid(text, number.at, "a number without a unit")
        unit = parts.pop(0)
        if unit.text not in SECONDS:
            raise SpanInvalid(text, unit.at, f"unknown unit {unit.text}")
        total += int(number.text) * SECONDS[unit.text]
    return total


def _clock(text, parts):
    """Read `minutes:seconds` or `hours:minutes:seconds`."""
    total = 0.0
    for index, part in enumerate(parts):
        expected = ":" if index % 2 else "number"
        if expected not in (part.kind, part.text):
            raise SpanInvalid(text, part.at, f"{expected} is expected")
        if index % 2 == 0:
            total = total * 60 + int(part.text)
    if len(parts) not in (3, 5):
        raise SpanInvalid(text, 0, "two or three numbers with : between")
    return total
