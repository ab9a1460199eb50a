"""Serves requests on the broker's socket. A connection carries one request, as JSON lines.

-> {"do": "exec", "container": "...", "argv": [...], "timeout_s": 30}
-> {"data": "<base64>"} ... {"end": true}         the input of exec and copy_in
-> {"stop": true}                                 kills an exec; so does closing the connection
<- {"stdout": "<base64>"}, {"stderr": ...}, {"data": ...}
<- {"ok": {...}}  or  {"error": {"code": "...", "message": "..."}}
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import archives
from .engine import SLOW_S, Engine, Policy
from .lines import CHUNK_BYTES, Disconnected, Lines, text_of
from .programs import Exec
from .schema import Refused, check_request
from .spool import Spool

log = logging.getLogger("errata.sandboxd")

REQUEST_S = 10.0
"""Time within which the line of a request has to arrive."""
IDLE = 128
"""Most connections without a running request. One more ends the oldest of them."""
_BACKLOG = 1024


class Connection(socketserver.BaseRequestHandler):
    """Handles one connection, which has one request."""

    server: Service
    request: socket.socket

    def setup(self) -> None:
        self.lines = Lines(self.request, self.server.parsing)
        self.evicted = False
        self.verb, self.outcome = "?", "ok"

    def handle(self) -> None:
        """Read the request, carry it out, send the answer or error, and log it."""
        began, service = time.monotonic(), self.server
        with self._errors_sent():
            with service.idle(self):
                self.verb, arguments = self.lines.request(time.monotonic() + REQUEST_S, check_request)
            if self.evicted:
                raise Disconnected  # the caller was asked to send it again, so nothing of this request may run
            with service.request_slot(), self._errors_sent():  # `end` waits until an error is sent, too
                self.lines.send({"ok": self._carry_out(self.verb, arguments)})
        took = time.monotonic() - began
        log.info("%s %s %s %.0f ms", service.engine.owner, self.verb, self.outcome, took * 1000)
        if self.outcome != "gone":
            with service.idle(self):
                self.lines.finish()

    @contextlib.contextmanager
    def _errors_sent(self) -> Iterator[None]:
        """Send the client the error that is raised inside."""
        try:
            yield
        except Refused as error:
            self.outcome = error.code
            self._send_error(error.code, error.message)
        except Disconnected:
            self.outcome = "gone"
            if self.evicted:
                self.outcome = "busy"
                self._send_error("busy", f"{IDLE} other connections wait for a request: try again")
        except Exception as error:
            self.outcome = "failed"
            log.exception("%s failed", self.verb)
            self._send_error("engine_failed", f"{type(error).__name__}: {error}")

    def _send_error(self, code: str, message: str) -> None:
        with contextlib.suppress(Disconnected):
            self.lines.send({"error": {"code": code, "message": message}})

    def _carry_out(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out a checked request and return its answer."""
        engine = self.server.engine
        if verb == "exec":
            return Exec(self.lines, engine, self.server.ending, **arguments).run()
        if verb == "copy_in":
            return self._copy_in(**arguments)
        if verb == "copy_out":
            return self._copy_out(**arguments)
        answer: dict[str, Any] = getattr(engine, verb)(**arguments)  # only names in VERBS pass `check_request`
        return answer

    def _copy_in(self, container: str) -> dict[str, Any]:
        """Receive an archive, check it member by member, and unpack it in a container when all of it is right."""
        engine, most = self.server.engine, self.server.engine.policy.archive_bytes
        engine.inspect(container)  # refuse an unknown container before receiving the archive
        too_large = f"an archive that has more than {most} bytes when it is written out: raise --archive-mib"
        with engine.copying(), self.server.spool.file(most, too_large) as clean:
            sent = _Received(self.lines.data(time.monotonic() + SLOW_S), most)
            archives.copy_checked(sent, clean)
            sent.drop()
            engine.put(container, clean.rewound())
        return {}

    def _copy_out(self, container: str, path: str, max_bytes: int) -> dict[str, Any]:
        """Send an archive of a path.

        What the client does not read at once is kept, so a slow client does not occupy the engine. A client may close
        the connection once it has read enough.
        """
        engine = self.server.engine
        most = min(max_bytes, engine.policy.copy_out_bytes)
        bound = "raise --copy-out-mib" if most < max_bytes else "raise max_bytes"
        with self.server.spool.file(most, f"{path} has more than {most} bytes: {bound}") as held:
            sent = 0

            def piece() -> dict[str, Any] | None:
                nonlocal sent
                data = held.read_at(sent, CHUNK_BYTES)
                sent += len(data)
                if not data and sent:
                    held.clear()
                    sent = 0
                return {"data": text_of(data)} if data else None

            with engine.copying(), engine.get(container, path) as (stream, about):
                for data in stream:
                    for at in range(0, len(data), CHUNK_BYTES):
                        held.write(data[at : at + CHUNK_BYTES])
                        self.lines.offer(piece)
            while (line := piece()) is not None:
                self.lines.send(line)
        return {"mode": about.get("mode"), "size": about.get("size"), "link": about.get("linkTarget", "")}


