"""`Place`, where the calls of one environment run; `ThreadCall` and `TaskCall`, calls under a deadline."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from .calls import Call, CallAbandoned
from .containment import contained, is_ending
from .deadlines import DEADLINES, Deadlines, Expiring
from .procedures import Done, Operation
from .step_clock import StepClock

T = TypeVar("T")


class HasClock(Protocol):
    """The session that a call belongs to."""

    @property
    def clock(self) -> StepClock | None:
        """The clock of its calls; None if that clock was never stopped."""


class _NoSession:
    """For calls of no session, whose deadline is never extended."""

    clock: StepClock | None = None


_NO_SESSION = _NoSession()


class Place(ABC):
    """Where the calls of one environment run, one call at a time."""

    gone: bool
    """Whether no further call can run here: a call that hung was abandoned, so the environment cannot be used again."""

    async def run(self, function: Callable[[], T], timeout_s: float, session: HasClock = _NO_SESSION) -> T:
        """Run ``function`` and return what it returns, or raise what it raises.

        Args:
            function: Called at most once.
            timeout_s: Deadline in seconds from now, including the wait for a thread.
            session: The session that the call belongs to.

        Raises:
            CallAbandoned: The deadline passed. If the call had begun, this place is gone.
            ThreadGone: This place is gone; the function was not called.
        """
        return await ThreadCall(function, (), self, timeout_s, session)  # type: ignore[no-any-return]

    @abstractmethod
    def start(self, call: Call) -> None:
        """Begin ``call``; `Call.resolve` is called when it has ended.

        Raises:
            ThreadGone: This place is gone.
        """

    @abstractmethod
    def ended(self) -> None:
        """Called when the last call has ended."""

    @abstractmethod
    def abandoned(self) -> None:
        """Called when the last call was abandoned while it ran."""

    @abstractmethod
    def give_up(self) -> None:
        """Abandon the call that still runs here, for example after its caller was cancelled."""

    @abstractmethod
    def release(self) -> None:
        """Give the place back without waiting for a running call. Idempotent."""


_NO_SLOTS: tuple[str, ...] = ()
"""The slots of `_Timed`, whose subclasses declare them: Python cannot combine two base classes with slots."""


class _Timed(Operation):
    """An operation with a deadline; time in which its clock was stopped does not count.

    If the event loop was stalled when the deadline passed, because the machine was paused or overloaded, the call may
    have ended without the loop having seen it. The deadline then moves by as much as the loop was late, once: an
    environment that computes on the loop stalls it, too, and must not run forever.
    """

    __slots__ = _NO_SLOTS

    _deadline: dict[Expiring, float] | asyncio.TimerHandle
    _deadlines: Deadlines
    _done: Done | None
    _extended: bool
    _session: HasClock
    _started: float
    _stopped_before_s: float
    _timeout_s: float

    def _abandon(self) -> CallAbandoned | None:
        """Abandon the call; return None if it has already ended and its result is about to be delivered."""
        raise NotImplementedError

    def _set_deadline(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        self._done = done
        self._deadlines = deadlines = DEADLINES[loop]
        self._started = started = loop.time()
        clock = self._session.clock
        self._stopped_before_s = 0.0 if clock is None else clock.stopped_s()
        self._extended = False
        self._deadline = deadlines.add(self._timeout_s, self, started)

    def _ended(self) -> Done | None:
        """Cancel the deadline and return the callback; None if this was done before."""
        done = self._done
        if done is not None:
            self._done = None
            deadline = self._deadline
            if isinstance(deadline, dict):
                deadline.pop(self, None)
            else:
                deadline.cancel()
        return done

    def expire(self) -> None:
        """Called when the deadline has passed."""
        if self._done is None:
            return
        clock, now = self._session.clock, self._deadlines.loop.time()
        left_s = 0.0
        if clock is not None:
            left_s = clock.left_s(self._timeout_s, now - self._started, self._stopped_before_s)
        if left_s <= 0.0 and not self._extended:
            left_s = self._deadlines.late_s(self._deadline, now)
            self._extended = True
        if left_s > 0.0:
            self._deadline = self._deadlines.add(left_s, self, now)
            return
        abandoned = self._abandon()
        if abandoned is not None and (done := self._ended()) is not None:
            done(None, abandoned)


class ThreadCall(Call, _Timed):
    """Calls a function at a place, with a deadline.

    Fails with `CallAbandoned` when the deadline has passed, with `ThreadGone` if the function was not called because
    the place is gone, and otherwise with the exception that the function raised.

    Args:
        function: Called at most once.
        arguments: Its positional arguments.
        place: Where to call it.
        timeout_s: Deadline in seconds from the start, including the wait for a thread.
        session: The session that the call belongs to.
    """

    __slots__ = (
        "_deadline",
        "_deadlines",
        "_done",
        "_extended",
        "_place",
        "_session",
        "_started",
        "_stopped_before_s",
        "_timeout_s",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        place: Place,
        timeout_s: float,
        session: HasClock = _NO_SESSION,
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._place = place
        self._timeout_s = timeout_s
        self._session = session
        self._done = None

    def start(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        """Begin at the place; see `Operation.start`.

        Raises:
            ThreadGone: The place is gone.
        """
        self.prepare(loop)
        self._place.start(self)
        self._set_deadline(done, loop)

    def resolve(self) -> None:
        """Report the outcome, unless the call was abandoned or its caller was cancelled."""
        done = self._ended()
        if done is not None:
            self._place.ended()
            result, self.result = self.result, None
            done(result, self.error)

    def cancel(self) -> None:
        """Withdraw the call if it has not begun; see `Operation.cancel`."""
        self._ended()
        self.withdraw()

    def _abandon(self) -> CallAbandoned | None:
        abandoned = self.give_up()
        if abandoned is not None and abandoned.ran:
            self._place.abandoned()
        return abandoned


TASK_NAME = "errata: a call of an environment"


class CancelledByItself(Exception):
    """A coroutine raised `asyncio.CancelledError` although its task was not cancelled."""


class TaskCall(_Timed):
    """Runs a coroutine in a task of its own, with a deadline.

    Fails with `CallAbandoned` when the deadline has passed (the task goes on: see ``task``), with `CancelledByItself`
    if the coroutine raised CancelledError, and otherwise with the exception that the coroutine raised.

    Args:
        call: Returns the awaitable.
        arguments: Its positional arguments; a `functools.partial` would take 200 bytes for each request in flight.
        context: The context of the task.
        timeout_s: Deadline in seconds from the start.
        session: The session that the call belongs to.

    Attributes:
        task: The task, once started.
    """

    __slots__ = (
        "_arguments",
        "_call",
        "_context",
        "_deadline",
        "_deadlines",
        "_done",
        "_extended",
        "_session",
        "_started",
        "_stopped_before_s",
        "_timeout_s",
        "task",
    )

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        arguments: tuple[Any, ...],
        context: contextvars.Context,
        timeout_s: float,
        session: HasClock = _NO_SESSION,
    ) -> None:
        self._call = call
        self._arguments = arguments
        self._context = context
        self._timeout_s = timeout_s
        self._session = session
        self._done = None
        self.task: asyncio.Task[None]

    def start(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        """Begin in a new task; see `Operation.start`."""
        # Not `create_task`: it formats a new name for each task, which is a third of the cost of making one.
        self.task = asyncio.Task(self._run(), loop=loop, name=TASK_NAME, context=self._context)
        self._set_deadline(done, loop)

    async def _run(self) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = await self._call(*self._arguments)
        except asyncio.CancelledError:
            if (done := self._ended()) is not None:  # the caller has not cancelled
                done(None, CancelledByItself())
            raise
        except BaseException as failure:  # asyncio would let SystemExit and KeyboardInterrupt end the event loop
            if isinstance(failure, GeneratorExit) and is_ending(failure, self.task):
                raise  # the event loop is gone, and with it who waits
            error = contained(failure)
        if (done := self._ended()) is not None:
            done(result, error)

    def cancel(self) -> None:
        """Cancel the task; see `Operation.cancel`."""
        self._ended()
        self.task.cancel()

    def _abandon(self) -> CallAbandoned:
        return CallAbandoned(ran=True)
