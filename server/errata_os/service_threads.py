"""`ServiceThread`: a thread of the server whose failure is logged, and repaired or shown by ``/ready``.

An exception that ends an ordinary thread goes unnoticed, and those that wait for its results wait for ever. All threads
of the server are therefore service threads, except those of a ``ThreadPoolExecutor``, whose exceptions go to the
futures of their calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from errata_protocol.exception_text import named_text_of

log = logging.getLogger("errata.threads")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 30.0
"""Pauses before the function is called again, doubled with each failure so that the log does not fill up."""

STEADY_S = 10.0
"""After this time without failure the thread counts as healthy, and the pause starts from `FIRST_PAUSE_S` again."""


class ServiceThread:
    """A daemon thread that runs one function of the server to its end.

    Args:
        name: Name of the thread in the log and in ``/ready``.
        run: Function to run; the thread ends when it returns.
        restarts: Call ``run`` again after an exception. False if its state may be invalid then.
        failed: Called on the thread with each exception before ``run`` is called again, to fail waiting calls.

    Raises:
        RuntimeError: The system cannot start another thread.
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
        """Message about the last exception, until ``run`` has gone without one for `STEADY_S`; None if all is well."""
        failure = self._failure
        if failure is None or (self._calling and time.monotonic() - self._called_at > STEADY_S):
            return None
        rest = "it is started again" if self._restarts else "restart the server"
        return f"the server's thread {self.name} failed ({failure}): {rest}; the log has more"

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, or for ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _live(self) -> None:
        try:
            self._supervise()
        finally:
            self._run, self._failed = _nothing, None  # their objects often refer to this one

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
                self._failure = named_text_of(error)
                log.critical(
                    "the server's thread %s failed%s",
                    self.name,
                    f"; it is started again in {pause_s:g} s" if self._restarts else " and ended",
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
            log.exception("cannot fail the calls that wait for thread %s", self.name)


def _nothing() -> None:
    pass
