"""`LoopWriter`: the journal's group commit (`GroupWriter`) driven by the simulated event loop instead of a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from errata_protocol.errors import ErrataError

from ..journal.writer import GroupWriter, Pending, Step, Write, advance, closed


class LoopWriter(GroupWriter):
    """Writes in a task of the event loop. A write takes virtual time before and after it happens.

    Args:
        write: Writes a group of commits; see `GroupWriter`.
        write_time_s: Returns the virtual time that passes before a write, and again the time after it, in seconds.
    """

    def __init__(self, write: Write, write_time_s: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(write)
        self._write_time_s = write_time_s
        self._left = self._work()
        self._step: tuple[Step] | None = advance(self._left, None)
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    def _submit(self, pending: Pending) -> None:
        if self._closing:
            raise closed()
        self._queue.append(pending)
        self._woken.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="journal writer")

    def close(self) -> None:
        """Write all queued commits at once, without virtual time."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
        while self._step is not None:
            self._take_step()

    async def _run(self) -> None:
        """Carry out the steps of the group commit in virtual time."""
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
        """Carry out the pending step of the group commit, and get the next one."""
        assert self._step is not None
        (step,) = self._step
        outcome: list[ErrataError | None] | Exception | None = None
        if isinstance(step, list):
            try:
                outcome = self._write(step)
            except Exception as failure:
                outcome = failure
        self._step = advance(self._left, outcome)
