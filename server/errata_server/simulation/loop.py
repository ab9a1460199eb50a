"""An event loop in virtual time: one thread, no real wait, the same order for the same seed.

`SimulatedLoop` runs one callback per step. When none is ready it advances its clock to the next timer, so waiting for a
session's TTL of ten minutes takes no time. asyncio.sleep, asyncio.timeout and call_later work on it, and so does the
server, unchanged.

Sockets, child processes and signals are not implemented, and a call from another thread raises an error. A function
that is passed to an executor runs on the loop's thread, as a step of its own.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import math
import random
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

REORDER_CHANCE = 0.25
"""On a loop with a seed, the probability that a task woken by a future is moved to the end of the ready queue."""

MAX_UNWINDING = 100
"""Rounds of cancellation in which all tasks have to end at the end of a run."""


class SimulationError(Exception):
    """The simulated program deadlocked, did not end within the step limit, or used what a simulation does not have."""


class Crashed(BaseException):
    """The simulated machine crashed at this step. Not an `Exception`, so that the program does not handle it."""


class VirtualTime:
    """The time of one simulated event loop, or of several that run beside each other.

    Args:
        now_s: The time at the start.

    Attributes:
        now_s: The time now.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time.

    Args:
        chance: Random numbers that vary the order in which woken tasks run. None keeps asyncio's order: first woken,
            first run. Callbacks and first steps of tasks always keep it, because asyncio guarantees it.
        start_s: The time at the start.
        beside: The time that the loop shares with others, which a `FleetLoop` advances; None for a time of its own.
        max_steps: `SimulationError` is raised after so many steps.
        on_crash: Called before `Crashed` is raised, to disconnect what the crashed program must not reach any more.

    Attributes:
        steps: Number of callbacks run so far.
        crash_at: Step before which `Crashed` is raised; None for no crash. May be set while the loop runs.
        errors: Exceptions of callbacks, and of tasks that were never awaited.
        fail_fast: Raise the first of these errors at once instead of all at the end.
        work_time_s: Returns how long a function passed to an executor waits for its thread, and again how long its
            result takes to reach the loop; None for no delay.
    """

    # CPython's BaseEventLoop keeps its queues under these names from 3.4 on; mypy's stubs leave them out.
    _ready: Any
    _scheduled: list[Any]
    _stopping: bool

    def __init__(
        self,
        chance: random.Random | None = None,
        *,
        start_s: float = 0.0,
        beside: VirtualTime | None = None,
        max_steps: int = 10_000_000,
        on_crash: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_crash = on_crash
        self._chance = chance
        self._virtual = beside or VirtualTime(start_s)
        self._is_alone = beside is None
        self._max_steps = max_steps
        self._owner = threading.get_ident()
        self.steps = 0
        self.crash_at: int | None = None
        self.errors: list[BaseException] = []
        self.fail_fast = False
        self.work_time_s: Callable[[], float] | None = None
        self._made: weakref.WeakKeyDictionary[asyncio.Task[Any], None] = weakref.WeakKeyDictionary()
        self.set_exception_handler(_keep_error)
        self.set_debug(False)

    def time(self) -> float:
        return self._virtual.now_s

    def pause(self, seconds: float) -> None:
        """Let time pass in which nothing runs, as where a machine is stopped or a callback takes long."""
        self._virtual.now_s += seconds

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        self._made[task] = None
        return task

    def _run_once(self) -> None:
        """Run one callback, or raise `Crashed` or `SimulationError`; called by `BaseEventLoop.run_forever`."""
        if self.crash_at is not None and self.steps >= self.crash_at:
            self.crash_at = None
            if self._on_crash is not None:
                self._on_crash()
            self._scheduled.clear()
            raise Crashed(f"at step {self.steps}")
        if self.steps >= self._max_steps:
            raise SimulationError(f"the simulated program did not end within {self._max_steps} steps")
        self._move_due()
        if not self._ready:
            if self._stopping:
                return
            raise SimulationError(f"the simulated program is deadlocked: {waiting(self)}")
        self.steps += 1
        handle = self._ready.popleft()
        if self._chance is not None and self._ready:
            while _is_wake_up(handle) and self._ready and self._chance.random() < REORDER_CHANCE:
                self._ready.append(handle)
                handle = self._ready.popleft()
        if not handle._cancelled:
            handle._run()
            if self.errors and self.fail_fast:
                raise self.errors.pop(0)

    def _move_due(self) -> None:
        """Move due timers to the ready queue; if that is empty, first advance the clock to the next timer."""
        timers = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not timers or (self._ready and timers[0]._when > self._virtual.now_s):
            return
        if self._is_alone and not self._ready and not self._stopping:
            self._virtual.now_s = max(self._virtual.now_s, timers[0]._when)
        while timers and timers[0]._when <= self._virtual.now_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if not timer._cancelled:
                self._ready.append(timer)

    def has_work(self) -> bool:
        """Return whether there is a callback to run now, or a crash to come to pass."""
        self._move_due()
        return bool(self._ready) or (self.crash_at is not None and self.steps >= self.crash_at)

    def next_timer_s(self) -> float:
        """Return the time of the next timer, infinity for none; cancelled ones were removed by `has_work`."""
        return self._scheduled[0]._when if self._scheduled else math.inf

    def call_soon_threadsafe(  # type: ignore[override] # the stubs tie callback and args together by a TypeVarTuple
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._owner:
            raise SimulationError(f"{callback} was scheduled from another thread: a simulation has one thread")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override] # BaseEventLoop's says asyncio.Future, as this does
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run ``func`` on this thread, after the callbacks that are ready now or after a drawn delay."""
        future: asyncio.Future[T] = self.create_future()
        if self.work_time_s is None:
            self.call_soon(_run_inline, future, func, args)
        else:
            done: asyncio.Future[T] = self.create_future()
            done.add_done_callback(functools.partial(self._return_late, future, self.work_time_s()))
            self.call_later(self.work_time_s(), _run_inline, done, func, args)
        return future

    def _return_late(self, future: asyncio.Future[T], after_s: float, done: asyncio.Future[T]) -> None:
        self.call_later(after_s, _pass_on, done, future)

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps in a selector."""

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no I/O events."""

    async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
        """Raise SimulationError."""
        raise SimulationError("a simulation has no network")

    getnameinfo = getaddrinfo


