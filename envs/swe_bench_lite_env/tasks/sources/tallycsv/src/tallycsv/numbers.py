"""Reads numbers as people in different countries write them."""

import re
from decimal import Decimal

_ENGLISH = re.compile(r"-?\d{1,3}(?:,\d{3})*(?:\.\d+)?|-?\d+(?:\.\d+)?")
_CONTINENTAL = re.compile(r"-?\d{1,3}(?:\.\d{3})*(?:,\d+)?|-?\d+(?:,\d+)?")


class NumberInvalid(ValueError):
    """A text that is no number."""


def number(text):
    """Return a number; where a sign could be both, it is read the English way."""
    if _ENGLISH.fullmatch(text):
        return Decimal(text.replace(",", ""))
    if _CONTINENTAL.fullmatch(text):
        return Decimal(text.replace(".", "").replace(",", "."))
    raise NumberInvalid(text)
