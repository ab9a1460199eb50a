"""An event loop in virtual time: one thread, no real wait, the same order for the same seed.

`SimulatedLoop` runs one callback a step. When none is ready it moves its clock to the next timer, so a session's TTL
of ten minutes passes in no time. asyncio.sleep, asyncio.timeout and call_later work on it unchanged, and so does the
server.

What a simulation must not touch is refused: sockets, child processes and signals are not implemented, a call from
another thread raises. A function handed to an executor runs inline, as a step of its own, whatever the executor is.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import random
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

OVERTAKEN = 0.25
"""Chance that a task woken by a future lets those behind it go first, on a loop with a seed."""

MAX_UNWINDING = 100
"""Waits, one in the other, that the clean-up of a crashed task may go through."""


class SimulationError(Exception):
    """The simulated program did what a simulation cannot run: it waits for nothing, never ends, or left the loop."""


class Crashed(BaseException):
    """The simulated machine went down at this step: nothing after it ran. No `Exception`, so that nobody handles it."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Event loop in virtual time.

    Args:
        chance: Varies the order in which woken tasks run. None keeps asyncio's order: first woken, first run. Callbacks
            and the first steps of tasks keep it always, because asyncio promises it and programs rely on it.
        start_s: What `time` says first.
        max_steps: A program that runs longer is taken for one that never ends.
        on_crash: Called before `Crashed` is raised, to take away what the program must not reach any more.

    Attributes:
        steps: Callbacks run so far.
        crash_at: Step before which `Crashed` is raised; None never crashes. May be set while the loop runs.
        errors: What callbacks raised and nobody awaited.
        fail_fast: Raise the first of them at once, rather than all at the end.
        work_time_s: Draws how long a function handed to an executor waits for its thread, and its result for the loop.
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
        max_steps: int = 10_000_000,
        on_crash: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_crash = on_crash
        self._chance = chance
        self._now_s = start_s
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
        return self._now_s

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        self._made[task] = None
        return task

    def _run_once(self) -> None:
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
            raise SimulationError(f"the simulated program waits for nothing: {_waiting(self)}")
        self.steps += 1
        handle = self._ready.popleft()
        if self._chance is not None and self._ready:
            while _is_wake_up(handle) and self._ready and self._chance.random() < OVERTAKEN:
                self._ready.append(handle)
                handle = self._ready.popleft()
        if not handle._cancelled:
            handle._run()
            if self.errors and self.fail_fast:
                raise self.errors.pop(0)

    def _move_due(self) -> None:
        """Move the timers that are due to the ready queue; with nothing ready, the clock goes to the next one."""
        timers = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not timers or (self._ready and timers[0]._when > self._now_s):
            return
        if not self._ready and not self._stopping:
            self._now_s = max(self._now_s, timers[0]._when)
        while timers and timers[0]._when <= self._now_s:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if not timer._cancelled:
                self._ready.append(timer)

    def call_soon_threadsafe(  # type: ignore[override] # the stubs tie callback and args together by a TypeVarTuple
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._owner:
            raise SimulationError(f"{callback} was sent from another thread: a simulation has one")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override] # BaseEventLoop's says asyncio.Future, as this does
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run ``func`` on this thread, after what is ready now."""
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
        """Nobody sleeps in a selector here."""

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
        """Raise SimulationError: there are no names to ask for."""
        raise SimulationError("a simulation has no network")

    getnameinfo = getaddrinfo


def run(main: Coroutine[Any, Any, T], chance: random.Random | None = None, *, loop: SimulatedLoop | None = None) -> T:
    """Run ``main`` in virtual time, then end what it left running; as asyncio.run does.

    Args:
        main: Coroutine to run.
        chance: See `SimulatedLoop`; ignored where ``loop`` is given.
        loop: Loop to run on; closed at the end.

    Raises:
        SimulationError: It waits for nothing or does not end.
        Crashed: ``loop.crash_at`` was reached.
        BaseExceptionGroup: A callback or a task that nobody awaits raised.
    """
    loop = loop or SimulatedLoop(chance)
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
    except BaseException as error:
        if isinstance(error, Crashed) or loop.fail_fast:
            _abandon_tasks(loop)
        else:
            _end_tasks(loop)
        raise
    else:
        _end_tasks(loop)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    if loop.errors:
        raise BaseExceptionGroup("what nobody awaited in the simulation", loop.errors)
    return result


def simulated(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Decorate an async test: it runs in virtual time, in asyncio's order."""

    @functools.wraps(test)
    def in_virtual_time(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(test(*args, **kwargs))

    return in_virtual_time


def _end_tasks(loop: SimulatedLoop) -> None:
    loop.crash_at = None
    loop._max_steps = loop.steps + 100_000
    _finish(loop, loop.create_task(loop.shutdown_asyncgens()))
    for _ in range(MAX_UNWINDING):  # the clean-up of one task may begin another
        left = _tasks(loop)
        if not left:
            return
        for task in left:
            task.cancel()
        _finish(loop, asyncio.gather(*left, return_exceptions=True))
    raise SimulationError(f"what was cancelled does not end: {_waiting(loop)}")


def _abandon_tasks(loop: SimulatedLoop) -> None:
    """Unwind what a crash left, in no time: no timer runs any more, and every wait of a clean-up is cancelled too.

    Merely dropped, the coroutines would run their ``finally`` at some later garbage collection, on no loop at all.
    """
    loop.crash_at = None
    # A garbage collection may report here what nobody awaits any more: it is no finding of a machine that is down.
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
        raise SimulationError(f"what crashed cannot be unwound: {_waiting(loop)}")
    for task in loop._made:
        if task.done() and not task.cancelled():
            task.exception()  # nobody is left to ask: told at a garbage collection, it would be the next boot's
    loop.errors.clear()


def _tasks(loop: SimulatedLoop) -> list[asyncio.Task[Any]]:
    """Return the tasks in the order they were made, which asyncio's set does not keep; it also is that of all loops."""
    return [task for task in loop._made if not task.done()]


def _finish(loop: SimulatedLoop, future: asyncio.Future[Any]) -> None:
    future.add_done_callback(lambda _: loop.stop())
    while not future.done():  # more than once: a crash leaves the stop behind that belonged to the main task
        loop.run_forever()


def _run_inline(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        result = func(*args)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _pass_on(done: asyncio.Future[T], future: asyncio.Future[T]) -> None:
    error = done.exception()
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _is_wake_up(handle: asyncio.Handle) -> bool:
    """Whether the handle continues a task whose future is done, rather than start or re-run one."""
    return bool(handle._args) and isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]


def _keep_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, SimulatedLoop)
    loop.errors.append(context.get("exception") or SimulationError(str(context.get("message"))))


def _waiting(loop: SimulatedLoop) -> str:
    names = sorted(f"{t.get_name()} in {t.get_coro()}" for t in _tasks(loop))
    return "; ".join(names[:5]) or "no task is left"
