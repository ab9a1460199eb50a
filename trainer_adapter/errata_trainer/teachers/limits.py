"""The request rate and concurrency limits of an endpoint."""

from __future__ import annotations

import asyncio


class Limits:
    """Limits the rate and the number of concurrent calls to an endpoint, on one event loop.

    Args:
        concurrency: Most calls at the same time.
        per_minute: Most requests begun in a minute, evenly spaced; None for no limit.

    Raises:
        ValueError: Nothing would ever be admitted.
    """

    def __init__(self, *, concurrency: int = 4, per_minute: float | None = None) -> None:
        if concurrency < 1 or (per_minute is not None and not per_minute > 0):
            raise ValueError(f"concurrency={concurrency}, per_minute={per_minute}: no call would ever be made")
        self.slots = asyncio.Semaphore(concurrency)
        self._interval_s = 60 / per_minute if per_minute is not None else 0.0
        self._next = 0.0
        self._paused_until = 0.0

    async def pace(self) -> None:
        """Wait until another call may start."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        begin = max(now, self._next)
        self._next = begin + self._interval_s
        while (wait_s := max(begin, self._paused_until) - loop.time()) > 0:  # noqa: ASYNC110  a pause can grow meanwhile
            await asyncio.sleep(wait_s)

    def pause(self, seconds: float) -> None:
        """Start no call for this long, because the endpoint asked to wait."""
        self._paused_until = max(self._paused_until, asyncio.get_running_loop().time() + seconds)
