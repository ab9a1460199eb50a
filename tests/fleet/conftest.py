"""What the tests of fleets of boxes share."""

from __future__ import annotations

import importlib.util

import pytest

HAS_RAY = importlib.util.find_spec("ray") is not None

collect_ignore_glob = [] if HAS_RAY else ["test_*.py"]
"""Where Ray is not installed these tests are not collected: their modules import it. The suite `fleet` runs them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory as those of the suite `fleet`."""
    for item in items:
        if "tests/fleet/" in item.path.as_posix():
            item.add_marker(pytest.mark.fleet)
