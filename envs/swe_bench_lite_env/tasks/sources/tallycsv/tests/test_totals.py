from decimal import Decimal

import pytest

from tallycsv import ColumnMissing, NumberInvalid, totals


def test_a_column_is_summed_by_another():
    data = b"customer,amount\nAda,1.50\nBob,2\nada,3\n"
    assert totals(data, "customer", "amount") == {"Ada": Decimal("4.50"), "Bob": Decimal("2")}


def test_semicolons_and_decimal_commas():
    data = "customer;amount\r\nAda;1.234,50\r\nBjörn;2\r\n".encode()
    assert totals(data, "customer", "amount") == {"Ada": Decimal("1234.50"), "Björn": Decimal("2")}


def test_other_bytes_are_windows_1252():
    data = "customer,amount\nBjörn,1\n".encode("cp1252")
    assert totals(data, "customer", "amount") == {"Björn": Decimal("1")}


def test_a_column_that_is_not_there_is_refused():
    with pytest.raises(ColumnMissing, match="price"):
        totals(b"customer,amount\n", "customer", "price")


def test_what_is_no_number_is_refused():
    with pytest.raises(NumberInvalid, match="n/a"):
        totals(b"customer,amount\nAda,n/a\n", "customer", "amount")
