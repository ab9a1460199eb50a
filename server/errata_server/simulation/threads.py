"""`SimulatedThreads`: runs blocking calls on the event loop, in order; a test can let one hang for ever."""

from __future__ import annotations

import asyncio
from collections import deque

from errata_server.concurrency.calls import Call, ThreadGone
from errata_server.concurrency.threads import AbandonedCalls, Threads

from .clock import SimulatedClock


class SimulatedThreads(Threads):
    """Runs every call on the event loop that waits for it, in the same order each time.

    The assignment of environments to threads, deadlines, write-offs and `trouble` are those of `Threads`.

    Args:
        cap: See `Threads`.
        max_written_off: See `Threads`.

    Attributes:
        started: Names of the threads started so far.
    """

    def __init__(self, cap: int = 1024, max_written_off: int = 32) -> None:
        super().__init__(cap, max_written_off, SimulatedClock())
        self.started: list[str] = []
        self._passing = 0
        self._hanging = 0
        self._stuck: list[SimulatedThread] = []

    def hang_next(self, calls: int = 1, *, after: int = 0) -> None:
        """Let ``calls`` calls hang until `release`, after the next ``after`` calls have run."""
        self._passing, self._hanging = after, calls

    def release(self) -> None:
        """Let the hanging calls return: those that were written off end their threads, the others run now."""
        stuck, self._stuck = self._stuck, []
        for thread in stuck:
            thread.release()

    @property
    def free_threads(self) -> int:
        """Number of calls of the free pool that hang and were not written off."""
        return sum(1 for thread in self._stuck if thread.name == "free" and not thread.gone)

    def submit_free(self, *calls: Call) -> None:
        """Run each call on a thread of its own."""
        for call in calls:
            SimulatedThread(self, "free", self.abandoned_calls).submit(call)

    def _start(self, name: str) -> SimulatedThread:
        self.started.append(name)
        return SimulatedThread(self, name, self.abandoned_calls)

    def hangs(self, thread: SimulatedThread) -> bool:
        """Return whether the call that ``thread`` begins now hangs, and count it."""
        if self._passing:
            self._passing -= 1
            return False
        if not self._hanging:
            return False
        self._hanging -= 1
        self._stuck.append(thread)
        return True


class SimulatedThread:
    """A simulated thread, which runs one call at a time on the event loop.

    Args:
        threads: The threads that it belongs to.
        name: Its name.
        abandoned_calls: Where a written-off call is counted.
    """

    def __init__(self, threads: SimulatedThreads, name: str, abandoned_calls: AbandonedCalls) -> None:
        self.name = name
        self.load = 0
        self.gone = False
        self.busy_since: float | None = None
        self._threads = threads
        self._abandoned_calls = abandoned_calls
        self._waiting: deque[Call] = deque()
        self._stuck: Call | None = None
        self._scheduled = False

    def submit(self, call: Call) -> None:
        """Run ``call`` after all before it."""
        if self.gone:
            raise ThreadGone
        self._waiting.append(call)
        self._schedule()

    def write_off(self, call: Call) -> bool:
        """Write this thread off with the call that hangs, and fail its queued calls with `ThreadGone`.

        Returns:
            False, with nothing done, if the call does not hang in this thread.
        """
        if self._stuck is not call or self.gone:
            return False
        self.gone = True
        self._abandoned_calls.add(self)
        while self._waiting:
            self._waiting.popleft().fail(ThreadGone())
        return True

    def end(self) -> None:
        """Do nothing: there is no real thread."""

    def release(self) -> None:
        """Let the hanging call return."""
        call, self._stuck, self.busy_since = self._stuck, None, None
        if self.gone:
            self._abandoned_calls.returned(self)
        elif call is not None:
            call.perform()
            call.hand_over()
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and self._stuck is None and self._waiting:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Run the next queued call, or let it hang."""
        self._scheduled = False
        call = self._waiting.popleft()
        if call.begin(self):
            if self._threads.hangs(self):
                self._stuck, self.busy_since = call, float("-inf")  # however short the wait: others avoid this thread
                return
            call.perform()
            call.hand_over()
        self._schedule()
