"""`Stalls`: was this process itself held up while it measured a server's times?"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

MEASUREMENTS = 5
"""Most measurements of a time that is too long, or was measured while this process was held up. The last is judged."""

_TICK_S = 0.01


class Stalls:
    """Measures, inside ``async with``, how late the event loop wakes this process at most.

    On a machine that does other work, answers that came apart may be read at once. A time that was measured during
    such a stall says nothing about the server, good or bad, so a check measures it again.

    Attributes:
        longest_s: The longest delay, seconds.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began - _TICK_S)
