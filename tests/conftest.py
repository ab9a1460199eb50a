"""What all tests share."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

# Machines are shared: how long an example took says nothing of it, and a slow one is no finding.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's sight, as the server does at its start.

    With torch it is a million objects: each look through them stopped everything in this process for 0.9 s on an idle
    machine, and for longer than a step's deadline of 2 s on a busy one.
    """
    gc.collect()
    gc.freeze()
