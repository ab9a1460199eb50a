"""`Threads`: runs environments' blocking calls; chooses the thread of a call, and handles calls past their deadline.

An environment is *pinned* (all its calls on one thread, which sqlite3 connections, sync Playwright and thread-locals
rely on), shares a *single* thread with all of its class (``REQUIRES_SINGLE_THREAD_EXECUTOR``), or is *free*
(``ANY_THREAD = True``: its calls run one after the other on any thread of the pool). Beyond the cap pinned
environments share threads, the least loaded first.

A call past its deadline is abandoned: nothing can stop a thread, so it is written off and counted until it returns.
Environments that shared it are gone with it.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from errata_protocol.errors import CapacityReached

from ..clock import Clock
from .calls import Call, ThreadGone, Worker
from .places import Place

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("errata.threads")

RETRY_AFTER_S = 5.0
"""Seconds after which a client that got no thread is asked to retry."""

STUCK_S = 1.0
"""A thread whose call runs longer than this many seconds gets no further environment while another thread can."""


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """How many threads there are, by use.

    Args:
        pinned: Threads of one environment each, or shared by several beyond the cap.
        free: Threads of the free pool.
        written_off: Abandoned calls that have not returned, including those of async environments.
        written_off_total: All calls abandoned since the start.
    """

    pinned: int
    free: int
    written_off: int
    written_off_total: int


class AbandonedCalls:
    """Counts abandoned calls that have not returned.

    Args:
        clock: Measures how long each has hung.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._hanging: dict[object, float] = {}
        self._lock = threading.Lock()
        self.total = 0

    @property
    def hanging(self) -> int:
        """Number of abandoned calls that have not returned."""
        return len(self._hanging)

    def add(self, what: object) -> None:
        """Count ``what`` (a worker or a task) until it returns."""
        with self._lock:
            self._hanging[what] = self.clock.monotonic()
            self.total += 1

    def returned(self, what: object) -> None:
        """Stop counting ``what``, if it was written off."""
        with self._lock:
            since = self._hanging.pop(what, None)
        if since is not None and (later_s := self.clock.monotonic() - since) > 1.0:
            log.info("a call that was given up has returned, %.1f s later", later_s)


class Threads(ABC):
    """Lends places on threads, for environments and for other blocking calls.

    Args:
        cap: Most pinned threads, and most free ones. Written-off threads are extra, up to ``cap`` more.
        max_written_off: `trouble` reports when more than this many abandoned calls hang.
        clock: Measures how long calls run.
    """

    def __init__(self, cap: int = 1024, max_written_off: int = 32, clock: Clock | None = None) -> None:
        self.cap = cap
        self.abandoned_calls = AbandonedCalls(clock or Clock())
        self._max_written_off = max_written_off
        self._lock = threading.Lock()
        self._pinned: set[Worker] = set()
        self._by_load: list[tuple[int, int, Worker]] = []  # a heap; entries whose load is not the worker's are stale
        self._order = itertools.count()
        self._single: dict[object, Worker] = {}
        self._gathered: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Call]] = weakref.WeakKeyDictionary()
        self._lent_to: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._names = itertools.count(1)

    @abstractmethod
    def _start(self, name: str) -> Worker:
        """Start a thread.

        Raises:
            RuntimeError: The operating system allows no more threads.
        """

    @abstractmethod
    def submit_free(self, *calls: Call) -> None:
        """Run ``calls`` on any threads, in approximate order; a call that hangs does not delay the others for long."""

    def gather_free(self, call: Call) -> None:
        """Submit ``call`` with all others of this event loop iteration: waking a thread is expensive."""
        loop = call.loop
        gathered = self._gathered.get(loop)
        if gathered is None:
            gathered = self._gathered[loop] = []
            loop.call_soon(self._submit_gathered, loop)
        gathered.append(call)

    def _submit_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        self.submit_free(*self._gathered.pop(loop))

    @property
    @abstractmethod
    def free_threads(self) -> int:
        """Number of threads of the free pool."""

    @property
    def executor(self) -> ThreadPoolExecutor:
        """The free pool as an executor. A call whose future is cancelled while it runs is abandoned.

        It is not joined at exit. It can be an event loop's default executor, where OpenEnv environments run steps.
        """
        return _FreeExecutor(self)

    def lend_to_loop(self) -> None:
        """Make `executor` the default of the running loop: asyncio's own would be joined at exit. Idempotent."""
        loop = asyncio.get_running_loop()
        if loop not in self._lent_to:
            self._lent_to.add(loop)
            loop.set_default_executor(self.executor)

    def pinned(self) -> Place:
        """Return a place on a thread of its own, or, beyond the cap, on the least loaded one.

        Raises:
            CapacityReached: No thread is left to share.
        """
        with self._lock:
            worker = self._start_pinned() if self._has_room() else None
            if worker is None:
                worker = self._least_loaded()
            self._take(worker)
        return _PinnedPlace(worker, self._leave)

    def single(self, owner: object) -> Place:
        """Return a place on the one thread of ``owner``; a new thread replaces one that was written off."""
        with self._lock:
            worker = self._single.get(owner)
            if worker is None or worker.gone:
                worker = self._single[owner] = self._start("errata-env-shared")
            worker.load += 1
        return _PinnedPlace(worker, _leave_single)

    def free(self) -> Place:
        """Return a place on the free pool."""
        return _FreePlace(self)

    @property
    def counts(self) -> ThreadCounts:
        """Current number of threads, by use."""
        with self._lock:
            tied = sum(1 for worker in (*self._pinned, *self._single.values()) if not worker.gone)
        return ThreadCounts(tied, self.free_threads, self.abandoned_calls.hanging, self.abandoned_calls.total)

    def trouble(self) -> str | None:
        """Return why this server should get no more sessions; None if it can take more."""
        hanging = self.abandoned_calls.hanging
        if hanging <= self._max_written_off:
            return None
        return (
            f"{hanging} calls of environments hang and were given up, more than {self._max_written_off}: "
            "see the log for which, and restart the server"
        )

    def close(self) -> None:
        """End the idle threads without waiting for calls that hang. Idempotent."""
        with self._lock:
            for worker in (*self._pinned, *self._single.values()):
                worker.end()
            self._pinned.clear()
            self._single.clear()
            self._by_load.clear()

    # -- pinned threads, with the lock held ---------------------------------------------------------------------------

    def _has_room(self) -> bool:
        if len(self._pinned) >= self.cap or len(self._pinned) + self.abandoned_calls.hanging >= 2 * self.cap:
            self._pinned = {worker for worker in self._pinned if not worker.gone}  # `abandoned_calls` counts those
        return len(self._pinned) < self.cap and len(self._pinned) + self.abandoned_calls.hanging < 2 * self.cap

    def _start_pinned(self) -> Worker | None:
        try:
            worker = self._start(f"errata-env-{next(self._names)}")
        except RuntimeError as error:
            log.warning("environments share %d threads: the system gives no more (%s)", len(self._pinned), error)
            return None
        self._pinned.add(worker)
        return worker

    def _least_loaded(self) -> Worker:
        passed_over: list[tuple[int, int, Worker]] = []
        found: Worker | None = None
        now = self.abandoned_calls.clock.monotonic()
        while self._by_load and found is None:
            entry = heapq.heappop(self._by_load)
            load, _, worker = entry
            if worker.gone or load != worker.load or worker not in self._pinned:
                continue
            since = worker.busy_since
            if since is not None and now - since > STUCK_S:
                passed_over.append(entry)
            else:
                found = worker
        for entry in passed_over:
            heapq.heappush(self._by_load, entry)
        if found is None and passed_over:
            found = passed_over[0][2]
        if found is None:
            hanging = self.abandoned_calls.hanging
            raise CapacityReached(
                f"no thread is left for an environment: {hanging} calls hang; restart the server",
                hanging=hanging,
                retry_after=RETRY_AFTER_S,
            )
        return found

    def _take(self, worker: Worker) -> None:
        worker.load += 1
        heapq.heappush(self._by_load, (worker.load, next(self._order), worker))

    def _leave(self, worker: Worker) -> None:
        with self._lock:
            worker.load -= 1
            if worker.gone or worker.load == 0:
                self._pinned.discard(worker)
                worker.end()
            else:
                heapq.heappush(self._by_load, (worker.load, next(self._order), worker))
            if len(self._by_load) > 64 + 4 * len(self._pinned):
                self._by_load = [e for e in self._by_load if e[0] == e[2].load and e[2] in self._pinned]
                heapq.heapify(self._by_load)


