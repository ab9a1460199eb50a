"""`WorkerPool`: calls functions in worker processes, within budgets, fair by principal and session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

from errata_protocol.errors import InvalidRequest, ServiceError

from ..concurrency.slots import NO_SHARE, Share, Slots

T = TypeVar("T")

_PROGRAM = Path(__file__).with_name("child.py")
_WALL_S_PER_CPU_S = 30.0
_LEAST_WALL_S = 120.0
"""A worker that has no CPU for so long is given up: the machine is at fault, and not what it reads."""
_IDLE_S = 300.0
"""A worker that was idle for so long is ended at the next call, whichever worker takes that."""
_SMALL_BYTES = 1024
"""Largest message with neither a result nor an exception in it."""
_LARGEST_BYTES = 256 * 1024**2
"""A worker that holds more memory after a call is replaced: what was freed does not always go back to the system."""
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
_EXCEEDED = {
    "time": "it takes more than {cpu_s:g} s of CPU time",
    "memory": "it takes more than {memory_mib} MiB of memory",
    "depth": "its reader crashed (nesting too deep, or memory refused)",
    "size": "its result has more than {answer_mib} MiB",
}


@dataclass(frozen=True, slots=True)
class Budget:
    """What one call may use.

    Args:
        cpu_s: Most CPU time of the call, seconds. CPU time, because a busy machine must not change a verdict.
        memory_bytes: Most address space of the process, Python and the imported modules included.
        answer_bytes: Most bytes of the pickled result, which is read by the server itself.
    """

    cpu_s: float = 20.0
    memory_bytes: int = 1024**3
    answer_bytes: int = 4 * 1024**2


DEFAULT = Budget()
"""The budget of a call that states none."""


class BudgetExceeded(InvalidRequest):
    """A call exceeded its budget, so what it works on is too large or too complex.

    Args:
        what: What was worked on, the subject of the message.
        limit: ``time``, ``memory``, ``depth`` or ``size``.
        budget: The budget.
    """

    def __init__(self, what: str, limit: str, budget: Budget) -> None:
        mib = 1024**2
        reason = _EXCEEDED[limit].format(
            cpu_s=budget.cpu_s, memory_mib=budget.memory_bytes // mib, answer_mib=budget.answer_bytes / mib
        )
        super().__init__(f"{what} is too large: {reason}; make it smaller", limit=limit)


class WorkerFailed(ServiceError):
    """A worker process could not be started, was killed, or got no CPU; nothing is known of what it worked on."""


class WorkerPool:
    """Worker processes, started when they are needed.

    Args:
        limit: Most processes, and calls at a time.
    """

    def __init__(self, limit: int) -> None:
        self.set_limit(limit)
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def set_limit(self, limit: int) -> None:
        """Set the most processes. Call it before the first call."""
        self._slots = Slots(limit)
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="errata-worker")

    async def call(
        self,
        what: str,
        function: Callable[..., T],
        *arguments: Any,
        budget: Budget = DEFAULT,
        share: Share = NO_SHARE,
        while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """Call a function in a worker process and return its result, or raise its exception.

        If the caller is cancelled, the process is killed.

        Args:
            what: What is worked on, for the message of `BudgetExceeded`, e.g. ``the patch``.
            function: Function of a module. It must depend on its arguments only: it sees no state of this process.
            *arguments: Positional arguments, which are pickled.
            budget: Budget of the call.
            share: Share of the caller; see `Slots.take`.
            while_waiting: See `Slots.take`.

        Raises:
            BudgetExceeded: The call exceeded its budget.
            WorkerFailed: The process could not be started, was killed, or got no CPU.
        """
        async with self._slots.take(while_waiting, share):
            call = _Call(self, what, function, arguments, budget)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, call.run)
            finally:
                call.end()

    def take(self) -> tuple[_Worker, bool]:
        """Return a worker, and whether it is a new one. The caller gives it back or kills it."""
        self._end_unusable()
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return _Worker(), True

    def give_back(self, worker: _Worker) -> None:
        """Keep a worker for the next call."""
        with self._lock:
            self._idle.append(worker)
        self._end_unusable()

    def _end_unusable(self) -> None:
        with self._lock:
            old = [worker for worker in self._idle if not worker.usable]
            self._idle = [worker for worker in self._idle if worker not in old]
        for worker in old:
            worker.kill()  # which waits, so that others must not wait for the lock meanwhile

    def close(self) -> None:
        """End the idle processes; the next call starts another."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()


