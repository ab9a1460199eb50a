"""What is public is what docs/reference says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "reference.py"
_spec = importlib.util.spec_from_file_location("reference", SCRIPT)
assert _spec is not None and _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)


TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is missing: make trainer")
PACKAGES = [
    pytest.param(package, marks=TORCH if package in reference.NEEDS_TORCH else ()) for package in reference.PACKAGES
]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_page_is_what_the_package_publishes(package: str) -> None:
    written = (reference.DIRECTORY / f"{package}.md").read_text()
    assert written == reference.page(package), "run: python scripts/reference.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_says_what_it_is(package: str) -> None:
    rows = [line for line in reference.page(package).splitlines() if line.startswith("| `")]
    assert rows and not [row for row in rows if row.endswith("|  |")]