def _leave_single(worker: Worker) -> None:
    worker.load -= 1  # its thread stays: the class relies on there being one


class _PinnedPlace(Place):
    def __init__(self, worker: Worker, leave: Callable[[Worker], None]) -> None:
        self._worker = worker
        self._leave: Callable[[Worker], None] | None = leave
        self._last: Call | None = None

    @property
    def gone(self) -> bool:  # type: ignore[override]
        return self._worker.gone

    def start(self, call: Call) -> None:
        self._worker.submit(call)
        self._last = call

    def ended(self) -> None:
        self._last = None  # an idle place must not keep a result alive

    def abandoned(self) -> None:
        pass  # `gone` asks the worker, which was written off

    def give_up(self) -> None:
        if self._last is not None:
            self._last.give_up()

    def release(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave(self._worker)


class _FreePlace(Place):
    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.gone = False
        self._last: Call | None = None

    def start(self, call: Call) -> None:
        if self.gone:
            raise ThreadGone
        self._last = call
        self._threads.gather_free(call)

    def ended(self) -> None:
        self._last = None

    def abandoned(self) -> None:
        self.gone = True

    def give_up(self) -> None:
        if self._last is not None and self._last.give_up():
            self.gone = True

    def release(self) -> None:
        pass


class _FreeExecutor(ThreadPoolExecutor):
    """An executor on the free pool. A ThreadPoolExecutor only because asyncio accepts no other default executor."""

    def __init__(self, threads: Threads) -> None:
        self._free = threads

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        call = _FutureCall(functools.partial(fn, **kwargs) if kwargs else fn, args, future)
        future.add_done_callback(call.settled)
        self._free.submit_free(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing to do: the pool belongs to the server."""


class _FutureCall(Call):
    """A call that sets a `concurrent.futures.Future`."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], future: Future[Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._unclaimed = [True]
        self._future: Future[Any] | None = future
        self.result = None
        self.error = None
        self.worker = None

    def hand_over(self) -> None:
        self.resolve()  # a concurrent future can be set from any thread

    def resolve(self) -> None:
        future = self._future
        if future is None or not future.set_running_or_notify_cancel():
            return
        if self.error is None:
            future.set_result(self.result)
        else:
            future.set_exception(self.error)

    def settled(self, future: Future[Any]) -> None:
        """Called when the future is done: abandon a cancelled call, and break the reference cycle with the future.

        A future keeps its callbacks: the cycle would hold the call's arguments and context until a garbage collection.
        """
        self._future = None
        if future.cancelled():
            self.give_up()
