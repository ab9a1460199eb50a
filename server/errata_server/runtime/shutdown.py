"""`Shutdown`: what a server process does before it closes its connections (PROTOCOL D8)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("errata.server")


class Shutdown:
    """The steps of a graceful stop: `begin`, then `drain`.

    Attributes:
        is_announced: Whether the server that listens calls `begin`; one that does not waits for open answers.
    """

    def __init__(self) -> None:
        self.is_announced = False
        self._callbacks: list[Callable[[], None]] = []
        self._doors: list[Callable[[], Awaitable[None]]] = []

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the process begins to stop."""
        self._callbacks.append(callback)

    def add_door(self, drain: Callable[[], Awaitable[None]]) -> None:
        """Drain a door: ``drain`` sends its clients away and returns when their requests are answered."""
        self._doors.append(drain)

    def begin(self) -> None:
        """Run the callbacks of `on_begin`."""
        for callback in self._callbacks:
            callback()

    async def drain(self, timeout_s: float) -> None:
        """Drain all doors together, and cancel what takes longer than ``timeout_s``."""
        if not self._doors:
            return
        draining = {asyncio.ensure_future(drain()) for drain in self._doors}
        done, late = await asyncio.wait(draining, timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            log.warning(
                "some requests still ran %g s after the server was asked to stop: they did not happen", timeout_s
            )
        for task in done:
            if (error := task.exception()) is not None:
                log.error("a door could not be drained", exc_info=error)
