"""What ``errata serve`` serves, on a real port, by a thread of this process: the start of a process costs seconds.

For tests that need sockets and no process: nothing is killed, no signal is sent and no option is parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from errata_server.serve.server import (
    Bind,
    Served,
    _AnnouncingServer,
    _config,
    _ReadOnlyServer,
    build,
    listen,
    prepare,
    url_of,
)
from errata_server.settings import Settings

END_S = 60.0


class _Server(_AnnouncingServer):
    """Listens to no signal, which only a main thread can."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class LocalServer:
    """A server.

    Args:
        targets: What to serve, as on the command line.
        data_dir: Data directory.
        settings: Other settings of the server.
        port: Port to listen on; 0 for a free one.
        **more: As for `build`.

    Attributes:
        url: Where it is.
        served: The application and its environments.
    """

    def __init__(
        self,
        targets: str | list[str],
        data_dir: Path,
        settings: Settings | None = None,
        *,
        port: int = 0,
        **more: Any,
    ) -> None:
        bind = Bind(port=port)
        given = (settings or Settings()).model_copy(update={"data_dir": data_dir})
        names = [targets] if isinstance(targets, str) else targets
        self.served: Served = build(names, given, bind=bind, mode=None, **more)
        listening = listen(bind)
        self.url = url_of(listening)
        self._server = _Server(_config(self.served.app, bind), self.served, self.url)
        self._thread = threading.Thread(target=asyncio.run, args=[self._serve(listening)], name="local-server")

    async def _serve(self, listening: Any) -> None:
        try:
            await prepare(self.served)
            await self._server.serve(sockets=[listening])
        finally:
            await self.served.runtime.close()

    def __enter__(self) -> LocalServer:
        self._thread.start()  # who connects before it serves waits in the backlog
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(END_S)
        assert not self._thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def serving(app: Any, stopping: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Serve an application without a runtime, such as that of bundles; yield its URL.

    Args:
        app: The application.
        stopping: Called when the server begins to stop.
    """
    bind = Bind(port=0)
    listening = listen(bind)
    server = _Quiet(_config(app, bind), stopping)
    thread = threading.Thread(target=asyncio.run, args=[server.serve(sockets=[listening])], name="local-server")
    thread.start()
    try:
        yield url_of(listening)
    finally:
        server.should_exit = True
        thread.join(END_S)


class _Quiet(_ReadOnlyServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
