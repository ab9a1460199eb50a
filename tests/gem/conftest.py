"""What the tests of the recipe for ROLL share."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

from errata_server.process import ServerProcess

HAS_GEM = importlib.util.find_spec("gem") is not None

collect_ignore_glob = [] if HAS_GEM else ["test_*.py"]
"""Where gem is not installed these tests are not collected: their modules import it. The suite `gem` runs them."""

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
if os.environ.get("ROLL_SOURCE"):
    sys.path.append(os.environ["ROLL_SOURCE"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory as those of the suite `gem`."""
    for item in items:
        if "tests/gem/" in item.path.as_posix():
            item.add_marker(pytest.mark.gem)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of shelves in a process of its own."""
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data")) as made:
        yield made
