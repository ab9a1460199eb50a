"""What all tests share."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

from . import slowest_files

# Machines are shared: how long an example took says nothing of it, and a slow one is no finding.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slowest-files``."""
    parser.addoption("--slowest-files", type=int, default=0, metavar="N", help="list the N files that cost most CPU")


def pytest_configure(config: pytest.Config) -> None:
    """Measure what tests cost."""
    config.pluginmanager.register(slowest_files.Times(config.getoption("--slowest-files")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest files."""
    slowest_files.order(items)


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's sight, as the server does at its start.

    With torch it is a million objects. A look through them and what tests left stopped everything in this process for
    0.9 to 2.7 s (`gc.callbacks`, one run of the suite), longer than a step's deadline of 2 s.
    """
    gc.collect()
    gc.freeze()
