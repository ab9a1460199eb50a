"""JSON of another party: a value within bounds, or a ValueError."""

from __future__ import annotations

import pytest

from errata_protocol.bounded_json import MAX_DEPTH, decode


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested deeper|Expecting value"),
        ("[" * 500 + "]" * 500, "nested deeper than 256"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested deeper than 256"),
        ("1e999", "beyond what a double holds"),
        ('{"a": [1, {"b": -1E0999}]}', "beyond what a double holds"),
        ("9" * 400 + ".5", "beyond what a double holds"),
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        ("1" * 5000, "4300 digits"),
        (b"\xff", "utf-8"),
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[1] [2]", "Extra data"),
    ],
)
def test_what_is_not_bounded_json_is_a_value_error(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(text)


def test_values_within_the_bounds_are_read() -> None:
    deep = "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)
    assert decode(deep) is not None
    assert decode(b'{"a": [1, 2.5e10, null, true, "\\ud800"]}') == {"a": [1, 2.5e10, None, True, "\ud800"]}
    assert decode('\ufeff["1e999", "[[[["]') == ["1e999", "[[[["]
