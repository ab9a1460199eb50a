"""What the tests of fleets of boxes share."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from errata_ray.demo import SimulatedCluster

HAS_RAY = importlib.util.find_spec("ray") is not None

collect_ignore_glob = [] if HAS_RAY else ["test_*.py"]
"""Where Ray is not installed these tests are not collected: their modules import it. The suite `fleet` runs them."""

if HAS_RAY:  # Ray reads them when it is imported
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


@pytest.fixture(scope="session")
def cluster() -> Iterator[SimulatedCluster]:
    """A Ray cluster with a head and two nodes, which wants a token. A test that kills a node adds another."""
    from errata_ray.demo import simulated

    with simulated() as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory as those of the suite `fleet`."""
    for item in items:
        if "tests/fleet/" in item.path.as_posix():
            item.add_marker(pytest.mark.fleet)
