"""`OsThreads`: `Threads` on daemon threads of the operating system, so that a call that hangs cannot block the exit;
and the shared pool, which grows while calls block."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from errata_os.service_threads import ServiceThread

from ..clock import Clock
from .calls import Call, ThreadGone
from .threads import AbandonedCalls, Threads

log = logging.getLogger("errata.threads")

FREE_BASE = 1
"""Initial limit of the free pool's active threads. More would only contend for the interpreter's lock, unless calls
block, and then the watch thread raises the limit within `TICK_S`."""

FREE_RUNNING = 40
"""Most active threads of the free pool, beyond those whose call is known to block."""

TICK_S = 0.02
"""Interval at which the free pool is checked while work waits; a call that runs longer than this may be blocked."""

BUSY_S = 1.0
"""A call that runs longer than this is considered blocked, however busy the process is."""

SATURATED = 0.7
"""CPU seconds of the process per second above which long calls mean contention, not blocking."""

SPARE_LOOKS = 5
"""Consecutive checks with spare CPU after which calls count as blocking, though each blocks too briefly to be seen."""

LATE_S = 0.003
"""A sleeping thread that wakes later than this means contention."""

SWITCH_S = 0.005
"""How long a computing thread holds the interpreter's lock before it must yield (CPython's switch interval)."""

FREE_IDLE_S = 10.0
"""A thread of the free pool ends after this long without work."""


class OsThreads(Threads):
    """Runs environments' calls on daemon threads.

    Args:
        cap: See `Threads`.
        max_written_off: See `Threads`.
        clock: See `Threads`.
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
        """Number of threads of the free pool, without those written off."""
        return self._pool.size

    def trouble(self) -> str | None:
        """Return why this server should get no more sessions; None if it can take more."""
        return super().trouble() or self._pool.trouble

    def close(self) -> None:
        """End the threads that are idle."""
        super().close()
        self._pool.close()


class _Thread(ABC):
    """A daemon thread and the call that it runs."""

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
        """Called when the thread failed outside of a call: mark it as gone, so that no caller waits for it.

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
        """Queue ``call`` for this thread."""

    def end(self) -> None:
        self._inbox.put(None)

    @abstractmethod
    def _left_behind(self) -> None:
        """Called when this thread was written off: fail or reassign the work queued for it."""

    def _perform(self, call: Call) -> bool:
        """Run ``call``; return False if the thread was written off during it and must end."""
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
        """Run calls until the thread is asked to end or is written off."""


class _PinnedThread(_Thread):
    def submit(self, call: Call) -> None:
        with self._lock:  # or a call could be queued after `write_off` has failed all queued calls
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
        """Return whether the running call is blocked rather than computing.

        It is, if it has used no CPU for ``patience_s`` or runs longer than `BUSY_S`. If the process has ``spare`` CPU,
        running for ``patience_s`` is enough; otherwise the call may only be waiting for the interpreter's lock.
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

    No fixed number of threads fits: 40 threads that compute contend for the interpreter's lock, and 40 that block leave
    a thousand sessions waiting. So at most `_limit` threads take work at once. While work waits, a watch thread checks
    the pool every `TICK_S`. If a thread is blocked, and the process has spare CPU or no thread took work since the last
    check, the waiting work is held up by blocked calls and not by computing ones. Then the limit is raised, to at most
    `FREE_RUNNING` above the number of blocked threads. Calls that block too briefly to be observed show as spare CPU in
    `SPARE_LOOKS` consecutive checks. A single check with spare CPU, or without work taken, is no evidence: it also
    occurs while a computing thread waits for the interpreter's lock or for the machine.
    """

    def __init__(self, cap: int, abandoned_calls: AbandonedCalls) -> None:
        self.abandoned_calls = abandoned_calls
        self._cap = cap
        self._base = min(FREE_BASE, cap)
        self._limit = self._base
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._active: set[_FreeThread] = set()
        self._idle: list[_FreeThread] = []  # used last in, first out, so that the others reach `FREE_IDLE_S`
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
            # Active threads take the waiting calls one by one; the watch adds threads only if these are held up.
            self._fill(self._limit)
            if self._waiting and not self._needed.is_set():
                self._needed.set()
                if not self._watched:
                    self._start_watch()

    def next_for(self, thread: _FreeThread) -> Call | None:
        """Return the next call for ``thread``; None if it becomes idle."""
        with self._lock:
            if self._waiting and len(self._active) <= self._limit:
                self._taken += 1
                return self._waiting.popleft()
            self._active.discard(thread)
            self._idle.append(thread)
            return None

    def retire(self, thread: _FreeThread) -> bool:
        """Remove an idle thread that is about to end; return False if it was given work meanwhile."""
        with self._lock:
            if thread not in self._idle:
                return False
            self._idle.remove(thread)
            return True

    def lost(self, thread: _FreeThread) -> None:
        """Called when a thread was written off: let another one take its place."""
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
        """Start or wake threads until ``size`` are active or no call waits."""
        while self._waiting and len(self._active) < min(size, self._cap):
            if not self._put_to_work(self._waiting[0]):
                return
            self._waiting.popleft()

    def _start_watch(self) -> None:
        try:
            self._watcher = ServiceThread("errata-free-watch", self._watch)
        except RuntimeError as error:  # the existing threads go on; the next waiting call tries again
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
            # Threads beyond the limit become idle when their calls end; until then they do not keep it up.
            self._limit = max(self._base + blocked, self._limit * 7 // 8)
            self._fill(self._limit)
