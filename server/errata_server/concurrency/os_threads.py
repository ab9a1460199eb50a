"""`OsThreads`: `Threads` on daemon threads of the operating system, so that a call that hangs cannot block the exit."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from ..clock import Clock
from ..service_threads import ServiceThread
from .calls import Call, ThreadGone
from .threads import AbandonedCalls, Threads

log = logging.getLogger("errata.threads")

FREE_BASE = 1
"""Threads of the free pool that take work at once. More only contend for the interpreter's lock, unless they block, and
then the watch lets others in within `TICK_S`."""

FREE_RUNNING = 40
"""Threads of the free pool whose call is not known to block."""

TICK_S = 0.02
"""How often the free pool is looked at while work waits; a call that runs longer than this may be blocked."""

BUSY_S = 1.0
"""A call that runs longer than this is held for blocked, however busy the process is."""

SATURATED = 0.7
"""CPU seconds of the process per second above which long calls mean contention, not blocking."""

SPARE_LOOKS = 5
"""Looks in a row that find CPU to spare before that alone says that calls block, each too shortly to be seen at it."""

LATE_S = 0.003
"""The same, by how late a sleeping thread gets to run again."""

SWITCH_S = 0.005
"""How long a computing thread keeps the interpreter from the next one."""

FREE_IDLE_S = 10.0
"""After this long without work a thread of the free pool ends."""


class OsThreads(Threads):
    """Daemon threads.

    Args:
        cap: As `Threads`.
        max_written_off: As `Threads`.
        clock: As `Threads`.
    """

    def __init__(self, cap: int = 1024, max_written_off: int = 32, clock: Clock | None = None) -> None:
        super().__init__(cap, max_written_off, clock)
        self._pool = _FreePool(cap, self.abandoned_calls)

    def _start(self, name: str) -> _PinnedThread:
        return _PinnedThread(name, self.abandoned_calls)

    def submit_free(self, *calls: Call) -> None:
        """Run ``calls`` on threads of the pool."""
        self._pool.submit(calls)

    @property
    def free_threads(self) -> int:
        """Threads of the free pool, those written off left out."""
        return self._pool.size

    def trouble(self) -> str | None:
        """Say why this server should be given no more sessions; None when all is well."""
        return super().trouble() or self._pool.trouble

    def close(self) -> None:
        """End the threads that are idle."""
        super().close()
        self._pool.close()


class _Thread(ABC):
    """A daemon thread, and which call it runs."""

    def __init__(self, name: str, abandoned_calls: AbandonedCalls) -> None:
        self.load = 0
        self.gone = False
        self.busy_since: float | None = None
        self._abandoned_calls = abandoned_calls
        self._current: Call | None = None
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = ServiceThread(name, self._run, restarts=False, failed=self._lost)

    def _lost(self, error: BaseException) -> None:
        """The thread ends outside of any call: give it up, so that nobody waits for it.

        Its environments are restored on other threads as after a call that hangs.
        """
        with self._lock:
            current, self._current = self._current, None
            self.gone = True
        if current is not None:
            current.error = current.error or RuntimeError(f"its thread failed: {error!r}")
            current.hand_over()
        self._left_behind()

    def write_off(self, call: Call) -> bool:
        with self._lock:
            if self._current is not call or self.gone:
                return False
            self.gone = True
            self._abandoned_calls.add(self)
        self._left_behind()
        return True

    @abstractmethod
    def submit(self, call: Call) -> None:
        """Put ``call`` down for this thread."""

    def end(self) -> None:
        self._inbox.put(None)

    @abstractmethod
    def _left_behind(self) -> None:
        """Answer what waits for this thread, which was just written off."""

    def _perform(self, call: Call) -> bool:
        """Run ``call``; return False if the thread was written off meanwhile and has to end."""
        if not call.begin(self):
            return True
        with self._lock:
            self._current, self.busy_since = call, self._abandoned_calls.clock.monotonic()
        call.perform()
        with self._lock:
            self._current = self.busy_since = None
            gone = self.gone
        if gone:
            self._abandoned_calls.returned(self)
            return False
        call.hand_over()
        return True

    @abstractmethod
    def _run(self) -> None:
        """Run calls until the end."""


class _PinnedThread(_Thread):
    def submit(self, call: Call) -> None:
        with self._lock:  # or a call could be put down after `write_off` has answered all that waited
            if self.gone:
                raise ThreadGone
            self._inbox.put(call)

    def _left_behind(self) -> None:
        while True:
            try:
                waiting = self._inbox.get_nowait()
            except queue.Empty:
                return
            if waiting is not None:
                waiting.fail(ThreadGone())

    def _run(self) -> None:
        while (call := self._inbox.get()) is not None:
            if not self._perform(call):
                return
            del call  # an idle thread holds no environment alive


class _FreeThread(_Thread):
    def __init__(self, name: str, pool: _FreePool, first: Call) -> None:
        self._pool = pool
        self._first: Call | None = first
        self._seen: tuple[Call | None, float, float] | None = None
        super().__init__(name, pool.abandoned_calls)

    def submit(self, call: Call) -> None:
        self._inbox.put(call)

    def blocked(self, now: float, patience_s: float, *, spare: bool) -> bool:
        """Say whether the call that runs has used no CPU for ``patience_s``, or runs longer than `BUSY_S`.

        With CPU to ``spare`` that it runs for so long is enough. Without, it may only wait for the interpreter.
        """
        since, call = self.busy_since, self._current
        if since is None or now - since < patience_s:
            return False
        if spare or now - since > BUSY_S:
            return True
        cpu = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        if self._seen is None or self._seen[0] is not call or cpu - self._seen[1] > TICK_S / 20:
            self._seen = (call, cpu, now)
            return False
        return now - self._seen[2] >= patience_s

    def _left_behind(self) -> None:
        self._pool.lost(self)

    def _run(self) -> None:
        call, self._first = self._first, None
        while call is not None:
            if not self._perform(call):
                return
            call = None
            call = self._pool.next_for(self) or self._rest()

    def _rest(self) -> Call | None:
        while True:
            try:
                return self._inbox.get(timeout=FREE_IDLE_S)
            except queue.Empty:
                if self._pool.retire(self):
                    return None


class _FreePool:
    """Runs calls on few threads as long as they do not block, and on many when they do.

    A fixed number would be wrong twice: 40 threads that compute contend for the interpreter's lock, and 40 that block
    leave a thousand sessions waiting. So `_limit` threads take work at once. While work waits, a thread of its own
    looks every `TICK_S`: if a thread is blocked and the process has CPU to spare, or no thread took any work since the
    last look, the waiting work is stuck behind blocked calls and not behind computing ones, and the limit is raised,
    `FREE_RUNNING` above the number of blocked threads at most. Calls that block too shortly to be met at it show by CPU
    to spare in `SPARE_LOOKS` looks in a row. One such look, or one without work taken, says nothing: it is so too where
    a computing thread waits for the interpreter or the machine, and then 40 threads would contend for nothing.
    """

    def __init__(self, cap: int, abandoned_calls: AbandonedCalls) -> None:
        self.abandoned_calls = abandoned_calls
        self._cap = cap
        self._base = min(FREE_BASE, cap)
        self._limit = self._base
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._active: set[_FreeThread] = set()
        self._idle: list[_FreeThread] = []  # the last to rest is the first to work: the others end in time
        self._taken = 0
        self._spare_looks = 0
        self._watched = False
        self._watcher: ServiceThread | None = None
        self._needed = threading.Event()

    @property
    def trouble(self) -> str | None:
        watcher = self._watcher
        return watcher.trouble if watcher is not None else None

    @property
    def size(self) -> int:
        return len(self._active) + len(self._idle)

    def submit(self, calls: Sequence[Call]) -> None:
        with self._lock:
            self._waiting.extend(calls)
            # One thread takes one call after the other, as long as the watch does not find that it is held up.
            self._fill(self._limit)
            if self._waiting and not self._needed.is_set():
                self._needed.set()
                if not self._watched:
                    self._start_watch()

    def next_for(self, thread: _FreeThread) -> Call | None:
        """Return what ``thread`` does next; None if it rests now."""
        with self._lock:
            if self._waiting and len(self._active) <= self._limit:
                self._taken += 1
                return self._waiting.popleft()
            self._active.discard(thread)
            self._idle.append(thread)
            return None

    def retire(self, thread: _FreeThread) -> bool:
        """Let an idle thread end; False if it was given work at this moment."""
        with self._lock:
            if thread not in self._idle:
                return False
            self._idle.remove(thread)
            return True

    def lost(self, thread: _FreeThread) -> None:
        """A thread was written off: another may take its place."""
        with self._lock:
            self._active.discard(thread)
            self._fill(len(self._active) + 1)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            for thread in idle:
                thread.end()

    # -- with the lock held -------------------------------------------------------------------------------------------

    def _put_to_work(self, call: Call) -> bool:
        if self._idle:
            thread = self._idle.pop()
            self._active.add(thread)
            thread.submit(call)
        else:
            if len(self._active) + self.abandoned_calls.hanging >= 2 * self._cap:
                return False
            try:
                thread = _FreeThread("errata-free", self, call)
            except RuntimeError:  # the system gives no more threads
                return False
            self._active.add(thread)
        self._taken += 1
        return True

    def _fill(self, size: int) -> None:
        """Have as many as ``size`` threads at work while there is any."""
        while self._waiting and len(self._active) < min(size, self._cap):
            if not self._put_to_work(self._waiting[0]):
                return
            self._waiting.popleft()

    def _start_watch(self) -> None:
        try:
            self._watcher = ServiceThread("errata-free-watch", self._watch)
        except RuntimeError as error:  # the threads that there are do the work; the next call that waits tries again
            self._needed.clear()
            log.warning("calls that block may hold others up: the system gives no more threads (%s)", error)
        else:
            self._watched = True

    # -- the watch ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            if not self._needed.wait(1.0):
                with self._lock:
                    if not self._waiting:
                        self._watched = False
                        return
            taken, cpu, wall = self._taken, time.process_time(), time.monotonic()
            time.sleep(TICK_S)
            took = time.monotonic() - wall
            # A late awakening means contention too, for the interpreter or, with other processes, for the machine.
            spare = time.process_time() - cpu < SATURATED * took and took < TICK_S + LATE_S
            with self._lock:
                if self._waiting:
                    self._look(spare, stalled=self._taken == taken)
                else:
                    self._spare_looks = 0
                    self._needed.clear()

    def _look(self, spare: bool, stalled: bool) -> None:
        now = self.abandoned_calls.clock.monotonic()
        patience_s = TICK_S if spare else min(BUSY_S, max(TICK_S, 2 * SWITCH_S * len(self._active)))
        blocked = sum(1 for thread in self._active if thread.blocked(now, patience_s, spare=spare))
        self._spare_looks = self._spare_looks + 1 if spare else 0
        if (blocked and (spare or stalled)) or self._spare_looks >= SPARE_LOOKS:
            self._fill(min(FREE_RUNNING + blocked, max(FREE_RUNNING, 2 * len(self._active))))
            self._limit = max(self._limit, len(self._active))
        else:
            # Threads beyond it rest when their calls end: what is at work now must not hold it up.
            self._limit = max(self._base + blocked, self._limit * 7 // 8)
            self._fill(self._limit)
