from decimal import Decimal

import pytest

from ratebook import RateBook, UnknownCurrency, table


def test_conversion_goes_by_the_base_currency():
    book = RateBook("EUR")
    book.set_rate("USD", "1.25")
    book.set_rate("GBP", "0.80")
    assert book.convert("10.00", "USD", "GBP") == Decimal("6.40")
    assert book.convert(10, "EUR", "USD") == Decimal("12.50")


def test_a_currency_is_worth_itself():
    assert RateBook("EUR").convert("3.14", "EUR", "EUR") == Decimal("3.14")


def test_an_unknown_currency_is_refused():
    with pytest.raises(UnknownCurrency):
        RateBook("EUR").rate("EUR", "XXX")


def test_rates_have_to_be_positive():
    with pytest.raises(ValueError):
        RateBook("EUR").set_rate("USD", 0)


def test_the_base_has_no_rate_to_set():
    with pytest.raises(ValueError):
        RateBook("EUR").set_rate("EUR", 2)


def test_a_table_of_all_rates():
    book = RateBook("CHF", {})
    book.set_rate("SEK", 10)
    assert table(book).splitlines()[1] == "CHF       1.0000   10.0000"
