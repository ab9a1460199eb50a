"""`FleetLoop`: the event loops of several simulated machines, and of their clients, in one virtual time.

    beside = FleetLoop(chance)
    machine = SimulatedMachine(seed, beside=beside)
    run(clients(machine), loop=beside)     # where ``machine.start(program)`` boots the machine, and ``crash`` ends it

Each machine has an event loop of its own, so that a crash ends its tasks and timers and nothing else. All loops run in
one thread: a step is one callback of one of them.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

from .loop import Crashed, SimulatedLoop, SimulationError, VirtualTime, abandon_tasks, waiting

T = TypeVar("T")


class Ended(Protocol):
    """Called when a program that runs beside others has ended."""

    def __call__(self, *, crashed: bool) -> None:
        """Take the end.

        Args:
            crashed: The machine crashed under the program.
        """


class _Program(NamedTuple):
    """A program on its loop; ``done`` belongs to the `FleetLoop`."""

    task: asyncio.Task[Any]
    ended: Ended
    done: asyncio.Future[Any]


class FleetLoop(SimulatedLoop):
    """The event loop of the clients of a simulated fleet, which runs the loops of its machines as well.

    Args:
        chance: Random numbers for the order of the loops that have work, and as for `SimulatedLoop`.
        max_steps: `SimulationError` is raised after so many callbacks of all loops together.

    Attributes:
        virtual_time: The time of all these loops.
        trace: The lines of all machines.
    """

    def __init__(self, chance: random.Random, *, max_steps: int = 10_000_000) -> None:
        self.virtual_time = VirtualTime()
        super().__init__(chance, beside=self.virtual_time, max_steps=max_steps)
        self.fail_fast = True
        self.trace: list[str] = []
        self._next_of = chance.choice
        self._programs: dict[SimulatedLoop, _Program] = {}
        self._all_steps = 0
        self._all_max_steps = max_steps

    def run_beside(
        self, loop: SimulatedLoop, program: Coroutine[Any, Any, T], ended: Ended
    ) -> asyncio.Future[T | None]:
        """Run a program on a loop of its own until it returns or its machine crashes.

        Args:
            loop: The loop, which has `virtual_time` and is closed at the end.
            program: The program.
            ended: Called at the end, before the future is done.

        Returns:
            A future of this loop with the program's result; None after a crash. What the program raises is raised here.
        """
        done: asyncio.Future[T | None] = self.create_future()
        self._programs[loop] = _Program(loop.create_task(program), ended, done)
        return done

    def close(self) -> None:
        """Close this loop, and end what runs beside it."""
        for loop in self._programs:
            abandon_tasks(loop)
            loop.close()
        self._programs.clear()
        super().close()

    def _run_once(self) -> None:
        if self._stopping:
            super()._run_once()
            return
        if self._all_steps >= self._all_max_steps:
            raise SimulationError(f"the simulated fleet did not end within {self._all_max_steps} steps")
        loops = [self, *self._programs]
        ready = [loop for loop in loops if loop.has_work()]
        if not ready:
            next_s = min(loop.next_timer_s() for loop in loops)
            if next_s == math.inf:
                raise SimulationError(f"the simulated fleet is deadlocked: {waiting(self)}")
            self.virtual_time.now_s = max(self.virtual_time.now_s, next_s)
            return
        self._all_steps += 1
        loop = ready[0] if len(ready) == 1 else self._next_of(ready)
        if loop is self:
            super()._run_once()
        else:
            self._run_other(loop)

    def _run_other(self, loop: SimulatedLoop) -> None:
        """Run one callback of a machine's loop, or its end."""
        task = self._programs[loop].task
        asyncio._set_running_loop(loop)
        try:
            loop._run_once()
        except Crashed:
            self._end(loop, crashed=True)
        else:
            if task.done():
                self._end(loop, crashed=False)
        finally:
            asyncio._set_running_loop(self)

    def _end(self, loop: SimulatedLoop, *, crashed: bool) -> None:
        """End what a program leaves on its loop, as the end of its process does."""
        program = self._programs.pop(loop)
        result = None if crashed else program.task.result()
        asyncio._set_running_loop(None)
        abandon_tasks(loop)
        loop.close()
        asyncio._set_running_loop(self)
        program.ended(crashed=crashed)
        if not program.done.cancelled():
            program.done.set_result(result)
