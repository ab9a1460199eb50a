"""Each cell of docs/guarantees.md names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_table_names_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) >= 10
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (ROOT / "tests" / "server" / file).read_text()
    ]
    assert missing == []
