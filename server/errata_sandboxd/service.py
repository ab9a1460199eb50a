"""Serves requests on the broker's socket and runs programs in containers. A connection carries one request, as JSON
lines.

-> {"do": "exec", "container": "...", "argv": [...], "timeout_s": 30}
-> {"data": "<base64>"} ... {"end": true}         the input of exec and copy_in
-> {"stop": true}                                 kills an exec; so does closing the connection
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
from .schema import Refused, check_request

log = logging.getLogger("errata.sandboxd")

MAX_LINE = 2 * 1024**2
_CONNECTIONS = 256
_STALL_S = 60.0
"""Time without a byte read by the client after which its connection is closed."""
_CHUNK_BYTES = 1 << 16
_FAST_BYTES, _SLOW_BYTES_PER_S = 16 * 1024**2, 32 * 1024**2
"""After the first bytes output is read at a limited rate: `yes` prints 2 GB/s, and reading that would use a core."""


class Disconnected(Exception):
    """The client closed its connection."""


class Connection(socketserver.BaseRequestHandler):
    """Handles one connection, which has one request."""

    server: Service
    request: socket.socket

    def setup(self) -> None:
        self._received = bytearray()
        self._searched = 0
        self._unsent = bytearray()

    def handle(self) -> None:
        """Read the request, carry it out, send the answer or error, and log it."""
        began, verb, outcome = time.monotonic(), "?", "ok"
        try:
            with self.server.request_slot():
                verb, arguments = check_request(self._line())
                answer = self._carry_out(verb, arguments)
                self.send({"ok": answer})
        except Refused as error:
            outcome = error.code
            with contextlib.suppress(Disconnected):
                self.send({"error": {"code": error.code, "message": error.message}})
        except Disconnected:
            outcome = "gone"
        except Exception as error:
            outcome = "failed"
            log.exception("%s failed", verb)
            with contextlib.suppress(Disconnected):
                self.send({"error": {"code": "engine_failed", "message": f"{type(error).__name__}: {error}"}})
        took = time.monotonic() - began
        log.info("%s %s %s %.0f ms", self.server.engine.owner, verb, outcome, took * 1000)

    def _carry_out(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out a checked request and return its answer."""
        engine = self.server.engine
        if verb == "exec":
            return Exec(self, engine, **arguments).run()
        if verb == "copy_in":
            return self._copy_in(**arguments)
        if verb == "copy_out":
            return self._copy_out(**arguments)
        answer: dict[str, Any] = getattr(engine, verb)(**arguments)  # only names in VERBS pass `check_request`
        return answer

    def _copy_in(self, container: str) -> dict[str, Any]:
        """Receive an archive, check it and unpack it in a container."""
        most = self.server.engine.policy.archive_bytes
        self.server.engine.inspect(container)  # refuse an unknown container before receiving the archive
        with tempfile.SpooledTemporaryFile(8 * 1024**2) as sent, tempfile.SpooledTemporaryFile(8 * 1024**2) as clean:
            for data in self.data():
                sent.write(data)
                if sent.tell() > most:
                    raise Refused("too_large", f"an archive of more than {most} bytes: raise --archive-mib")
            sent.seek(0)
            archives.copy_checked(sent, clean)
            clean.seek(0)
            self.server.engine.put(container, clean)
        return {}

    def _copy_out(self, container: str, path: str, max_bytes: int) -> dict[str, Any]:
        """Send an archive of a path. It is read whole first, so a slow client does not occupy the engine."""
        with tempfile.SpooledTemporaryFile(8 * 1024**2) as held:
            with self.server.engine.get(container, path) as (stream, about):
                for data in stream:
                    held.write(data)
                    if held.tell() > max_bytes:
                        raise Refused("too_large", f"{path} has more than {max_bytes} bytes")
            held.seek(0)
            while data := held.read(_CHUNK_BYTES):
                self.send({"data": _text(data)})
        return {"mode": about.get("mode"), "size": about.get("size"), "link": about.get("linkTarget", "")}

    def data(self) -> Iterator[bytes]:
        """Yield the data that the client sends after its request, until its end."""
        while (data := data_of(self._line())) is not None:
            yield data

    def _line(self) -> Any:
        while (line := self.next_line()) is None:
            self.receive()
        return line

    def receive(self) -> None:
        """Receive bytes from the client, blocking.

        Raises:
            Disconnected: The client closed the connection.
        """
        try:
            data = self.request.recv(1 << 16)
        except OSError as error:
            raise Disconnected from error
        if not data:
            raise Disconnected
        self._received += data

    def next_line(self) -> Any:
        """Return the next line as parsed JSON; None if no complete line was received yet.

        Raises:
            Refused: The line is too long or is no JSON.
        """
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
            raise Refused("invalid", "a line of JSON is required") from None

    def send(self, message: dict[str, Any], until: float | None = None) -> None:
        """Send one line.

        Args:
            message: The line.
            until: Deadline, on the monotonic clock. What it leaves unsent is sent before the next line.

        Raises:
            Disconnected: The client closed the connection, or read nothing for `_STALL_S`.
            TimeoutError: The deadline has passed.
        """
        self._unsent += json.dumps(message).encode() + b"\n"
        while self._unsent:
            try:
                del self._unsent[: self.request.send(self._unsent, socket.MSG_DONTWAIT)]
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise Disconnected from error
            writable = select.poll()
            writable.register(self.request, select.POLLOUT)
            left = _STALL_S if until is None else min(_STALL_S, until - time.monotonic())
            if not writable.poll(max(0.0, 1000 * left)):
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError
                raise Disconnected("the client does not read")


