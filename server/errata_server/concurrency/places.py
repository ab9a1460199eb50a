"""`Place`, where the calls of one environment run; `ThreadCall` and `TaskCall`, calls under a deadline."""

from __future__ import annotations

import asyncio
import contextvars
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from .calls import Call, CallAbandoned
from .deadlines import Deadlines
from .procedures import Done, Operation
from .step_clock import StepClock

T = TypeVar("T")

ClockOf = Callable[[], StepClock | None]
"""Returns the clock of the session whose call it is; None where the clock was never stopped."""


def no_clock() -> None:
    """Return no clock, for calls whose deadline nothing stops."""


class Place(ABC):
    """Where one environment's calls run. Its user makes one call at a time."""

    gone: bool
    """No call can run here any more: one that hangs was given up, and the environment is half-run or out of reach."""

    async def run(self, function: Callable[[], T], timeout_s: float, clock: ClockOf = no_clock) -> T:
        """Run ``function`` and return what it returns, or raise what it raises.

        Args:
            function: Called once, or never.
            timeout_s: Deadline from now, waiting for the thread included.
            clock: See `ClockOf`.

        Raises:
            CallAbandoned: The deadline passed. If the call had begun, this place is gone.
            ThreadGone: The call did not begin and never will: this place is gone.
        """
        return await ThreadCall(function, self, timeout_s, clock)  # type: ignore[no-any-return]

    @abstractmethod
    def start(self, call: Call) -> None:
        """Begin ``call``; its `Call.resolve` is called at its end.

        Raises:
            ThreadGone: This place is gone.
        """

    @abstractmethod
    def ended(self) -> None:
        """Forget the last call, which has ended."""

    @abstractmethod
    def abandoned(self) -> None:
        """Note that the last call was given up while it ran."""

    @abstractmethod
    def give_up(self) -> None:
        """Write off the call that still runs here, for example after its caller was cancelled."""

    @abstractmethod
    def release(self) -> None:
        """Return the place without waiting for the call that runs on it. Idempotent."""


_NO_SLOTS: tuple[str, ...] = ()
"""Of a class whose attributes have their slots in its subclasses: two bases with slots cannot be combined."""


class _Timed(Operation):
    """An operation under a deadline, from which the time is left out in which its clock was stopped."""

    __slots__ = _NO_SLOTS

    _clock: ClockOf
    _deadline: object
    _deadlines: Deadlines
    _done: Done | None
    _started: float
    _stopped_before_s: float
    _timeout_s: float

    def _abandon(self) -> CallAbandoned | None:
        """Give up what runs; return None if it has just ended and its result is on the way."""
        raise NotImplementedError

    def _set_deadline(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        self._done = done
        self._deadlines = deadlines = Deadlines.of(loop)
        self._started = started = loop.time()
        clock = self._clock()
        self._stopped_before_s = 0.0 if clock is None else clock.stopped_s()
        self._deadline = deadlines.add(self._timeout_s, self, started)

    def _ended(self) -> Done | None:
        """Return the callback, the first time."""
        done, self._done = self._done, None
        if done is not None:
            self._deadlines.remove(self, self._deadline)
        return done

    def expire(self) -> None:
        """Called when the deadline has passed."""
        if self._done is None:
            return
        clock = self._clock()
        if clock is not None:
            now = self._deadlines.loop.time()
            left_s = clock.left_s(self._timeout_s, now - self._started, self._stopped_before_s)
            if left_s > 0.0:
                self._deadline = self._deadlines.add(left_s, self, now)
                return
        abandoned = self._abandon()
        if abandoned is not None and (done := self._ended()) is not None:
            done(None, abandoned)


class ThreadCall(Call, _Timed):
    """A function called at a place, under a deadline.

    Fails with `CallAbandoned` when the deadline passes, with `ThreadGone` when it did not begin and never will, and
    else with what the function raised.

    Args:
        function: Called once, or never.
        place: Where.
        timeout_s: Deadline from the start, waiting for the thread included.
        clock: See `ClockOf`.
    """

    __slots__ = ("_clock", "_deadline", "_deadlines", "_done", "_place", "_started", "_stopped_before_s", "_timeout_s")

    def __init__(self, function: Callable[[], Any], place: Place, timeout_s: float, clock: ClockOf = no_clock) -> None:
        self._function = function
        self._place = place
        self._timeout_s = timeout_s
        self._clock = clock
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
        """Report the outcome, unless the call was given up or its caller cancelled."""
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


class CancelledByItself(Exception):
    """A coroutine raised `asyncio.CancelledError` though nobody had cancelled it."""


class TaskCall(_Timed):
    """A coroutine in a task of its own, under a deadline.

    Fails with `CallAbandoned` when the deadline passes (the task goes on: see ``task``), with `CancelledByItself`, and
    else with what the coroutine raised.

    Args:
        call: Returns the awaitable.
        context: The context of the task.
        timeout_s: Deadline from the start.
        clock: See `ClockOf`.

    Attributes:
        task: The task, once started.
    """

    __slots__ = (
        "_call",
        "_clock",
        "_context",
        "_deadline",
        "_deadlines",
        "_done",
        "_started",
        "_stopped_before_s",
        "_timeout_s",
        "task",
    )

    def __init__(
        self,
        call: Callable[[], Awaitable[Any]],
        context: contextvars.Context,
        timeout_s: float,
        clock: ClockOf = no_clock,
    ) -> None:
        self._call = call
        self._context = context
        self._timeout_s = timeout_s
        self._clock = clock
        self._done = None
        self.task: asyncio.Task[None]

    def start(self, done: Done, loop: asyncio.AbstractEventLoop) -> None:
        """Begin in a new task; see `Operation.start`."""
        self.task = loop.create_task(self._run(), context=self._context)
        self._set_deadline(done, loop)

    async def _run(self) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = await self._call()
        except asyncio.CancelledError:
            self._report(None, CancelledByItself())  # no effect where the caller cancelled
            raise
        except GeneratorExit:  # the event loop is gone
            raise
        except Exception as failure:
            error = failure
        except BaseException as failure:  # asyncio would let SystemExit and KeyboardInterrupt end the event loop
            error = RuntimeError(f"it raised {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        self._report(result, error)

    def _report(self, result: Any, error: BaseException | None) -> None:
        if (done := self._ended()) is not None:
            done(result, error)

    def cancel(self) -> None:
        """Cancel the task; see `Operation.cancel`."""
        self._ended()
        self.task.cancel()

    def _abandon(self) -> CallAbandoned:
        return CallAbandoned(ran=True)
