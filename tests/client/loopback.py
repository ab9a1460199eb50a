"""Serve an ASGI application on a loopback port of the kernel's choice, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def served(app: Any, port: int = 0, **options: Any) -> Iterator[str]:
    """Yield the ``http://`` base URL of ``app``.

    The socket listens before the server runs, so a client that connects at once waits in its backlog: no polling.

    Args:
        app: ASGI application.
        port: 0 lets the kernel choose; a number takes over the address of a server that has ended.
        options: Further options of `uvicorn.Config`.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, ws_max_size=64 * 1024**2, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-server", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive(), "the test server did not stop"
