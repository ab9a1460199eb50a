"""One daemon thread that runs what it is given, in order: the place of a synchronous environment."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class PinnedThread(Executor):
    """An executor of exactly one thread, which the interpreter does not wait for.

    A ThreadPoolExecutor's threads are joined when the process ends: one step that hangs for ever would keep a server
    from stopping.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run ``fn`` after all that was submitted before.

        Raises:
            RuntimeError: The thread was shut down.
        """
        if self._closed:
            raise RuntimeError("this thread was shut down")
        future: Future[T] = Future()
        self._work.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after what was submitted; never waits, whatever ``wait`` says."""
        self._closed = True
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, call  # an idle thread holds no environment alive
