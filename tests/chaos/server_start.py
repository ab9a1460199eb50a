"""Starts a server from a coroutine, and leaves none when that is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path

from errata_server.process import ServerProcess


async def started(
    target: str, data_dir: Path, *options: str, env: Mapping[str, str] | None = None, start_s: float = 120.0
) -> ServerProcess:
    """Return a server whose port is open. The arguments are those of `ServerProcess`.

    A thread waits for it, and a thread cannot be cancelled: where nobody waits for it any more, it kills the server.
    `asyncio.run` waits for such threads before it returns.
    """
    lock = threading.Lock()
    made: list[ServerProcess] = []
    wanted = True

    def start() -> None:
        server = ServerProcess(target, data_dir, *options, env=env, start_s=start_s)
        with lock:
            if wanted:
                made.append(server)
                return
        server.kill()

    try:
        await asyncio.to_thread(start)
    except asyncio.CancelledError:
        with lock:
            wanted = False
        for server in made:
            server.kill()
        raise
    return made[0]
