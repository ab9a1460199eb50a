"""`SimulatedMachine`: boots a server, crashes it at a step or a write, and boots it again with what the disk kept.

    machine = SimulatedMachine(seed=7)
    machine.boot(program, crash_at_step=500)     # the server crashes before its 500th step
    machine.boot(program)                        # and is started again with what the disk kept

``program`` is a coroutine function whose argument is the machine; `SimulatedMachine.runtime` makes a server's runtime.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from ..journal import IndexedJournal, LogJournal
from ..journal.segments import SEGMENT_BYTES
from ..recovery import repeats_requests
from ..runtime.runtime import Runtime
from ..sandbox.fake.backend import FakeBackend, FakeDisk
from ..settings import Settings
from .clock import SimulatedClock
from .disk import DiskFaults, SimulatedDisk
from .fleet_loop import FleetLoop
from .ids import SeededIds
from .index_files import IndexFiles
from .loop import Crashed, SimulatedLoop, run
from .threads import SimulatedThreads
from .writer import LoopWriter

T = TypeVar("T")


class SimulatedMachine:
    """A simulated machine: everything random about it is drawn from one seed.

    Args:
        seed: The same seed, program and faults give the same trace.
        faults: Faults of the disk.
        power_loss: A crash loses writes that were not synced; if False it is a ``kill -9``, which loses none.
        max_steps: Step limit of each boot; see `SimulatedLoop`.
        index: An empty directory for the index of an `IndexedJournal`; None for a `LogJournal`, which has none.
        batch_rows: See `IndexedJournal`.
        segment_bytes: See `IndexedJournal` and `LogJournal`.
        shard: Name of its data directory; None where it has none.
        beside: The loop that runs it beside other machines, by `start`; None for a machine that `boot` runs alone.

    Attributes:
        disk: The disk of the current boot.
        index: The index's files; None without an index.
        layers: Sandbox layers, which survive every crash.
        trace: The lines that `note` added.
        boots: Number of boots.
        steps: Number of callbacks run in all boots.
        on_crash: Functions that are called at a crash, to disconnect what the crashed server must not reach any more.
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
        shard: str | None = None,
        beside: FleetLoop | None = None,
    ) -> None:
        self.seed = seed
        self._max_steps = max_steps
        self.layers = FakeDisk()
        self.shard = shard
        self._beside = beside
        self.trace: list[str] = [] if beside is None else beside.trace
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
        self._ids = SeededIds(self.chance("ids"), shard)
        self._loop: SimulatedLoop | None = None
        self.disk = SimulatedDisk(self.chance("disk"), faults, on_crash=self._stop_now)

    def chance(self, name: str) -> random.Random:
        """Return a random number generator for ``name``, independent of all others of this seed."""
        return random.Random(f"{self.seed}/{name}")  # seeded with a string, whose hash() would differ between processes

    def note(self, text: str) -> None:
        """Add a line to the trace, with the number of the boot and the virtual time."""
        where = f"{self.shard} {self.boots}" if self.shard is not None else f"{self.boots}"
        self.trace.append(f"{where} {self._now():.6f} {text}")

    def boot(
        self, program: Callable[[SimulatedMachine], Coroutine[Any, Any, T]], *, crash_at_step: int | None = None
    ) -> T | None:
        """Run ``program`` until it returns or the machine crashes.

        Args:
            program: The program.
            crash_at_step: Step of this boot before which the machine crashes; None for no crash at a step.

        Returns:
            The program's result; None after a crash.
        """
        loop = self._begin(crash_at_step)
        try:
            return run(program(self), loop=loop)
        except Crashed:
            self._replace_disk()
            return None
        finally:
            self._finish(loop)

    def start(
        self, program: Callable[[SimulatedMachine], Coroutine[Any, Any, T]], *, crash_at_step: int | None = None
    ) -> asyncio.Future[T | None]:
        """Run ``program`` beside those of other machines, on the loop that was given as ``beside``.

        Args:
            program: See `boot`.
            crash_at_step: See `boot`.

        Returns:
            A future of that loop, with what `boot` returns.
        """
        assert self._beside is not None, "boot runs a machine that is alone"
        loop = self._begin(crash_at_step)

        def ended(*, crashed: bool) -> None:
            if crashed:
                self._replace_disk()
            self._finish(loop)

        return self._beside.run_beside(loop, program(self), ended)

    def crash(self, after_steps: int | None = 0) -> None:
        """Crash the machine; do nothing if no program runs on it.

        Args:
            after_steps: Number of steps that run before; None to take an earlier call, or ``crash_at_step``, back.
        """
        if self._loop is not None:
            self._loop.crash_at = self._loop.steps + after_steps if after_steps is not None else None

    def _begin(self, crash_at_step: int | None) -> SimulatedLoop:
        self.boots += 1
        self._loop = loop = SimulatedLoop(
            self._order,
            start_s=self._now_s,
            beside=self._beside.virtual_time if self._beside is not None else None,
            max_steps=self._max_steps,
            on_crash=self._go_down,
        )
        loop.crash_at = crash_at_step
        loop.fail_fast = True
        return loop

    def _replace_disk(self) -> None:
        """Put what a crash left of the disk into the place of the disk."""
        self.disk = self._next_disk()
        if self._journal is not None:
            self._journal._release()  # closes files that no later boot uses
            self._journal = None

    def _finish(self, loop: SimulatedLoop) -> None:
        if self._loop is not None:
            self._now_s = loop.time()
            self._loop = None
        self.steps += loop.steps

    def journal(self) -> LogJournal | IndexedJournal:
        """Open the journal on this boot's disk."""
        writer = functools.partial(LoopWriter, write_time_s=self.disk.sync_time_s)
        salt, segment_bytes = self._ids.salt, self._segment_bytes
        if self.index is None:
            return LogJournal(
                self.disk, writer=writer, salt=salt, segment_bytes=segment_bytes, repeats_requests=repeats_requests
            )
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
        """Return a runtime on this boot's disk that uses simulated interfaces only."""
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
        if self._beside is not None:
            return self._beside.time()
        return self._loop.time() if self._loop is not None else self._now_s

    def _stop_now(self) -> None:
        """Crash the machine because its disk did, during a step: no further step runs."""
        if self._loop is not None:
            self._loop.crash_at = self._loop.steps
            self._go_down()

    def _go_down(self) -> None:
        """Switch the disk off and disconnect what the crashed server must not reach; once per boot."""
        if self._loop is None:
            return  # the disk has crashed it already
        self.note(f"crash at step {self._loop.steps}")
        self.disk.switch_off()
        if self.index is not None:
            self.index.crash(power_loss=self._power_loss)
        for disconnect in self.on_crash:
            disconnect()
        self._now_s = self._loop.time()
        self._loop = None

    def _next_disk(self) -> SimulatedDisk:
        if self._power_loss:
            return self.disk.power_loss(on_crash=self._stop_now)
        return self.disk.process_death(on_crash=self._stop_now)
