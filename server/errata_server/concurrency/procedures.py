"""Procedures: generators that yield what they wait for, so that one text runs with a task or without one.

A task costs as much as a short step. So what every request does is written once, as a generator, and has two drivers:

- `run` awaits each wait. It is for callers that are in a task anyway.
- `start` resumes the procedure from callbacks. As long as it yields only `Operation`s there is no task; a coroutine
  that it yields gets one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Done: TypeAlias = Callable[[Any, "BaseException | None"], None]
"""Called once, on the event loop, with the result, or with None and the error."""

Spawn: TypeAlias = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
"""Runs a coroutine in a task and keeps the task alive."""


class Operation:
    """A wait that ends with a callback. It can be awaited too.

    No ABC: asking whether an object is one of an abstract class costs ten times as much.
    """

    __slots__ = ()

    def start(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        """Begin, and call ``done`` on ``loop`` at the end, perhaps before this returns.

        Raises:
            Exception: It could not begin; ``done`` is not called.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Called when the task that awaits the operation was cancelled; ``done`` has no effect any more."""

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(result)
            else:
                ended.set_exception(error)

        self.start(done, loop)
        try:
            return (yield from ended)
        finally:
            if ended.cancelled():
                self.cancel()


Procedure: TypeAlias = Generator["Operation | Coroutine[Any, Any, Any]", Any, T]
"""Yields waits, gets their results back, and returns a ``T``."""


async def run(procedure: Procedure[T]) -> T:
    """Drive a procedure in the current task and return its result."""
    result: Any = None
    error: BaseException | None = None
    while True:
        try:
            wait = procedure.send(result) if error is None else procedure.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            result = error = None  # an error whose traceback has this frame would be a cycle
        try:
            result = await wait
        except BaseException as failure:  # a cancellation too: the procedure cleans up
            error = failure


def start(
    procedure: Procedure[T],
    settled: Callable[[T | None, Exception | None], None],
    loop: asyncio.AbstractEventLoop,
    spawn: Spawn,
) -> None:
    """Begin a procedure and return; callbacks on ``loop`` drive it.

    Args:
        procedure: Not started.
        settled: Called once with the result, or with None and the error; before `start` returns where the procedure
            waits for nothing.
        loop: The running event loop. Asking Python 3.11 for it costs a system call.
        spawn: Starts a task for what cannot be waited for with a callback.
    """
    _Callbacks(procedure, settled, loop, spawn).resume(None, None)


class _Callbacks:
    """The driver of `start`."""

    __slots__ = ("_ended", "_loop", "_procedure", "_settled", "_spawn")

    def __init__(
        self,
        procedure: Procedure[Any],
        settled: Callable[[Any, Exception | None], None],
        loop: asyncio.AbstractEventLoop,
        spawn: Spawn,
    ) -> None:
        self._procedure = procedure
        self._settled = settled
        self._loop = loop
        self._spawn = spawn
        self._ended = False

    def resume(self, result: Any, error: BaseException | None) -> None:
        """Give the procedure the result of its last wait and begin its next one."""
        procedure = self._procedure
        while True:
            try:
                wait = procedure.send(result) if error is None else procedure.throw(error)
            except StopIteration as end:
                value, failure = end.value, None
                break
            except Exception as raised:
                value, failure = None, raised
                break
            except asyncio.CancelledError:
                return  # a task was cancelled, which happens where the event loop ends: nothing hears of it any more
            if not isinstance(wait, Operation):
                self._spawn(wait).add_done_callback(self._task_ended)
                return
            try:
                wait.start(self.resume, self._loop)
            except Exception as raised:
                if self._ended:
                    raise  # not of the operation, which ended at once, but of `settled`
                result, error = None, raised
                continue
            return
        self._ended = True
        self._settled(value, failure)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self.resume(None if error is not None else task.result(), error)
