"""What the tests with VeRL share."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]
"""Where VeRL is not installed its tests are not collected: their modules import it. The suite `verl` runs them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory as those of the suite `verl`."""
    for item in items:
        if "tests/verl/" in item.path.as_posix():
            item.add_marker(pytest.mark.verl)
