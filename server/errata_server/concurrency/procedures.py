"""Procedures: generators that yield what they wait for, so that the same code runs with or without a task.

A task costs as much as a short step. So the code of each request is written once, as a generator, with two drivers:

- `run` awaits each yielded wait. It is for callers that already run in a task.
- `start` resumes the procedure from callbacks. No task is needed while it yields only `Operation`s; a
  yielded coroutine runs in a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct

from .containment import contained

C = TypeVar("C")
T = TypeVar("T")

Done: TypeAlias = Callable[[Any, "BaseException | None"], None]
"""Called once, on the event loop, with the result, or with None and the error."""

Spawn: TypeAlias = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]
"""Runs a coroutine in a task and keeps the task alive."""


class Operation:
    """An asynchronous operation that reports its end by a callback. It can also be awaited.

    Not an ABC: `isinstance` with an abstract class costs ten times as much.
    """

    __slots__ = ()

    def start(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the operation; ``done`` is called on ``loop`` when it has ended, possibly before this returns.

        Raises:
            Exception: The operation could not begin; ``done`` is not called.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Called when the task that awaits the operation was cancelled; ``done`` then has no effect."""

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
"""A generator that yields waits, receives their results, and returns a ``T``."""


async def run(procedure: Procedure[T]) -> T:
    """Drive a procedure in the current task and return its result."""
    result: Any = None
    error: BaseException | None = None
    while True:
        try:
            wait = procedure.send(result) if error is None else procedure.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as raised:
            raise contained(raised) from raised
        finally:
            result = error = None  # an error whose traceback has this frame would be a cycle
        try:
            result = await wait
        except BaseException as failure:  # including cancellation, so that the procedure can clean up
            error = failure


def start(
    procedure: Procedure[T],
    settled: Callable[[C, T | None, Exception | None], None],
    caller: C,
    loop: asyncio.AbstractEventLoop,
    spawn: Spawn,
) -> None:
    """Begin a procedure and return; callbacks on ``loop`` drive it.

    Args:
        procedure: A generator that was not started.
        settled: Called once with ``caller`` and the result, or with ``caller``, None and the error; before `start`
            returns if the procedure does not wait.
        caller: First argument of ``settled``: a `functools.partial` would take 200 bytes for each request in flight.
        loop: The running event loop. An argument, because looking it up costs a system call on Python 3.11.
        spawn: Starts a task for a coroutine that the procedure yields.
    """
    _Callbacks(procedure, settled, caller, loop, spawn).resume(None, None)


class _Callbacks(Struct, eq=False, gc=False):  # creating a struct calls no Python function
    """The driver of `start`."""

    procedure: Procedure[Any]
    settled: Callable[[Any, Any, Exception | None], None]
    caller: Any
    loop: asyncio.AbstractEventLoop
    spawn: Spawn
    ended: bool = False

    def resume(self, result: Any, error: BaseException | None) -> None:
        """Send the procedure the result of its last wait, and begin its next wait."""
        procedure = self.procedure
        while True:
            try:
                wait = procedure.send(result) if error is None else procedure.throw(error)
            except StopIteration as end:
                value, failure = end.value, None
                break
            except asyncio.CancelledError:
                return  # a task was cancelled, which happens when the event loop ends: no caller is left to notify
            except BaseException as raised:  # the caller is told; SystemExit would end the event loop
                value, failure = None, contained(raised)
                break
            if not isinstance(wait, Operation):
                self.spawn(wait).add_done_callback(self._task_ended)
                return
            try:
                wait.start(self.resume, self.loop)
            except Exception as raised:
                if self.ended:
                    raise  # raised by `settled`, not by the operation, which ended at once
                result, error = None, raised
                continue
            return
        self.ended = True
        self.settled(self.caller, value, failure)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self.resume(None if error is not None else task.result(), error)
