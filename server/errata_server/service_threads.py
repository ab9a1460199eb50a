"""`ServiceThread`: a thread whose failure is logged and repaired or shown by ``/ready``; the server starts no others.

A thread that an exception ends takes what it did along without a word: whoever waits for it waits for ever. Here the
exception is logged with its traceback, and the function is called again, or `ServiceThread.trouble` says that it ended.
Threads of a ``ThreadPoolExecutor`` need none of this: what a call raises goes to its future.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("errata.threads")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
"""Before the function is called again; doubled with each failure: one that always fails does not fill the log."""

STEADY_S = 10.0
"""A function that was called again and runs for so long is no trouble any more, and its next failure is its first."""


class ServiceThread:
    """A daemon thread that runs one function of the server to its end.

    Args:
        name: Of the thread, for the log and for ``/ready``.
        run: Called on the thread; it returns when the thread is to end.
        restarts: Call it again after an exception. False where what it held is in an unknown state then.
        failed: Called on the thread with each exception, before ``run`` is called again: answers those who wait.

    Raises:
        RuntimeError: The system gives no more threads.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], None],
        *,
        restarts: bool = True,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.name = name
        self._run = run
        self._restarts = restarts
        self._failed = failed
        self._failure: str | None = None
        self._called_at = time.monotonic()
        self._calling = True
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """The thread's identifier."""
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def trouble(self) -> str | None:
        """Say that an exception ended the thread, or did a short time ago; None when all is well."""
        failure = self._failure
        if failure is None or (self._calling and time.monotonic() - self._called_at > STEADY_S):
            return None
        rest = "it is tried again" if self._restarts else "restart the server"
        return f"the server's thread {self.name} failed ({failure}): {rest}; the log has more"

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the function has returned for good."""
        self._thread.join(timeout_s)

    def _live(self) -> None:
        try:
            self._supervise()
        finally:
            self._run, self._failed = _nothing, None  # whose objects often hold this one

    def _supervise(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self._run()
                self._failure = None
                return
            except BaseException as error:
                if time.monotonic() - self._called_at > STEADY_S:
                    pause_s = FIRST_PAUSE_S
                self._calling = False
                self._failure = f"{type(error).__name__}: {error}"
                log.critical(
                    "the server's thread %s failed%s",
                    self.name,
                    f"; it goes on in {pause_s:g} s" if self._restarts else " and ended",
                    exc_info=error,
                )
                self._answer(error)
            if not self._restarts:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self._called_at, self._calling = time.monotonic(), True

    def _answer(self, error: BaseException) -> None:
        if self._failed is None:
            return
        try:
            self._failed(error)
        except Exception:
            log.exception("those who waited for thread %s could not be answered", self.name)


def _nothing() -> None:
    pass
