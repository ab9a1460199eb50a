"""The broker's connections: one request a connection, as JSON lines.

-> {"do": "exec", "container": "...", "argv": [...], "timeout_s": 30}
-> {"data": "<base64>"} ... {"end": true}         what exec and copy_in read
-> {"stop": true}                                 ends an exec; so does closing the connection
<- {"stdout": "<base64>"}, {"stderr": ...}, {"data": ...}
<- {"ok": {...}}  or  {"error": {"code": "...", "message": "..."}}
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import select
import socket
import socketserver
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import archives
from .engine import Engine, Policy
from .schema import Refused, checked

log = logging.getLogger("errata.sandboxd")

MAX_LINE = 2 * 1024**2
_CONNECTIONS = 256
_SENT_AT_ONCE = 1 << 16
_FAST_BYTES, _SLOW_BYTES_PER_S = 16 * 1024**2, 32 * 1024**2
"""`yes` prints 2 GB/s; what comes after the first bytes is read no faster than this: it would take a core."""


class Gone(Exception):
    """The caller closed its connection."""


class Connection(socketserver.BaseRequestHandler):
    """One request of one caller."""

    server: Service
    request: socket.socket

    def setup(self) -> None:
        self._received = bytearray()
        self._searched = 0

    def handle(self) -> None:
        began, verb, outcome = time.monotonic(), "?", "ok"
        try:
            with self.server.room():
                verb, arguments = checked(self._line())
                answer = self._carry_out(verb, arguments)
                self.send({"ok": answer})
        except Refused as error:
            outcome = error.code
            with contextlib.suppress(Gone):
                self.send({"error": {"code": error.code, "message": error.message}})
        except Gone:
            outcome = "gone"
        except Exception as error:
            outcome = "failed"
            log.exception("%s failed", verb)
            with contextlib.suppress(Gone):
                self.send({"error": {"code": "engine_failed", "message": f"{type(error).__name__}: {error}"}})
        took = time.monotonic() - began
        log.info("%s %s %s %.0f ms", self.server.engine.owner, verb, outcome, took * 1000)

    def _carry_out(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        engine = self.server.engine
        if verb == "exec":
            return Exec(self, engine, **arguments).run()
        if verb == "copy_in":
            return self._copy_in(**arguments)
        if verb == "copy_out":
            return self._copy_out(**arguments)
        answer: dict[str, Any] = getattr(engine, verb)(**arguments)  # `checked` let nothing pass that is not in VERBS
        return answer

    def _copy_in(self, container: str) -> dict[str, Any]:
        most = self.server.engine.policy.archive_bytes
        self.server.engine.inspect(container)  # before anything of the archive is kept
        with tempfile.SpooledTemporaryFile(8 * 1024**2) as sent, tempfile.SpooledTemporaryFile(8 * 1024**2) as clean:
            for data in self.data():
                sent.write(data)
                if sent.tell() > most:
                    raise Refused("too_large", f"an archive of more than {most} bytes: raise --archive-bytes")
            sent.seek(0)
            archives.checked(sent, clean)
            clean.seek(0)
            self.server.engine.put(container, clean)
        return {}

    def _copy_out(self, container: str, path: str, max_bytes: int) -> dict[str, Any]:
        sent = 0
        with self.server.engine.get(container, path) as (stream, about):
            for data in stream:
                sent += len(data)
                if sent > max_bytes:
                    raise Refused("too_large", f"{path} has more than {max_bytes} bytes")
                for at in range(0, len(data), _SENT_AT_ONCE):
                    self.send({"data": _text(data[at : at + _SENT_AT_ONCE])})
        return {"mode": about.get("mode"), "size": about.get("size"), "link": about.get("linkTarget", "")}

    def data(self) -> Iterator[bytes]:
        """Yield what the caller sends after its request."""
        while (data := data_of(self._line())) is not None:
            yield data

    def _line(self) -> Any:
        while (line := self.next_line()) is None:
            self.receive()
        return line

    def receive(self) -> None:
        """Read what the caller sent.

        Raises:
            Gone: It closed its side.
        """
        try:
            data = self.request.recv(1 << 16)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._received += data

    def next_line(self) -> Any:
        """Return the next line that was received whole, None if there is none yet."""
        end = self._received.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._received)
            if len(self._received) > MAX_LINE:
                raise Refused("too_large", f"a line of more than {MAX_LINE} bytes: send data in pieces")
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        try:
            return json.loads(line)
        except ValueError:
            raise Refused("invalid", "a line of JSON is wanted") from None

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.request.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Gone from error


class Exec:
    """One program in a container, with its streams. It never outlives its deadline, its output budget or its caller.

    The engine cannot end an exec, and killing its process leaves the children; a restart of the container ends all of
    them and keeps the files.
    """

    def __init__(
        self,
        caller: Connection,
        engine: Engine,
        container: str,
        argv: list[str],
        timeout_s: float,
        root: bool = False,
        output_bytes: int = 4 * 1024**3,
    ) -> None:
        self._caller, self._engine, self._container = caller, engine, container
        self._argv, self._root, self._output_bytes = argv, root, output_bytes
        self._timeout_s, self._until = timeout_s, 0.0
        self._shut = False

    def run(self) -> dict[str, Any]:
        name, link, rest = self._engine.exec_start(self._container, self._argv, root=self._root)
        status, self._until = None, time.monotonic() + self._timeout_s
        try:
            with link:
                link.setblocking(False)
                why = self._relay(link, rest)
            if why == "exit":
                status = self._status(name)
                why = "timeout" if status is None else why
        except BaseException:
            self._kill()
            raise
        if why != "exit":
            self._kill()
        return {"ended": why, "exit": status}

    def _relay(self, link: socket.socket, rest: bytes) -> str:
        """Carry the streams of both sides; return why they ended: exit, timeout, output or stopped.

        Raises:
            Gone: The caller closed its connection.
        """
        caller = self._caller
        incoming, outgoing, total = bytearray(rest), bytearray(), 0
        giving, slow_from = True, 0.0
        while True:
            total += self._forward(incoming)
            if total > self._output_bytes:
                return "output"
            while len(outgoing) < _SENT_AT_ONCE and (line := caller.next_line()) is not None:
                if line == {"stop": True}:
                    return "stopped"
                if not giving:
                    raise Refused("invalid", 'after the end only {"stop": true} is taken')
                data = data_of(line)
                giving = data is not None
                outgoing += data or b""
            pause = 0.0
            if total > _FAST_BYTES:
                slow_from = slow_from or time.monotonic()
                pause = (total - _FAST_BYTES) / _SLOW_BYTES_PER_S - (time.monotonic() - slow_from)
            left = self._until - time.monotonic()
            if left <= 0:
                return "timeout"
            poll = select.poll()
            if not giving or len(outgoing) < _SENT_AT_ONCE:
                poll.register(caller.request, select.POLLIN)
            wants = (select.POLLIN if pause <= 0 else 0) | (select.POLLOUT if outgoing else 0)
            if wants:
                poll.register(link, wants)
            ready = dict(poll.poll(1000 * min(left, pause if pause > 0 else left) + 1))
            if caller.request.fileno() in ready:
                caller.receive()
            events = ready.get(link.fileno(), 0)
            if events & select.POLLOUT:
                try:
                    del outgoing[: link.send(outgoing)]
                except BlockingIOError:
                    pass
                except OSError:  # the program reads no more
                    outgoing.clear()
            if not giving and not outgoing and not self._shut:
                self._shut = True
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_WR)
            if events & ~select.POLLOUT:
                try:
                    more = link.recv(1 << 16)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise Refused("engine_away", f"the engine closed an exec: {error}") from error
                if not more:
                    self._forward(incoming)
                    return "exit"
                incoming += more

    def _forward(self, incoming: bytearray) -> int:
        """Send whole frames of the engine on to the caller; return how many bytes of output they held."""
        total = 0
        while len(incoming) >= 8:
            kind, size = struct.unpack_from(">BxxxL", incoming)
            if len(incoming) < 8 + size:
                break
            data = bytes(incoming[8 : 8 + size])
            del incoming[: 8 + size]
            total += size
            stream = "stderr" if kind == 2 else "stdout"
            for at in range(0, size, _SENT_AT_ONCE):
                self._caller.send({stream: _text(data[at : at + _SENT_AT_ONCE])})
        return total

    def _status(self, name: str) -> int | None:
        wait = 0.002
        while True:
            status = self._engine.exec_status(name)
            if status is not None:
                return status
            if time.monotonic() >= self._until:
                return None
            time.sleep(wait)
            wait = min(wait * 2, 0.1)

    def _kill(self) -> None:
        try:
            self._engine.restart(self._container)
        except Refused as error:
            if error.code != "unknown":
                log.warning("container %s was not restarted: %s", self._container[:12], error.message)
                raise


class Service(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The broker's socket for one owner.

    Args:
        path: Where the socket is made; whoever can open it has the owner's containers.
        policy: What is allowed.
        owner: Label of what is made and reached through this socket.
        mode: Permission bits of the socket.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path, policy: Policy, owner: str, mode: int = 0o660) -> None:
        self.engine = Engine(policy, owner)
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            path.unlink()
        super().__init__(str(path), Connection, bind_and_activate=False)
        self.server_bind()
        path.chmod(mode)
        self.server_activate()

    @contextlib.contextmanager
    def room(self) -> Iterator[None]:
        """Hold one of the places for requests."""
        if not self._room.acquire(blocking=False):
            raise Refused("conflict", f"{_CONNECTIONS} requests at once: wait for one to end")
        try:
            yield
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a connection failed")


def data_of(line: Any) -> bytes | None:
    """Return the data of a caller's line, None for the end.

    Raises:
        Refused: It is neither.
    """
    if isinstance(line, dict) and line.get("end") is True:
        return None
    try:
        return base64.b64decode(line["data"], validate=True)
    except (KeyError, TypeError, ValueError):
        raise Refused("invalid", 'a line with "data" in base64 or "end" is wanted') from None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