class _Received(io.RawIOBase):
    """The archive that a client sends, as a file that is read once.

    Args:
        data: The pieces.
        most_bytes: Most bytes of all pieces.
    """

    def __init__(self, data: Iterator[bytes], most_bytes: int) -> None:
        self._data, self._most_bytes = data, most_bytes
        self._total, self._rest = 0, memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; none at the end.

        Raises:
            Refused: The client sent more than it may, or something else than data.
            Disconnected: The client closed the connection.
        """
        while not self._rest:
            piece = next(self._data, None)
            if piece is None:
                return b""
            self._total += len(piece)
            if self._total > self._most_bytes:
                raise Refused("too_large", f"an archive of more than {self._most_bytes} bytes: raise --archive-mib")
            self._rest = memoryview(piece)
        size = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:size], self._rest[size:]
        return bytes(found)

    def drop(self) -> None:
        """Read what follows the end of the archive."""
        while self.read():
            pass


class Service(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The broker's socket for one owner.

    Args:
        path: Path of the socket. A process that can connect to it controls the owner's containers.
        policy: What is allowed.
        owner: Label of the containers and layers of this socket.
        mode: Permission bits of the socket.
        group: Group of the socket; empty for that of the process.
    """

    daemon_threads = True
    request_queue_size = _BACKLOG

    def __init__(self, path: Path, policy: Policy, owner: str, mode: int = 0o660, group: str = "") -> None:
        self.engine = Engine(policy, owner)
        self.spool = Spool(policy.spool_bytes)
        self.ending = threading.Event()
        self.parsing = threading.Lock()
        self._path = path
        self._idle: dict[Connection, None] = {}
        self._stopping = False
        self._running = 0
        self._changed = threading.Condition()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: nobody meets a socket that does not listen yet or has other permissions.
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        super().__init__(str(new), Connection, bind_and_activate=False)
        self.server_bind()
        new.chmod(mode)
        if group:
            shutil.chown(new, group=group)
        self.server_activate()
        self._inode = new.stat().st_ino
        new.replace(path)

    @contextlib.contextmanager
    def idle(self, connection: Connection) -> Iterator[None]:
        """Count a connection as one without a running request. The oldest of too many is evicted."""
        with self._changed:
            oldest = next(iter(self._idle)) if len(self._idle) >= IDLE else None
            if oldest is not None:
                del self._idle[oldest]
                oldest.evicted = True
                with contextlib.suppress(OSError):
                    oldest.request.shutdown(socket.SHUT_RD)  # its thread wakes up, and can still send
            self._idle[connection] = None
        try:
            yield
        finally:
            with self._changed:
                self._idle.pop(connection, None)

    @contextlib.contextmanager
    def request_slot(self) -> Iterator[None]:
        """Count a request while it runs.

        Raises:
            Refused: ``busy``: too many requests are running, or the broker is being stopped.
        """
        most = self.engine.policy.connections
        with self._changed:
            if self._stopping:
                raise Refused("busy", "the broker is being stopped: try again")
            if self._running >= most:
                raise Refused("busy", f"{most} requests at once: try again")
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def end(self, grace_s: float) -> None:
        """Take no more requests, wait for those that run, and end those that take longer.

        Args:
            grace_s: Seconds for requests to end, and again for programs to be killed.
        """
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # else it is another broker's by now
                self._path.unlink()
        self.shutdown()
        with self._changed:
            self._stopping = True
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # who connected before the socket was gone gets an answer, too
                self.process_request(self.socket.accept()[0], "")
        self.server_close()
        for _ in range(2):
            with self._changed:
                if self._changed.wait_for(lambda: self._running == 0, grace_s):
                    return
            self.ending.set()

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # `Lines.finish` has ended it where somebody may still read

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a connection failed")
