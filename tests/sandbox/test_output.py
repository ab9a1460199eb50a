"""What is kept of an output: bounded, cut between characters, decoded by one rule."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from errata_server.sandbox.output import BoundedOutput, decode


def kept(data: bytes, keep: int, chunk: int) -> BoundedOutput:
    output = BoundedOutput(keep)
    for at in range(0, len(data), chunk):
        output.feed(data[at : at + chunk])
    return output


@given(st.binary(max_size=300), st.integers(0, 100), st.integers(1, 64))
def test_what_fits_is_whole_and_what_does_not_names_the_missing_bytes(data: bytes, keep: int, chunk: int) -> None:
    output = kept(data, keep, chunk)
    assert output.total == len(data)
    if len(data) <= keep:
        assert not output.truncated
        assert output.text() == decode(data)
    else:
        assert output.truncated
        head, rest = output.text().split("\n[... ", 1) if "\n[... " in output.text() else ("", "")
        missing = int(rest.split(" ", 1)[0])
        assert len(data) - keep <= missing <= len(data) - keep + 6
        assert decode(data).startswith(head) or len(data) > keep


@given(st.text(min_size=60, max_size=200), st.integers(8, 40), st.integers(1, 64))
def test_a_cut_never_breaks_a_character(text: str, keep: int, chunk: int) -> None:
    data = text.replace("\\", "/").encode("utf-8", "ignore")
    shown = kept(data, keep, chunk).text()
    assert "\\x" not in shown.replace("\\x00", "")


def test_many_small_writes_do_not_become_many_objects() -> None:
    output = BoundedOutput(32 * 1024)
    for _ in range(200_000):
        output.feed(b"x")
    assert sum(map(sys.getsizeof, output._tail)) < 64 * 1024
    assert len(output._tail) < 16


def test_bytes_that_are_no_text_are_escaped_and_valid_text_is_not() -> None:
    assert decode(b"\xff\xc3\xa9\0\xe2\x82") == "\\xffé\\x00\\xe2\\x82"