class _Call:
    """One call, run on a thread that waits for the process."""

    def __init__(
        self, pool: WorkerPool, what: str, function: Callable[..., Any], arguments: tuple[Any, ...], budget: Budget
    ) -> None:
        self._pool, self._what, self._budget = pool, what, budget
        self._function, self._arguments = function, arguments
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._ended = False

    def run(self) -> Any:
        """Carry out the call."""
        budget, function = self._budget, self._function
        request = b"".join(
            pickle.dumps(part)
            for part in (
                (budget.cpu_s, budget.memory_bytes, budget.answer_bytes),
                (function.__module__, function.__qualname__),
                self._arguments,
            )
        )
        self._arguments = ()
        while not self._ended:
            worker, new = self._pool.take()
            with self._lock:
                self._worker = worker
                if self._ended:  # while it was started
                    worker.stop()
            try:
                how, value = pickle.loads(worker.ask(request, budget))
            except _Gone as gone:
                status = worker.kill()
                if status == -signal.SIGXCPU:
                    raise BudgetExceeded(self._what, "time", budget) from None
                if -status in _CRASHES:  # recursion in C, or memory that C code did not get
                    raise BudgetExceeded(self._what, "depth", budget) from None
                if gone.ended and not new:
                    continue  # most likely it was killed while it was idle
                raise WorkerFailed(f"{self._what} could not be read: {gone} (status {status})") from None
            except BaseException:
                worker.kill()
                raise
            with self._lock:
                self._worker = None
                cancelled = self._ended
            if cancelled:
                worker.kill()  # `end` may be doing so
                break
            self._pool.give_back(worker)
            if how == "exceeded":
                raise BudgetExceeded(self._what, value, budget)
            if how == "raised":
                error, note = value
                error.add_note(note)
                raise error
            return value
        raise WorkerFailed(f"{self._what} was not read: its request was cancelled")

    def end(self) -> None:
        """Kill the process if it still works on this call."""
        with self._lock:
            self._ended = True
            if self._worker is not None:
                self._worker.stop()


class _Gone(Exception):
    """The process ended, or has to be ended.

    Args:
        message: What happened.
        ended: Whether it ended by itself, or was killed.
    """

    def __init__(self, message: str, *, ended: bool) -> None:
        super().__init__(message)
        self.ended = ended


class _Worker:
    """One process."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self._connection = ours
        self.used_bytes = 0
        self._idle_since = time.monotonic()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", os.fspath(_PROGRAM), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            ours.send_bytes(pickle.dumps([os.path.abspath(path) for path in sys.path]))  # noqa: PTH100 - "" too
        except OSError as error:
            ours.close()
            raise WorkerFailed(f"no worker process can be started: {error}") from error

    @property
    def usable(self) -> bool:
        """Whether the process may take another call."""
        return self.used_bytes < _LARGEST_BYTES and time.monotonic() - self._idle_since < _IDLE_S

    def ask(self, request: bytes, budget: Budget) -> bytes:
        """Send a request and return the answer; note how much memory the process holds after it.

        Raises:
            _Gone: The process ended, or gave no answer.
        """
        try:
            self._connection.send_bytes(request)
            wall_s = max(_LEAST_WALL_S, _WALL_S_PER_CPU_S * budget.cpu_s)
            answer = self._receive(max(budget.answer_bytes, _SMALL_BYTES), wall_s)
            self.used_bytes = int(self._receive(_SMALL_BYTES, wall_s))
        except (EOFError, OSError) as error:
            raise _Gone(f"the worker process ended: {error}", ended=True) from error
        self._idle_since = time.monotonic()
        return answer

    def _receive(self, most_bytes: int, wall_s: float) -> bytes:
        if not self._connection.poll(wall_s):
            raise _Gone(f"no answer within {wall_s:g} s: the machine is too busy", ended=False)
        return self._connection.recv_bytes(most_bytes)

    def stop(self) -> None:
        """Kill the process without waiting; a thread that waits for its answer sees its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def kill(self) -> int:
        """End the process and return its exit status, negative for a signal; one that ended before keeps its own."""
        self._connection.close()
        try:
            return self._process.wait(0.5)  # one that ended by itself, or sees that its connection is closed
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


MOST_WORKERS = min(4, max(2, os.cpu_count() or 1))
"""Most worker processes of one server."""

WORKERS = WorkerPool(MOST_WORKERS)
"""The worker processes of this process."""
