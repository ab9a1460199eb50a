"""`LastSessions`: tells when a process that drains has no session left."""

from __future__ import annotations

from collections.abc import Callable

from ..runtime.runtime import Runtime

QUIET_S = 5.0
"""How long a process that drains has to be without sessions before it ends, seconds: a client whose socket was lost, or
whose worker was killed, comes back within that time."""

COUNT_S = 1.0
"""Time between two counts of the sessions that are left, seconds."""


def sessions_left(runtime: Runtime) -> int:
    """Return how many sessions have a connection, or hold an instance without one."""
    _, detached = runtime.metrics.sessions()
    return len(runtime.attached) + detached


class LastSessions:
    """Counts the sessions of a process that drains.

    Args:
        left: Returns how many sessions have a connection or an instance.
        now: Clock, seconds.
    """

    def __init__(self, left: Callable[[], int], now: Callable[[], float]) -> None:
        self._left = left
        self._now = now
        self._counted = float("-inf")
        self.forget()

    def forget(self) -> None:
        """Called when the process begins or ceases to drain: begin anew to wait for `QUIET_S` without sessions."""
        self._quiet_since: float | None = None

    def count(self) -> int | None:
        """Return how many are left; None where the last count was less than `COUNT_S` ago."""
        now = self._now()
        if now - self._counted < COUNT_S:
            return None
        left, self._counted = self._left(), now
        if left:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        return left

    @property
    def are_over(self) -> bool:
        """There has been none for `QUIET_S`, by the counts."""
        return self._quiet_since is not None and self._counted - self._quiet_since >= QUIET_S
