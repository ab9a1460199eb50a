"""A text of an exception is never empty."""

from __future__ import annotations

import pytest

from errata_protocol.errors import EnvironmentFailed, ErrataError
from errata_protocol.exception_text import named_text_of, text_of


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "text", "named"),
    [
        (AssertionError(), "AssertionError", "AssertionError"),
        (TimeoutError("  "), "TimeoutError", "TimeoutError"),
        (KeyError(""), "''", "KeyError: ''"),
        (ValueError("no such bird"), "no such bird", "ValueError: no such bird"),
        (Mute(), "a Mute whose message cannot be read: ValueError", None),
        (EnvironmentFailed(""), "EnvironmentFailed", "EnvironmentFailed"),
    ],
)
def test_an_exception_without_a_text_is_named_by_its_class(error: Exception, text: str, named: str | None) -> None:
    assert text_of(error) == text
    assert named_text_of(error) == named or named is None


@pytest.mark.parametrize("message", ["", " \n"])
def test_an_error_sent_without_a_message_names_its_class(message: str) -> None:
    assert ErrataError(message).to_wire()["message"] == "ErrataError"
