"""`Clock`: source of times, which tests and simulations replace.

Waits (`asyncio.sleep`, `asyncio.timeout`, ``call_later``) use the event loop's clock instead; a simulation replaces the
loop as well (`errata_server.simulation.SimulatedLoop`).
"""

from __future__ import annotations

import time


class Clock:
    """The clocks of the operating system."""

    def time(self) -> float:
        """Return the time in seconds since the epoch; it may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Return a time in seconds that never goes back."""
        return time.monotonic()
