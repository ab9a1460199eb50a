"""`Call`: a function that a worker thread runs, whose result is brought back to the event loop.

Waking a loop from a thread costs more than most steps, so results of one burst share one wake-up: a thread queues its
result, and wakes the loop only if no wake-up has been scheduled since the loop last emptied the queue.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from .containment import contained
from .per_loop import PerLoop


class CallAbandoned(Exception):
    """A call did not end in time.

    Attributes:
        ran: Whether the call had begun. If so, the environment is in an undefined state and the thread is written off.
    """

    def __init__(self, *, ran: bool) -> None:
        super().__init__("abandoned while it ran" if ran else "withdrawn before it began")
        self.ran = ran

    def described(self, timeout_s: float) -> str:
        """Describe how the call was abandoned, as a phrase that follows the name of the function."""
        if self.ran:
            return f"ran longer than the server's {timeout_s:g} s and was abandoned"
        return f"got no thread within the server's {timeout_s:g} s and did not run"


class ThreadGone(Exception):
    """The call did not begin, because its thread was written off after another call hung on it."""


class Worker(Protocol):
    """Runs calls one after the other: a thread, or a fake of one."""

    load: int
    """Number of environments placed on this worker."""

    @property
    def gone(self) -> bool:
        """Whether the worker was written off."""

    @property
    def busy_since(self) -> float | None:
        """Time at which the running call began, on the server's monotonic clock in seconds; None while idle."""

    def submit(self, call: Call) -> None:
        """Queue ``call`` to run after all calls submitted earlier.

        Raises:
            ThreadGone: The worker was written off.
        """

    def write_off(self, call: Call) -> bool:
        """Abandon the thread with the call that hangs on it; calls queued behind it fail with `ThreadGone`.

        Returns:
            Whether the thread was written off; False if ``call`` is no longer running.
        """

    def end(self) -> None:
        """Ask the worker to end after all submitted calls. Does not block."""


class Call(ABC):
    """A function to run on another thread, created on the event loop that receives its result."""

    __slots__ = ("_arguments", "_function", "_outbox", "_unclaimed", "error", "loop", "result", "worker")

    _function: Callable[..., Any]
    _arguments: tuple[Any, ...]

    def prepare(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare the call to run once and to deliver its result on ``loop``."""
        self.loop = loop
        self._outbox = _OUTBOXES[loop]
        self._unclaimed = [True]  # list.pop is atomic: either the thread or a withdrawal gets it, never both
        self.result: Any = None
        self.error: Exception | None = None
        self.worker: Worker | None = None

    def withdraw(self) -> bool:
        """Prevent the call from beginning; return False if it has begun already."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def begin(self, worker: Worker) -> bool:
        """Claim the call for ``worker``, which then has to run it. Only one claim or withdrawal of a call succeeds.

        Returns:
            False if the call was withdrawn or claimed before; it must not run then.
        """
        if not self.withdraw():
            return False
        self.worker = worker
        return True

    def give_up(self) -> CallAbandoned | None:
        """Withdraw the call, or write off its thread if it runs. Thread-safe.

        Returns:
            The error to report; None if the call had ended.
        """
        if self.withdraw():
            return CallAbandoned(ran=False)
        if self.worker is not None and self.worker.write_off(self):
            return CallAbandoned(ran=True)
        return None

    def perform(self) -> None:
        """Run the function and store its result or its `contained` exception."""
        try:
            self.result = self._function(*self._arguments)
        except BaseException as error:
            self.error = contained(error)

    def hand_over(self) -> None:
        """Queue the result for delivery on the event loop. Thread-safe."""
        self._outbox.put(self)

    def fail(self, error: Exception) -> None:
        """Fail the call with ``error`` if it has not begun. Thread-safe."""
        if self.withdraw():
            self.error = error
            self.hand_over()

    @abstractmethod
    def resolve(self) -> None:
        """Report the outcome to the caller. Called on the event loop."""


class _Outbox:
    """Queue of finished calls to be delivered on one event loop."""

    __slots__ = ("_done", "_loop", "_rung")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: deque[Call] = deque()
        self._rung = False

    def put(self, call: Call) -> None:
        self._done.append(call)
        if not self._rung:  # two threads may both find it unset: the second wake-up finds an empty queue
            self._rung = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # that loop is closed and nobody waits on it any more
                self._done.clear()

    def _deliver(self) -> None:
        self._rung = False  # before the queue is read: a call added after the loop below schedules another wake-up
        done = self._done
        while done:
            done.popleft().resolve()


_OUTBOXES: PerLoop[_Outbox] = PerLoop(_Outbox)
