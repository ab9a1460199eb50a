"""Detects hints that reveal what only a grader or a solution knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

SECRET_FIELDS = frozenset(
    {
        "patch", "gold_patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "hints_text", "solution", "answer",
        "ground_truth", "expected", "expected_output", "tests", "verifier", "reward_spec",
    }
)  # fmt: skip
"""Fields of a task that hold solutions or tests, in SWE-bench's words and others'."""

_LINE_CHARS = 12  # `return None` is everybody's
_WORDS = 6
_DIFF_MARK = re.compile(r"^(\+\+\+|---|@@.*?@@|[+-])", re.MULTILINE)


def secrets_of(task: Mapping[str, Any]) -> list[str]:
    """Return the texts of a task that a hint must not reveal."""
    return [text for name, value in task.items() if name in SECRET_FIELDS for text in _texts(value)]


def leaks(hint: str, secrets: Iterable[str]) -> list[str]:
    """Return what a hint reveals of the secrets: a whole one, a line of at least 12 characters, or six words in a row.

    Case and spacing do not count. It errs on the side of finding too much: a hint that says less is written then.
    """
    text = _plain(hint)
    words = _words(hint)
    runs = {tuple(words[i : i + _WORDS]) for i in range(len(words) - _WORDS + 1)}
    found = []
    for secret in secrets:
        whole = _plain(secret)
        if len(whole) < 2:
            continue
        lines = [_plain(line) for line in _DIFF_MARK.sub("", secret).splitlines()]
        if any(_stands_in(part, text) for part in [whole, *(line for line in lines if len(line) >= _LINE_CHARS)]):
            found.append(secret)
            continue
        own = _words(secret)
        if any(tuple(own[i : i + _WORDS]) in runs for i in range(len(own) - _WORDS + 1)):
            found.append(secret)
    return found


def _stands_in(part: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        try:
            inner = json.loads(value)  # FAIL_TO_PASS is a list in a string
        except ValueError:
            inner = None
        if isinstance(inner, list | dict):
            yield from _texts(inner)
        else:
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, Iterable):
        for one in value:
            yield from _texts(one)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
