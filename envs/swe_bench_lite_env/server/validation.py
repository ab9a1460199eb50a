"""Runs the tests of an instance with the same grader as ``submit``, for `prepare.validate`."""

from __future__ import annotations

from errata_server.sandbox.base import Backend

from .grading import grade
from .prepare.store import Prepared
from .prepare.validate import TEST_LIMITS, TIMEOUT_S, Run, applied


async def graded(backend: Backend, prepared: Prepared, patch: str) -> Run:
    """Grade the start of an instance with a patch, as a session's submit would be.

    Args:
        backend: Has the start.
        prepared: The instance.
        patch: Unified diff; empty: none.

    Raises:
        EnvironmentFailed: A patch does not apply, or the tests give no verdict on the untouched start.
        SandboxFailed: The sandbox broke.
    """
    sandbox = await backend.restore(prepared.snapshot, limits=TEST_LIMITS)
    try:
        await applied(sandbox, prepared, "gold", patch)
        snapshot = await sandbox.snapshot()
        found = await grade(backend, snapshot, prepared, timeout_s=TIMEOUT_S)
    finally:
        await sandbox.destroy()
    return Run(found.resolution, found.seconds, found.log, found.tampering)
