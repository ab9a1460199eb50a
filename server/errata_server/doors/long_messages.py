"""Bounds how fast long messages are read, so that those who send them leave the event loop to others.

To read a message takes the loop a time that grows with its size, a piece after the other. A client that sends one long
message after the other would have a large part of the loop's time for as long as it likes.
"""

from __future__ import annotations

import asyncio

from ..concurrency.per_loop import PerLoop

LONG = 64 * 1024
"""Bytes above which a message is a long one; shorter ones of different senders take turns as they come."""

BYTES_PER_S = 4 * 1024**2
"""Rate at which the long messages of all clients are read, once `AT_ONCE` of them have been."""

AT_ONCE = 16 * 1024**2
"""Bytes of long messages that are read without a wait after a pause: the largest message that is read by default."""


class LongMessages:
    """What the long messages on one event loop may take of its time.

    Senders that wait share the rate equally, whatever the number of their messages.

    Args:
        loop: The loop, whose clock is used.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._paid_until = loop.time() - AT_ONCE / BYTES_PER_S
        self._waiting = 0

    async def pay(self, size: int) -> None:
        """Wait until others have had the loop for long enough; call it before the same sender's next message is read.

        Args:
            size: Number of bytes that were read; none where it is negative.
        """
        if size <= 0:
            return
        now = self._loop.time()
        self._paid_until = max(self._paid_until, now - AT_ONCE / BYTES_PER_S) + size / BYTES_PER_S
        if self._paid_until <= now:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(min(self._paid_until - now, size / BYTES_PER_S * self._waiting))
        finally:
            self._waiting -= 1


_LOOPS = PerLoop(LongMessages)


async def pay(size: int) -> None:
    """Wait as `LongMessages.pay` does, on the running loop."""
    await _LOOPS[asyncio.get_running_loop()].pay(size)
