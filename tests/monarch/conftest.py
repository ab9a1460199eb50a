"""What the tests with Monarch share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from errata_server.process import ServerProcess

HAS_MONARCH = importlib.util.find_spec("monarch") is not None

collect_ignore_glob = [] if HAS_MONARCH else ["test_*.py"]
"""Without Monarch its tests are not collected: their modules import it. The suite `monarch` runs them."""

if HAS_MONARCH:
    import torch

    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)  # tests share two cores


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of shelves in a process of its own."""
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data")) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory as those of the suite `monarch`."""
    for item in items:
        if "tests/monarch/" in item.path.as_posix():
            item.add_marker(pytest.mark.monarch)
