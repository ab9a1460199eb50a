"""The event loop that all blocking clients of this process share, in one daemon thread.

OpenEnv's blocking client has a loop and a thread of its own: a trainer with 1,000 rollouts would have 1,000, and no two
could share a connection. After ``os.fork`` the child process has none of its parent's threads. It starts a loop of its
own and must not use what was opened before the fork (`forks`).
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Awaitable, Callable

_SHUTDOWN_S = 3.0
_log = logging.getLogger("errata.client")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_closers: list[Callable[[asyncio.AbstractEventLoop], Awaitable[None]]] = []
_forgetters: list[Callable[[], None]] = []
_forks = 0


def forks() -> int:
    """Return how many forks lie between the import of this module and this process.

    An object that was made at another count belongs to a parent process and must not be used.
    """
    return _forks


def loop() -> asyncio.AbstractEventLoop:
    """Return the running loop of the background thread; start the thread if there is none."""
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            made = asyncio.new_event_loop()
            _thread = threading.Thread(target=_run, args=(made,), name="errata-client", daemon=True)
            _thread.start()
            _loop = made
        return _loop


def at_exit(close: Callable[[asyncio.AbstractEventLoop], Awaitable[None]]) -> None:
    """Register a coroutine function: ``close(loop)`` runs on the background loop at exit, three seconds at most."""
    _closers.append(close)


def after_fork(forget: Callable[[], None]) -> None:
    """Register a function to be called in the child process after ``os.fork``."""
    _forgetters.append(forget)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _after_fork() -> None:
    global _lock, _loop, _thread, _forks
    _lock = threading.Lock()  # a thread of the parent, which the child does not have, may hold the old one
    _loop = _thread = None
    _forks += 1
    for forget in _forgetters:
        forget()


def _shutdown() -> None:
    running, thread = _loop, _thread
    if running is None or thread is None or not thread.is_alive():
        return

    async def close() -> None:
        async with asyncio.timeout(_SHUTDOWN_S):
            await asyncio.gather(*(close(running) for close in _closers))

    ended = asyncio.run_coroutine_threadsafe(close(), running)
    try:
        ended.result(_SHUTDOWN_S + 1.0)
    except Exception as error:  # the process ends anyway, and the server ends the sessions when they expire
        _log.debug("clients were not closed at exit: %r", error)
    running.call_soon_threadsafe(_cancel_all, running)
    thread.join(1.0)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()

    async def stop() -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.stop()

    loop.create_task(stop())


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_shutdown)
