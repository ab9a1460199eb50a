"""Fails a test in which one callback of an event loop takes more than 100 ms of CPU time in code of the server.

What takes long on the loop holds up all sessions. The watch measures the CPU time of the loop's thread around each
callback, without garbage collections. While a callback runs, a thread looks where it is: only time in which the code at
work is of the server, the protocol or an environment counts, with what that code calls. Imports do not count, nor does
the making of an application, or what clients do on their own loops, or simulated threads, or a plain function of the
product that a test's own coroutine calls: there the test chose the loop.

Loops of uvloop are not watched; tests that serve in this process use asyncio's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
import threading
import time
from asyncio import events
from pathlib import Path
from types import FrameType
from typing import Any

from . import counted_work
from .garbage import no_collections
from .machine_speed import SLOWDOWN, slowdown_now

LIMIT_S = 0.1 * SLOWDOWN
"""Most CPU time of one callback, seconds."""
LOOK_S = 0.01

_ROOT = Path(__file__).parents[1]
_PRODUCT = tuple(f"{_ROOT / name}/" for name in ("server", "protocol", "envs"))
_MAKES_APPLICATIONS = f"{_ROOT}/server/errata_server/app/factory.py"
_ELSEWHERE = tuple(
    f"{_ROOT}/{name}"
    for name in (
        "protocol/errata_protocol/mux/client",
        "server/errata_server/cli/",
        "envs/errata_redteam/",
        "envs/swe_bench_lite_env/programs/",
        *(f"envs/swe_bench_lite_env/server/prepare/{file}.py" for file in ("draft", "index", "validate")),
        *(f"envs/terminal_env/server/check/{file}.py" for file in ("checker", "cli", "degenerate")),
    )
)
"""Beginnings of the paths of code that runs on loops of clients and of commands, which nobody else waits for."""
_SIMULATED_THREADS = (("_run_inline", "loop.py"), ("_next", "threads.py"))
"""Functions of errata_server.simulation in which the loop plays a thread, and their modules."""
_TESTS = f"{_ROOT / 'tests'}/"
_IMPORT = "<frozen importlib._bootstrap>"
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


_Seen = tuple[float, str | None]
"""CPU time of the thread without garbage collections, and where code of the product was at work; None where other code
was."""
NONE: tuple[float | None, float] = (None, 0.0)
"""What `LoopWatch._collecting` has for a thread without garbage collections."""


class LoopWatch:
    """Watches all event loops of this process.

    Args:
        product: Beginnings of the paths of code whose time counts.
    """

    def __init__(self, product: tuple[str, ...] = _PRODUCT) -> None:
        self._product = product
        self._running: dict[int, list[_Seen]] = {}  # by thread: when and where its callback was seen
        self._collecting: dict[int, tuple[float | None, float]] = {}  # by thread: since when, and sum before
        self._found: list[str] = []
        self._original = events.Handle._run
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        original, running, collecting = self._original, self._running, self._collecting
        clock, ident, limit_s, long = time.thread_time, threading.get_ident, LIMIT_S, self._long

        def _run(handle: Any) -> Any:
            thread = ident()
            before = running.get(thread)
            running[thread] = places = []
            began = clock() - collecting.get(thread, NONE)[1]
            try:
                return original(handle)
            finally:
                used = clock() - collecting.get(thread, NONE)[1] - began
                if used > limit_s:
                    long(handle, began, used, places)
                if before is None:
                    del running[thread]
                else:
                    running[thread] = before

        counted_work.NOT_COUNTED.add(_run.__code__)
        events.Handle._run = _run  # type: ignore[method-assign]
        gc.callbacks.append(self._collected)
        self._thread = threading.Thread(target=self._look, name="loop-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        events.Handle._run = self._original  # type: ignore[method-assign]
        gc.callbacks.remove(self._collected)
        if self._thread is not None:
            self._thread.join()

    def take(self) -> list[str]:
        """Return what was found since the last call."""
        found, self._found = self._found, []
        return found

    def _collected(self, phase: str, info: object) -> None:
        thread = threading.get_ident()
        since, total = self._collecting.get(thread, NONE)
        now = time.thread_time()
        self._collecting[thread] = (now, total) if phase == "start" or since is None else (None, total + now - since)

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_S):
            if not self._running:
                continue
            # CPython 3.11 holds a lock of its interpreter here. A collection that begins meanwhile may give up the GIL,
            # to a thread that starts another one and waits for that lock with the GIL (gh-106883): all hangs.
            with no_collections():
                frames = sys._current_frames()
            for thread, places in list(self._running.items()):
                frame = frames.get(thread)
                if frame is not None:
                    with contextlib.suppress(OSError):  # the thread has ended
                        since, total = self._collecting.get(thread, NONE)
                        now = time.clock_gettime(time.pthread_getcpuclockid(thread)) if since is None else since
                        places.append((now - total, self._place(frame)))
            frame = None  # a frame that is kept keeps its variables
            del frames

    def _place(self, frame: FrameType | None) -> str | None:
        """Return where code of the product is at work; None where other code is."""
        found = outermost = None
        in_coroutine = False
        while frame is not None and frame.f_code.co_name != "_run_once":
            name = frame.f_code.co_filename
            if (frame.f_code.co_name, Path(name).name) in _SIMULATED_THREADS:
                return None
            if (
                frame.f_code.co_name == "build_middleware_stack"
                or name in (_IMPORT, _MAKES_APPLICATIONS)
                or name.startswith(_ELSEWHERE)
            ):
                return None
            is_test = name.startswith(_TESTS) and not name.startswith(self._product)
            is_coroutine = bool(frame.f_code.co_flags & _COROUTINE)
            if is_test and (found is None or (is_coroutine and not in_coroutine)):
                return None
            in_coroutine = in_coroutine or is_coroutine
            if name.startswith(self._product) and "/tasks/" not in name:
                outermost = f"{frame.f_code.co_qualname} ({Path(name).relative_to(_ROOT)}:{frame.f_lineno})"
                found = found or outermost
            frame = frame.f_back
        return found if found in (None, outermost) else f"{found} of {outermost}"

    def _long(self, handle: Any, began_s: float, used_s: float, places: list[_Seen]) -> None:
        """Note a callback if the product's share of its time is too long.

        The time between two looks is the product's if its code was at work at both: in a call of C code, which lets no
        other thread look, it was at work on one side only.
        """
        own_s, before_s, before = 0.0, began_s, not self._is_of_test(handle)
        for at_s, place in [*places, (began_s + used_s, places[-1][1] if places else "")]:
            if before and place is not None:
                own_s += at_s - before_s
            before_s, before = at_s, place is not None
        # Processors that share a core make each other slower, so the machine is measured again.
        if own_s > LIMIT_S and own_s > 0.1 * slowdown_now():
            own = [place for _, place in places if place is not None]
            where = max(set(own), key=own.count) if own else "one call of C code"
            self._found.append(f"{own_s:.2f} s in {where}, by {handle!r}"[:600])

    def _is_of_test(self, handle: Any) -> bool:
        callback = handle._callback
        task = getattr(callback, "__self__", None)
        code = getattr(task.get_coro(), "cr_code", None) if isinstance(task, asyncio.Task) else None
        code = code or getattr(callback, "__code__", None)
        name = "" if code is None else code.co_filename
        return name.startswith(_TESTS) and not name.startswith(self._product)