class Exec:
    """Runs one program in a container and forwards its streams. It is killed at its deadline, when its output exceeds
    the limit, and when the client disconnects.

    The engine cannot end an exec, and killing its process would leave children. So the container is restarted, which
    ends all processes and keeps the files.

    Args:
        caller: The client's connection.
        engine: The engine.
        container: Id of the container.
        argv: Program and arguments.
        timeout_s: Wall time after which it is killed.
        root: Run it as root instead of as the agent.
        output_bytes: Output after which it is killed.
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
        """Run the program and forward its streams until it ends or is killed.

        Returns:
            ``ended``: ``exit``, or why it was killed: ``timeout``, ``output`` (too much) or ``stopped`` (the client
            asked for it). ``exit``: the exit status, None if it was killed.

        Raises:
            Refused: The engine failed, or the client sent something invalid.
            Disconnected: The client disconnected. The program is killed then, as after `Refused` while it runs.
        """
        name, link, rest = self._engine.exec_start(self._container, self._argv, root=self._root)
        status, self._until = None, time.monotonic() + self._timeout_s
        try:
            with link:
                link.setblocking(False)
                try:
                    why = self._relay(link, rest)
                except TimeoutError:
                    why = "timeout"
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
        """Forward the streams in both directions until one of them ends it.

        Returns:
            ``exit`` (the engine closed the streams), ``timeout``, ``output`` or ``stopped``.

        Args:
            link: The connection to the engine, non-blocking.
            rest: Bytes that were received from it already.

        Raises:
            Disconnected: The client closed the connection.
            Refused: The client sent something invalid, or the engine closed the exec.
        """
        caller = self._caller
        incoming, outgoing, total = bytearray(rest), bytearray(), 0
        sending, slow_from = True, 0.0
        while True:
            total += self._forward(incoming)
            if total > self._output_bytes:
                return "output"
            while len(outgoing) < _CHUNK_BYTES and (line := caller.next_line()) is not None:
                if line == {"stop": True}:
                    return "stopped"
                if not sending:
                    raise Refused("invalid", 'after the end only {"stop": true} is allowed')
                data = data_of(line)
                sending = data is not None
                outgoing += data or b""
            pause = 0.0
            if total > _FAST_BYTES:
                slow_from = slow_from or time.monotonic()
                pause = (total - _FAST_BYTES) / _SLOW_BYTES_PER_S - (time.monotonic() - slow_from)
            left = self._until - time.monotonic()
            if left <= 0:
                return "timeout"
            poll = select.poll()
            if not sending or len(outgoing) < _CHUNK_BYTES:
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
                except OSError:  # the program has closed its standard input
                    outgoing.clear()
            if not sending and not outgoing and not self._shut:
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
        """Send the complete frames of the engine to the client; return how many bytes of output they have.

        Raises:
            TimeoutError: The deadline passed while the client did not read.
        """
        total = 0
        while len(incoming) >= 8:
            kind, size = struct.unpack_from(">BxxxL", incoming)
            if len(incoming) < 8 + size:
                break
            data = bytes(incoming[8 : 8 + size])
            del incoming[: 8 + size]
            total += size
            stream = "stderr" if kind == 2 else "stdout"
            for at in range(0, size, _CHUNK_BYTES):
                self._caller.send({stream: _text(data[at : at + _CHUNK_BYTES])}, self._until)
        return total

    def _status(self, name: str) -> int | None:
        """Wait for the exit status of an exec; None if it still runs at the deadline."""
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
        """Kill the program by restarting its container; do nothing if the container was removed meanwhile.

        Raises:
            Refused: The engine did not restart the container.
        """
        try:
            self._engine.restart(self._container)
        except Refused as error:
            if error.code != "unknown":
                log.warning("container %s was not restarted: %s", self._container[:12], error.message)
                raise


class Service(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The broker's socket for one owner.

    Args:
        path: Path of the socket. A process that can connect to it controls the owner's containers.
        policy: What is allowed.
        owner: Label of the containers and layers of this socket.
        mode: Permission bits of the socket.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, path: Path, policy: Policy, owner: str, mode: int = 0o660) -> None:
        self.engine = Engine(policy, owner)
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket():
            path.unlink()
        super().__init__(str(path), Connection, bind_and_activate=False)
        self.server_bind()
        path.chmod(mode)
        self.server_activate()

    @contextlib.contextmanager
    def request_slot(self) -> Iterator[None]:
        """Count a request while it runs.

        Raises:
            Refused: ``conflict``: too many requests are running.
        """
        if not self._slots.acquire(blocking=False):
            raise Refused("conflict", f"{_CONNECTIONS} requests at once: wait for one to end")
        try:
            yield
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a connection failed")


def data_of(line: Any) -> bytes | None:
    """Return the data in a client's line, None for the end of the data.

    Raises:
        Refused: ``invalid``: the line is neither.
    """
    if isinstance(line, dict) and line.get("end") is True:
        return None
    try:
        return base64.b64decode(line["data"], validate=True)
    except (KeyError, TypeError, ValueError):
        raise Refused("invalid", 'a line with "data" in base64 or "end" is required') from None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
