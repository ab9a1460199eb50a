"""Servers of the conformance kit's tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from errata_conformance.results import Result
from errata_conformance.sample.episodes import World
from errata_conformance.sample.server import running
from errata_conformance.server_side.run import prepared, run, selected
from errata_conformance.server_side.target import Target

RFCS = ("014", "015", "016")


@contextmanager
def sample(defect: str | None = None, **options: object) -> Iterator[str]:
    """Serve the sample server, or a wrong one, in a thread; yield its URL."""
    with in_thread(running(World(defect, **options), 0)) as url:  # type: ignore[arg-type]
        yield url


@contextmanager
def in_thread(server: uvicorn.Server) -> Iterator[str]:
    """Run a server in a thread; yield its URL."""
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        for _ in range(1000):
            if server.started:
                break
            threading.Event().wait(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)
        assert not thread.is_alive()


def checked(
    url: str, faults: bool = False, only: tuple[str, ...] = (), rfcs: tuple[str, ...] = RFCS, **options: object
) -> list[Result]:
    """Hold a server against all statements."""

    async def main() -> list[Result]:
        target = Target(url, **options)  # type: ignore[arg-type]
        await prepared(target, "tally")
        checks = [
            one for one in selected(rfcs, None, only) if faults or not one.body.__module__.endswith("check_faults")
        ]
        return await run(target, checks, jobs=8)

    return asyncio.run(main())
