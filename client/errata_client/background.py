"""The event loop that blocking clients of this process share, in one daemon thread.

OpenEnv's blocking client has a loop and a thread of its own; a trainer with 1,000 rollouts would have 1,000, and no
two could share a socket. After ``os.fork`` the child has none of its parent's threads: it begins with a loop of its
own, and what was opened before the fork belongs to the parent (`forks`).
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
    """Return how often this process was forked off since the module was loaded: what was made before is not usable."""
    return _forks


def loop() -> asyncio.AbstractEventLoop:
    """Return the running loop of the background thread, started where it is not."""
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            made = asyncio.new_event_loop()
            _thread = threading.Thread(target=_run, args=(made,), name="errata-client", daemon=True)
            _thread.start()
            _loop = made
        return _loop


def at_exit(close: Callable[[asyncio.AbstractEventLoop], Awaitable[None]]) -> None:
    """Have ``close(loop)`` awaited on the background loop when the interpreter ends, a few seconds at most."""
    _closers.append(close)


def after_fork(forget: Callable[[], None]) -> None:
    """Have ``forget()`` called in a process that was forked off: what this one holds is not usable there."""
    _forgetters.append(forget)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _after_fork() -> None:
    global _lock, _loop, _thread, _forks
    _lock = threading.Lock()  # the parent's may be held, by a thread that is not here
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
    except Exception as error:  # the process ends: what the server still holds, it reclaims by itself
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
