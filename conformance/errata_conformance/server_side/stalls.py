"""`ensure_prompt` checks that other requests are answered while a slow step runs, also on a busy machine."""

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

GIVE_UP_S = 45.0
"""Time after which no further measurement begins where there were `MEASUREMENTS`, in seconds."""

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

    A busy machine makes some answers late; a server that waits makes all of them late. So one measurement with early
    answers is enough. One with late answers counts only if the same requests are answered soon right after it, with no
    slow step running.

    Args:
        slow_s: Duration of the slow step, seconds.
        measure: Starts the slow step, makes the requests, waits for all answers, and returns for each request, by its
            name, by how many seconds its answer came before that of the slow step. Each call begins a new episode.
        alone: Makes the same requests with no slow step running, and waits for their answers.

    Raises:
        Broken: An answer waited for the slow step.
        NotTested: Too many measurements were disturbed, or the requests take too long by themselves.
    """
    late = disturbed = 0
    began = time.monotonic()
    while late + disturbed < ATTEMPTS:
        if late + disturbed >= MEASUREMENTS and time.monotonic() - began > GIVE_UP_S:
            break
        async with Stalls() as stalls:
            early = await measure()
            were_early = min(early.values()) > slow_s / 4
            if were_early and stalls.longest_s < slow_s / 8:
                return
            asked = time.monotonic()
            await alone()
            alone_s = time.monotonic() - asked
        if not were_early and stalls.longest_s < slow_s / 4 and alone_s < slow_s / 4:
            late += 1
        else:
            disturbed += 1
        if late == MEASUREMENTS:
            what, by = min(early.items(), key=lambda one: one[1])
            raise Broken(f"{what} waited for a step: its answer came {by:.2f} s before the step's")
    raise NotTested(
        f"{disturbed} of {late + disturbed} measurements say nothing: in the last one this process was held up for "
        f"{stalls.longest_s:.2f} s, and the requests took {alone_s:.2f} s with no slow step running (both have to stay "
        f"below {slow_s / 4:.2f} s). Check again on a less busy machine, or with an action `slow` that takes longer"
    )
