"""What all tests share."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

# Machines are shared: how long an example took says nothing of it, and a slow one is no finding.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's sight, as the server does at its start.

    With torch it is a million objects. A look through them and what tests left stopped everything in this process for
    0.9 to 2.7 s (`gc.callbacks`, one run of the suite), longer than a step's deadline of 2 s.
    """
    gc.collect()
    gc.freeze()
