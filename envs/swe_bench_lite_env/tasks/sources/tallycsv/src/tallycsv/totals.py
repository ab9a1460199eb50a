"""Adds up."""

from decimal import Decimal

from .numbers import number
from .rows import rows


def totals(data, by, sum_of):
    """Return the sum of one column for each value of another, case being ignored; named as they first occur."""
    names, sums = {}, {}
    for name, amount in rows(data, by, sum_of):
        key = name.lower()
        names.setdefault(key, name)
        sums[key] = sums.get(key, Decimal(0)) + number(amount)
    return {names[key]: value for key, value in sums.items()}
