"""What all tests share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from . import slowest_files
from .loop_watch import LoopWatch

# Machines are shared: how long an example took says nothing of it, and a slow one is no finding.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


_WATCH = pytest.StashKey[LoopWatch]()


@pytest.fixture(autouse=True)
def loop_watch(pytestconfig: pytest.Config) -> Iterator[LoopWatch]:
    """Fail a test in which the product's code keeps an event loop busy."""
    watch = pytestconfig.stash[_WATCH]
    yield watch
    if found := watch.take():
        pytest.fail("on an event loop, where all sessions wait for it: " + "; ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Take back what `errata serve`, called in this process, makes of the root logger.

    Its handler would write into the standard error of a call that is over, and the failure of that into the standard
    error that a later test looks at.
    """
    root = logging.getLogger()
    level, before = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:  # pytest's own are of other types
            root.removeHandler(handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slowest-files``."""
    parser.addoption("--slowest-files", type=int, default=0, metavar="N", help="list the N files that cost most CPU")


def pytest_configure(config: pytest.Config) -> None:
    """Measure what tests cost, and watch event loops."""
    config.stash[_WATCH] = watch = LoopWatch()
    watch.start()
    config.add_cleanup(watch.stop)
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
