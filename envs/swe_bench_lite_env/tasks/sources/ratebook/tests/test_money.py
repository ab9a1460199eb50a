from decimal import Decimal

from ratebook import rounded


def test_halves_go_to_the_even_digit():
    assert rounded("0.125") == Decimal("0.12")
    assert rounded("0.135") == Decimal("0.14")
