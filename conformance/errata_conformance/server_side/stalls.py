"""Do answers wait for a slow step, or does the machine do other work?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self

from ..results import Broken, NotTested

MEASUREMENTS = 5
"""Number of undisturbed measurements in which an answer was late, after which the server is at fault."""

ATTEMPTS = 20
"""Most measurements, disturbed ones included."""

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


async def ensure_prompt(
    slow_s: float, measure: Callable[[], Awaitable[Mapping[str, float]]], alone: Callable[[], Awaitable[object]]
) -> None:
    """Check that requests are answered while a slow step runs.

    A busy machine makes some of the answers late, a server that waits all of them. So one measurement in which all
    answers were early is enough, and late answers count only if the same requests were answered soon, right after it,
    with no slow step before them.

    Args:
        slow_s: Duration of the slow step, seconds.
        measure: Starts the slow step, makes the requests, waits for all answers, and returns for each request, by its
            name, by how many seconds its answer came before that of the slow step. Each call begins a new episode.
        alone: Makes the same requests with no slow step running, and waits for their answers.

    Raises:
        Broken: An answer waited for the slow step.
        NotTested: The machine was too busy in each measurement.
    """
    late = 0
    for _ in range(ATTEMPTS):
        async with Stalls() as stalls:
            early = await measure()
            if stalls.longest_s < slow_s / 8 and min(early.values()) > slow_s / 4:
                return
            began = time.monotonic()
            await alone()
            alone_s = time.monotonic() - began
        if stalls.longest_s < slow_s / 8 and alone_s < slow_s / 4:
            late += 1
        if late == MEASUREMENTS:
            what, by = min(early.items(), key=lambda one: one[1])
            raise Broken(f"{what} waited for a step: its answer came {by:.2f} s before the step's")
    raise NotTested("this machine is too busy to tell late answers from its own delays: check again when it does less")
