"""Each cell of the tables in docs/guarantees.md names tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "guarantees.md").read_text()
KEY = re.compile(r"\[([a-z-]+)\](?!\()")
LISTS = {
    found[1]: re.findall(r"`([\w/]+\.py)::(test_\w+)`", found[2])
    for found in re.finditer(r"^- \[([a-z-]+)\]: (.*)$", TEXT, re.MULTILINE)
}


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 50
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (TESTS / file).read_text()]
    assert missing == []


def test_every_cell_that_promises_something_names_its_tests() -> None:
    rows = [line.strip("| ").split("|") for line in TEXT.splitlines() if line.startswith("| ")]
    promises = [
        (row[0], cell.strip()) for row in rows for cell in row[1:] if row[0].strip() not in ("failure", "class")
    ]
    assert len(promises) > 90
    by_class = TEXT.split("## By operation and failure")[0]
    without = [(name, cell) for name, cell in promises if cell and not KEY.search(cell) and cell not in by_class]
    assert without == []


def test_every_list_of_tests_is_used_and_every_key_has_one() -> None:
    assert all(LISTS.values())
    used = set(KEY.findall(re.sub(r"^- \[.*$", "", TEXT, flags=re.MULTILINE)))
    assert used == set(LISTS)
