"""`SimulatedMachine`: boots a server, crashes it at a step or a write, and boots it again on what the disk kept.

    machine = SimulatedMachine(seed=7)
    machine.boot(program, crash_at_step=500)     # the server goes down before its 500th step, or at a write
    machine.boot(program)                        # and is started again on what the disk kept

``program`` is a coroutine function that gets the machine; `SimulatedMachine.runtime` gives it a server's seams.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from ..journal import IndexedJournal, LogJournal
from ..journal.segments import SEGMENT_BYTES
from ..runtime.runtime import Runtime
from ..sandbox.fake.backend import FakeBackend, FakeDisk
from ..settings import Settings
from .clock import SimulatedClock
from .disk import DiskFaults, SimulatedDisk
from .ids import SeededIds
from .index_files import IndexFiles
from .loop import Crashed, SimulatedLoop, run
from .threads import SimulatedThreads
from .writer import LoopWriter

T = TypeVar("T")


class SimulatedMachine:
    """All that one seed decides.

    Args:
        seed: The same seed, program and faults give the same trace.
        faults: What its disk does wrong.
        power_loss: A crash loses what was not synced; False is ``kill -9``, which does not.
        max_steps: As `SimulatedLoop`, for each boot.
        index: An empty directory for the index of an `IndexedJournal`; None has a `LogJournal`, which needs none.
        batch_rows: As `IndexedJournal`.
        segment_bytes: As each of both.

    Attributes:
        disk: The disk of the current boot.
        index: The index's files, None without.
        layers: Sandbox layers; they survive every crash.
        trace: What was noted, each line with its time.
        boots: How often it was started.
        steps: Callbacks run over all boots.
        on_crash: Each is called in the moment of a crash: what it takes away no step of the dead server can reach.
    """

    def __init__(
        self,
        seed: int,
        *,
        faults: DiskFaults | None = None,
        power_loss: bool = True,
        max_steps: int = 10_000_000,
        index: Path | None = None,
        batch_rows: int = 50,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.seed = seed
        self._max_steps = max_steps
        self.layers = FakeDisk()
        self.trace: list[str] = []
        self.boots = 0
        self.steps = 0
        self.on_crash: list[Callable[[], None]] = []
        self._power_loss = power_loss
        self.index = IndexFiles(index, self.chance("index")) if index is not None else None
        self._batch_rows = batch_rows
        self._segment_bytes = segment_bytes
        self._journal: IndexedJournal | None = None
        self._now_s = 0.0
        self._order = self.chance("order")
        self._ids = SeededIds(self.chance("ids"))
        self._loop: SimulatedLoop | None = None
        self.disk = SimulatedDisk(self.chance("disk"), faults, on_crash=self._stop_now)

    def chance(self, name: str) -> random.Random:
        """Return a generator of its own for ``name``: drawing from it changes nothing else."""
        return random.Random(f"{self.seed}/{name}")  # of a text, because hash() of one differs between processes

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self.boots} {self._now():.6f} {text}")

    def boot(
        self, program: Callable[[SimulatedMachine], Coroutine[Any, Any, T]], *, crash_at_step: int | None = None
    ) -> T | None:
        """Run ``program`` until it returns or the machine goes down.

        Args:
            program: What to run.
            crash_at_step: Callback of this boot before which the machine goes down.

        Returns:
            What the program returned, None after a crash.
        """
        self.boots += 1
        self._loop = loop = SimulatedLoop(
            self._order, start_s=self._now_s, max_steps=self._max_steps, on_crash=self._go_down
        )
        loop.crash_at = crash_at_step
        loop.fail_fast = True
        try:
            return run(program(self), loop=loop)
        except Crashed:
            self.disk = self._next_disk()
            if self._journal is not None:
                self._journal._release()  # of files that no later boot sees
                self._journal = None
            return None
        finally:
            if self._loop is not None:
                self._now_s = loop.time()
                self._loop = None
            self.steps += loop.steps

    def journal(self) -> LogJournal | IndexedJournal:
        """Open this boot's disk as a journal."""
        writer = functools.partial(LoopWriter, write_time_s=self.disk.sync_time_s)
        salt, segment_bytes = self._ids.salt, self._segment_bytes
        if self.index is None:
            return LogJournal(self.disk, writer=writer, salt=salt, segment_bytes=segment_bytes)
        self._journal = IndexedJournal(
            self.index.current,
            disk=self.disk,
            writer=writer,
            salt=salt,
            segment_bytes=segment_bytes,
            batch_rows=self._batch_rows,
            background=False,
        )
        return self._journal

    def runtime(self, settings: Settings | None = None) -> Runtime:
        """Return a runtime on this boot's disk, with simulated seams only."""
        return Runtime(
            settings or Settings(),
            journal=self.journal(),
            disk=self.disk,
            sandboxes=FakeBackend(self.layers),
            ids=self._ids,
            clock=SimulatedClock(self._now),
            threads=SimulatedThreads(),
        )

    def _now(self) -> float:
        return self._loop.time() if self._loop is not None else self._now_s

    def _stop_now(self) -> None:
        """The disk went down in the middle of a step: let there be no next one."""
        if self._loop is not None:
            self._loop.crash_at = self._loop.steps
            self._go_down()

    def _go_down(self) -> None:
        if self._loop is None:
            return  # already, in a call of the disk
        self.note(f"crash at step {self._loop.steps}")
        self.disk.switch_off()
        if self.index is not None:
            self.index.crash(power_loss=self._power_loss)
        for take_away in self.on_crash:
            take_away()
        self._now_s = self._loop.time()
        self._loop = None

    def _next_disk(self) -> SimulatedDisk:
        if self._power_loss:
            return self.disk.power_loss(on_crash=self._stop_now)
        return self.disk.process_death(on_crash=self._stop_now)
