"""What the tests with VeRL share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

HAS_VERL = importlib.util.find_spec("verl") is not None

collect_ignore_glob = [] if HAS_VERL else ["test_*.py"]
"""Where VeRL is not installed its tests are not collected: their modules import it. The suite `verl` runs them."""

if HAS_VERL:
    # VeRL asks which machine it is on when it is imported, and never again.
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

    import torch

    from . import cpu_plugin  # noqa: F401 # registers the machine
    from .cpu_run import Cluster

    torch.set_num_threads(1)  # tests share two cores


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Return the Ray cluster of all tests."""
    with Cluster() as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory as those of the suite `verl`."""
    for item in items:
        if "tests/verl/" in item.path.as_posix():
            item.add_marker(pytest.mark.verl)
