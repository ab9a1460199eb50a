"""Paths of fields: read, written, taken out of values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol import json_path
from errata_protocol.json_path import parse, without, written


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("$.observation.result.execution_time", ("observation", "result", "execution_time")),
        ("result.execution_time", ("result", "execution_time")),
        ("execution-time", ("execution-time",)),
        ("$.observation.items[3].at", ("observation", "items", 3, "at")),
        ("items[*].at", ("items", None, "at")),
        ("items.*.at", ("items", None, "at")),
        ('$.metadata["took s"]', ("metadata", "took s")),
        ('$["a.b"][0]', ("a.b", 0)),
        ("$", ()),
    ],
)
def test_a_path_is_read(text: str, path: tuple[Any, ...]) -> None:
    assert parse(text) == path


@pytest.mark.parametrize("text", ["$.", "a..b", "a[", "a[x]", "a b", "[0]x", "$a", "a.[0", 'a["x]', "a.$b"])
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no path"):
        parse(text)


@given(st.lists(st.text(max_size=5) | st.integers(0, 99) | st.none(), max_size=5))
def test_a_written_path_is_read_as_it_was(path: list[json_path.Token]) -> None:
    assert parse(written(tuple(path))) == tuple(path)


def test_what_lies_at_a_path_is_left_out_and_nothing_else() -> None:
    value = {"a": [{"t": 1, "n": 1}, {"t": 2, "n": 2}], "b": {"c": {"d": 1}, "e": 2}, "l": [1, 2]}
    assert without(value, parse("a[*].t"))["a"] == [{"n": 1}, {"n": 2}]
    assert without(value, parse("a[1].t"))["a"] == [{"t": 1, "n": 1}, {"n": 2}]
    assert without(value, parse("b.c.d"))["b"] == {"c": {}, "e": 2}
    assert without(value, parse("b.*.d"))["b"] == {"c": {}, "e": 2}
    assert without(value, parse("l[0]"))["l"] == [None, 2]
    for absent in ("x", "a.t", "b[0]", "l[7]", "b.e.f", "b.c.x"):
        assert without(value, parse(absent)) == value
    assert value["b"] == {"c": {"d": 1}, "e": 2}
