from decimal import Decimal

from tallycsv import report


def test_numbers_stand_in_one_column():
    assert report({"bo": Decimal("1"), "Ada": Decimal("12.345")}) == "Ada       12.34\nbo         1.00\n"


def test_no_sums_are_no_lines():
    assert report({}) == ""
