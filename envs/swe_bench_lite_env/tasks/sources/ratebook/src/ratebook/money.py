"""Rounds amounts."""

from decimal import ROUND_HALF_EVEN, Decimal

CENT = Decimal("0.01")


def rounded(amount):
    """Return an amount with two digits; halves go to the even digit."""
    return Decimal(amount).quantize(CENT, rounding=ROUND_HALF_EVEN)