def run(main: Coroutine[Any, Any, T], chance: random.Random | None = None, *, loop: SimulatedLoop | None = None) -> T:
    """Run ``main`` in virtual time and cancel the tasks that it leaves running, as asyncio.run does.

    Args:
        main: Coroutine to run.
        chance: See `SimulatedLoop`; ignored if ``loop`` is given.
        loop: Loop to run on; it is closed at the end.

    Raises:
        SimulationError: The program deadlocked or did not end.
        Crashed: ``loop.crash_at`` was reached.
        BaseExceptionGroup: Callbacks, or tasks that were never awaited, raised exceptions.
    """
    loop = loop or SimulatedLoop(chance)
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
    except BaseException as error:
        if isinstance(error, Crashed) or loop.fail_fast:
            abandon_tasks(loop)
        else:
            _end_tasks(loop)
        raise
    else:
        _end_tasks(loop)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    if loop.errors:
        raise BaseExceptionGroup("exceptions that were not awaited in the simulation", loop.errors)
    return result


def simulated(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Decorate an async test: calling it runs it in virtual time, with callbacks in the same order as in asyncio.

    Args:
        test: The coroutine function.

    Returns:
        A plain function. It returns what the test returns, and raises what the test and `run` raise.
    """

    @functools.wraps(test)
    def in_virtual_time(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(test(*args, **kwargs))

    return in_virtual_time


def _end_tasks(loop: SimulatedLoop) -> None:
    """Cancel the tasks that are left and close the async generators that none uses, in the order of `asyncio.run`."""
    loop.crash_at = None
    loop._max_steps = loop.steps + 100_000
    _cancel_tasks(loop)
    _finish(loop, loop.create_task(loop.shutdown_asyncgens()))
    _cancel_tasks(loop)


def _cancel_tasks(loop: SimulatedLoop) -> None:
    """Cancel the tasks that are left, round by round, until none is."""
    for _ in range(MAX_UNWINDING):  # the clean-up of one task may begin another
        left = _tasks(loop)
        if not left:
            return
        for task in left:
            task.cancel()
        _finish(loop, asyncio.gather(*left, return_exceptions=True))
    raise SimulationError(f"cancelled tasks do not end: {waiting(loop)}")


def abandon_tasks(loop: SimulatedLoop) -> None:
    """Cancel the tasks that a crash or the end of a process left, without virtual time passing.

    Timers are dropped and every wait is cancelled. If the coroutines were only dropped, their ``finally`` blocks would
    run at a later garbage collection, without a loop.
    """
    loop.crash_at = None
    # A garbage collection may report unawaited exceptions here; those of a crashed machine do not matter.
    loop.fail_fast = False
    for _ in range(MAX_UNWINDING):
        left = _tasks(loop)
        if not left:
            break
        for task in left:
            task.cancel()
        while loop._ready:
            loop._scheduled.clear()
            loop.stop()  # after one callback
            loop.run_forever()
    else:
        raise SimulationError(f"tasks do not end after a crash: {waiting(loop)}")
    for task in loop._made:
        if task.done() and not task.cancelled():
            task.exception()  # else a garbage collection would report it during the next boot
    loop.errors.clear()


def _tasks(loop: SimulatedLoop) -> list[asyncio.Task[Any]]:
    """Return this loop's unfinished tasks in the order in which they were made; asyncio's own set has no order."""
    return [task for task in loop._made if not task.done()]


def _finish(loop: SimulatedLoop, future: asyncio.Future[Any]) -> None:
    future.add_done_callback(lambda _: loop.stop())
    while not future.done():  # more than once: after a crash, the main task's stop is still pending
        loop.run_forever()


def _run_inline(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    """Call a function for an executor and set the result of its future."""
    if future.cancelled():
        return
    try:
        result = func(*args)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _pass_on(done: asyncio.Future[T], future: asyncio.Future[T]) -> None:
    """Copy the result or exception of one future to another one, unless that was cancelled."""
    error = done.exception()
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _is_wake_up(handle: asyncio.Handle) -> bool:
    """Return whether a handle continues a task whose future is done, rather than starts or re-runs one."""
    return bool(handle._args) and isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]


def _keep_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, SimulatedLoop)
    loop.errors.append(context.get("exception") or SimulationError(str(context.get("message"))))


def waiting(loop: SimulatedLoop) -> str:
    names = sorted(f"{t.get_name()} in {t.get_coro()}" for t in _tasks(loop))
    return "; ".join(names[:5]) or "no task is left"
