"""`HealthPort`: answers probes on a port and by a thread of its own, however busy the event loop is.

The workers of a fleet share the port: the next that is free answers.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any

from errata_os.service_threads import ServiceThread
from errata_protocol.errors import InvalidRequest

from ..runtime.loop_lag import LoopLag
from ..runtime.readiness import Readiness

log = logging.getLogger("errata.server")

STUCK_S = 120.0
"""A server whose event loop has not run for so long is not healthy: sessions continue after a restart."""
MAX_CONNECTIONS = 16
"""Connections that are answered at a time; further ones are closed."""
REQUEST_S = 5.0
"""Time in which a request has to come, seconds."""


def listen_for_probes(host: str, port: int) -> socket:
    """Return a listening socket for a `HealthPort`.

    Args:
        host: Address to listen on.
        port: Port; 0 takes a free one.

    Raises:
        InvalidRequest: The address cannot be listened on.
    """
    listening = socket(AF_INET6 if ":" in host else AF_INET)
    try:
        listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(MAX_CONNECTIONS)
    except OSError as error:
        listening.close()
        raise InvalidRequest(
            f"cannot listen on {host}:{port} for probes: {error.strerror or error}; set another ERRATA_HEALTH_PORT"
        ) from error
    listening.setblocking(False)  # another worker may have taken the connection
    return listening


def _no_one() -> list[str]:
    return []


class HealthPort:
    """Serves ``GET /health`` and ``GET /ready`` without authentication.

    Args:
        listening: The socket that `listen_for_probes` returned; this object closes it.
        readiness: Answers ``/ready``, as on the server's own port.
        lag: Lag of the server's event loop. ``/health`` is 503 while that has not run for `STUCK_S`.
        stuck_others: Returns a text for each other worker whose event loop has not run for `STUCK_S`, with which
            ``/health`` is 503 too.
    """

    def __init__(
        self,
        listening: socket,
        readiness: Readiness,
        lag: LoopLag,
        stuck_others: Callable[[], list[str]] = _no_one,
    ) -> None:
        def answer(path: str) -> tuple[int, dict[str, Any]] | None:
            if path == "/ready":
                reasons = readiness.reasons() if lag.is_measured else ["the server is starting, or has ended"]
                return (503, {"status": "unavailable", "reasons": reasons}) if reasons else (200, {"status": "ready"})
            if path != "/health":
                return None
            own = [f"the event loop has not run for {late_s:.0f} s"] if (late_s := lag.overdue_s) > STUCK_S else []
            stuck = own + stuck_others()
            return (503, {"status": "stuck", "reasons": stuck}) if stuck else (200, {"status": "healthy"})

        self._server = _Server(listening, answer)
        self._thread = ServiceThread("errata-health", lambda: self._server.serve_forever(poll_interval=0.1))

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_port

    def trouble(self) -> str | None:
        """Return a message if its thread failed, else None."""
        return self._thread.trouble

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket, answer: Callable[[str], tuple[int, dict[str, Any]] | None]) -> None:
        self.answer = answer
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_port = listening.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if fewer than `MAX_CONNECTIONS` do."""
        if self._places.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # the system gives no more threads
                self._places.release()
                self.shutdown_request(request)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Log an error: a prober that went away, most likely."""
        log.debug("a probe of the health port failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _Server
    server_version, sys_version = "errata", ""

    def do_GET(self) -> None:
        """Answer, then close the connection."""
        found = self.server.answer(self.path.split("?", 1)[0])
        status, body = found or (404, {"message": "there are /health and /ready", "code": "VALIDATION_ERROR"})
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every few seconds."""
