"""`Call`: a call on another thread whose result wakes the event loop once for a burst of results.

Waking a loop from a thread costs more than most steps, so results of one burst share one wake-up: a thread puts its
result down and rings only if nobody has rung since the loop last looked.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol


class CallAbandoned(Exception):
    """A call did not end in time.

    Attributes:
        ran: It had begun, so that what it called is half-run now and its thread is written off.
    """

    def __init__(self, *, ran: bool) -> None:
        super().__init__("abandoned while it ran" if ran else "withdrawn before it began")
        self.ran = ran

    def described(self, timeout_s: float) -> str:
        """Return how it was abandoned, in words that follow the name of the function."""
        if self.ran:
            return f"ran longer than the server's {timeout_s:g} s and was abandoned"
        return f"got no thread within the server's {timeout_s:g} s and did not run"


class ThreadGone(Exception):
    """The call did not begin: its thread was written off, because another call hangs on it."""


class Worker(Protocol):
    """What runs calls one after the other: a thread, or a fake of one."""

    load: int
    """Environments that live on it."""

    @property
    def gone(self) -> bool:
        """It was written off."""

    @property
    def busy_since(self) -> float | None:
        """When the call that runs now began, on the server's monotonic clock."""

    def submit(self, call: Call) -> None:
        """Run ``call`` after all that was submitted before.

        Raises:
            ThreadGone: It was written off.
        """

    def write_off(self, call: Call) -> bool:
        """Give the thread up with the call that hangs on it; what waits behind that call fails with `ThreadGone`.

        Returns:
            False if ``call`` is not what runs: it ended meanwhile.
        """

    def end(self) -> None:
        """End after what was submitted. Never waits."""


class Call(ABC):
    """One function to run on another thread. Made on the event loop that gets its result."""

    __slots__ = ("_function", "_outbox", "_unclaimed", "error", "loop", "result", "worker")

    _function: Callable[[], Any]

    def prepare(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set up the call to be run once, its result to be delivered on ``loop``."""
        self.loop = loop
        self._outbox = _Outbox.of(loop)
        self._unclaimed = [True]  # list.pop is atomic: only one of the thread and a withdrawal can have it
        self.result: Any = None
        self.error: Exception | None = None
        self.worker: Worker | None = None

    def withdraw(self) -> bool:
        """See to it that the call never begins; False if it has."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def begin(self, worker: Worker) -> bool:
        """Claim the call for ``worker``; False if it was withdrawn."""
        if not self.withdraw():
            return False
        self.worker = worker
        return True

    def give_up(self) -> CallAbandoned | None:
        """Withdraw the call, or write its thread off, and say which; None if it had ended. From any thread."""
        if self.withdraw():
            return CallAbandoned(ran=False)
        if self.worker is not None and self.worker.write_off(self):
            return CallAbandoned(ran=True)
        return None

    def perform(self) -> None:
        """Run the function. What it raises is kept, also what would end the thread or, passed on, the event loop."""
        try:
            self.result = self._function()
        except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, asyncio.CancelledError) as error:
            self.error = RuntimeError(f"it raised {type(error).__name__}: {error}")
            self.error.__cause__ = error
        except Exception as error:
            self.error = error
        except BaseException as error:  # whatever a library derives from it, e.g. a panic of an extension module
            self.error = RuntimeError(f"it raised {type(error).__name__}: {error}")
            self.error.__cause__ = error

    def hand_over(self) -> None:
        """Give the result to the loop. From any thread."""
        self._outbox.put(self)

    def fail(self, error: Exception) -> None:
        """Answer with ``error`` instead of running. From any thread."""
        if self.withdraw():
            self.error = error
            self.hand_over()

    @abstractmethod
    def resolve(self) -> None:
        """Report the outcome to the caller. On the loop."""


class _Outbox:
    """Results on their way to one event loop."""

    __slots__ = ("_done", "_loop", "_rung")

    _known: dict[asyncio.AbstractEventLoop, _Outbox] = {}  # noqa: RUF012 - a loop has one, whoever sends to it

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: deque[Call] = deque()
        self._rung = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Outbox:
        found = cls._known.get(loop)
        if found is None:
            for other in [known for known in list(cls._known) if known.is_closed()]:
                cls._known.pop(other, None)
            found = cls._known.setdefault(loop, cls(loop))
        return found

    def put(self, call: Call) -> None:
        self._done.append(call)
        if not self._rung:  # two threads may both find it unset: the second wake-up finds nothing, and does no harm
            self._rung = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # that loop is closed and nobody waits on it any more
                self._done.clear()

    def _deliver(self) -> None:
        self._rung = False  # before the first look: what is put down after the last one rings again
        done = self._done
        while done:
            done.popleft().resolve()
