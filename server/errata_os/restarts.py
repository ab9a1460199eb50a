"""`Backoff`: the pauses before a process that has ended is started again."""

from __future__ import annotations

STEADY_S = 10.0
"""How long a process has to run for its next restart to be immediate, seconds."""

LONGEST_PAUSE_S = 10.0
"""Longest pause before a restart, seconds."""


class Backoff:
    """The pauses before a process is started again: none after `STEADY_S`, else longer each time."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def pause_s(self, ran_s: float) -> float:
        """Return the pause before the next start, seconds.

        Args:
            ran_s: How long the process has run, seconds.
        """
        if ran_s >= STEADY_S:
            self._pause_s = 0.0
        pause, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, max(0.1, 2 * self._pause_s))
        return pause
