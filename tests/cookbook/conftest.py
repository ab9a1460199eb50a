"""What the tests with the Tinker cookbook share."""

from __future__ import annotations

import importlib.util
import os

import pytest

HAS_COOKBOOK = importlib.util.find_spec("tinker_cookbook") is not None

collect_ignore_glob = [] if HAS_COOKBOOK else ["test_*.py"]
"""Where the cookbook is not installed its tests are not collected: their modules import it. The suite `cookbook` runs
them."""

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory as those of the suite `cookbook`."""
    for item in items:
        if "tests/cookbook/" in item.path.as_posix():
            item.add_marker(pytest.mark.cookbook)
