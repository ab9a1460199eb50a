"""Text of another party on its way to a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.printable import printable, printable_lines


@given(st.text(st.characters(codec=None), max_size=200))
def test_what_is_printed_is_one_line_of_printable_characters(text: str) -> None:
    assert printable(text).isprintable() and printable(printable(text)) == printable(text)
    assert all(line.isprintable() for line in printable_lines(text).replace("\t", "").split("\n"))


@given(st.text(st.characters(categories=("L", "N", "P", "S")), max_size=200))
def test_what_is_harmless_stays_as_it_is(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


def test_control_characters_direction_marks_and_surrogates_become_escapes() -> None:
    assert printable("a\x1b[2J\r\nb\x9b\u202e\u2028\ud800\U000e0001 c") == (
        "a\\x1b[2J\\r\\nb\\x9b\\u202e\\u2028\\ud800\\U000e0001 c"
    )
    assert printable_lines("a\x1b]0;t\x07\n\tb\r\n") == "a\\x1b]0;t\\x07\n\tb\\r\n"


def test_a_long_text_is_cut_and_says_how_much_is_left_out() -> None:
    assert printable("x" * 5_000_000, limit=10) == "xxxxxxxxxx... (4,999,990 more characters)"
    assert printable(ValueError("a\nb")) == "a\\nb"
