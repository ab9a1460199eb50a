"""`LoopWriter`: the journal's group commit (`GroupWriter`) driven by the simulated event loop instead of a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from errata_protocol.errors import ErrataError

from ..journal.writer import GroupWriter, Pending, Step, Write, advance


class LoopWriter(GroupWriter):
    """Writes in a task of the loop that commits come from; a write takes virtual time before and after it happens.

    Args:
        write: The store's `Write`.
        write_time_s: Draws how long one takes.
    """

    def __init__(self, write: Write, write_time_s: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(write)
        self._write_time_s = write_time_s
        self._left = self._work()
        self._step: tuple[Step] | None = advance(self._left, None)
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    def _submit(self, pending: Pending) -> None:
        self._append(pending)
        self._woken.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="journal writer")

    def close(self) -> None:
        """Write what waits, at once: there is no thread to wait for."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
        while self._step is not None:
            self._take_step()

    async def _run(self) -> None:
        while self._step is not None:
            (step,) = self._step
            if isinstance(step, list):
                await asyncio.sleep(self._write_time_s())
                self._take_step()
                await asyncio.sleep(self._write_time_s())
                continue
            if step is not None:
                await asyncio.sleep(step)
            elif not self._queue:
                self._woken.clear()
                await self._woken.wait()
            self._take_step()

    def _take_step(self) -> None:
        assert self._step is not None
        (step,) = self._step
        outcome: list[ErrataError | None] | Exception | None = None
        if isinstance(step, list):
            try:
                outcome = self._write(step)
            except Exception as failure:
                outcome = failure
        self._step = advance(self._left, outcome)
