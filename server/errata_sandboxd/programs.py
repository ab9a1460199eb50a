"""`Exec`: runs a program in a container and forwards its streams."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from .engine import Engine
from .lines import CHUNK_BYTES, Lines, text_of
from .schema import Refused

log = logging.getLogger("errata.sandboxd")

_FAST_BYTES, _SLOW_BYTES_PER_S = 16 * 1024**2, 32 * 1024**2
"""After the first bytes output is read at a limited rate: `yes` prints 2 GB/s, and reading that would use a core."""
_LOOK_S = 1.0
"""How often a program that says nothing looks whether the broker is ending."""


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """Convert ``busy`` to ``deadline``: a client sends what was refused as ``busy`` again, and this program has run."""
    try:
        yield
    except Refused as error:
        if error.code != "busy":
            raise
        raise Refused("deadline", f"the program was started and its end is not known: {error.message}") from error


class Exec:
    """Runs one program in a container and forwards its streams. It is killed at its deadline, when its output exceeds
    the limit, and when the client disconnects.

    The engine cannot end an exec, and killing its process would leave children. So the container is restarted, which
    ends all processes and keeps the files.

    Args:
        caller: The client's lines.
        engine: The engine.
        ending: Set when the broker ends, which kills the program.
        container: Id of the container.
        argv: Program and arguments.
        timeout_s: Wall time after which it is killed.
        root: Run it as root instead of as the agent.
        output_bytes: Output after which it is killed.
    """

    def __init__(
        self,
        caller: Lines,
        engine: Engine,
        ending: threading.Event,
        container: str,
        argv: list[str],
        timeout_s: float,
        root: bool = False,
        output_bytes: int = 4 * 1024**3,
    ) -> None:
        self._caller, self._engine, self._ending, self._container = caller, engine, ending, container
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
        with _started():
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
            while len(outgoing) < CHUNK_BYTES and (line := caller.next_data()) is not None:
                if line == "stop":
                    return "stopped"
                if not sending:
                    raise Refused("invalid", 'after the end only {"stop": true} is allowed')
                if isinstance(line, bytes):
                    outgoing += line
                else:
                    sending = False
            pause = 0.0
            if total > _FAST_BYTES:
                slow_from = slow_from or time.monotonic()
                pause = (total - _FAST_BYTES) / _SLOW_BYTES_PER_S - (time.monotonic() - slow_from)
            left = self._until - time.monotonic()
            if left <= 0:
                return "timeout"
            if self._ending.is_set():
                raise Refused("engine_away", "the broker was stopped while the program ran")
            poll = select.poll()
            if not sending or len(outgoing) < CHUNK_BYTES:
                poll.register(caller.socket, select.POLLIN)
            wants = (select.POLLIN if pause <= 0 else 0) | (select.POLLOUT if outgoing else 0)
            if wants:
                poll.register(link, wants)
            ready = dict(poll.poll(1000 * min(left, _LOOK_S, pause if pause > 0 else left) + 1))
            if caller.socket.fileno() in ready:
                caller.receive(self._until)
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
            for at in range(0, size, CHUNK_BYTES):
                self._caller.send({stream: text_of(data[at : at + CHUNK_BYTES])}, self._until)
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
