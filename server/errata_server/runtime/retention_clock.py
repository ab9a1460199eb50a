"""`RetentionClock`: when old episodes are deleted next; one for all environments of a data directory."""

from __future__ import annotations

EVERY_S = 3600.0
"""A server deletes nothing for its age more often than this."""


class RetentionClock:
    """Lets one caller an hour through.

    Args:
        now: Seconds since the epoch; the first hour begins here.
    """

    def __init__(self, now: float) -> None:
        self._last = now

    def due(self, now: float) -> bool:
        """Return whether an hour has passed since this last returned True, and if so begin the next hour."""
        if now - self._last < EVERY_S:
            return False
        self._last = now
        return True
