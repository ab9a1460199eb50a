"""What time it is: a seam, so that a test or a simulation can say.

Whatever waits (`asyncio.sleep`, `asyncio.timeout`, ``call_later``) asks the event loop, not this: a simulation brings
its own loop (`errata_server.simulation.SimulatedLoop`), and nothing in the server wraps a wait.
"""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks."""

    def time(self) -> float:
        """Return seconds since the epoch; may jump."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds since some moment; never goes back."""
        return time.monotonic()
