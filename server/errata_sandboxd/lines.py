"""`Lines`: the lines of JSON on one connection of the broker, with a deadline for each wait."""

from __future__ import annotations

import base64
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .schema import Refused

MAX_REQUEST, MAX_LINE = 256 * 1024, 1024**2
"""Most bytes of a request's line, and of a line of data."""
CHUNK_BYTES = 1 << 16
STALL_S = 60.0
"""Time without a byte sent or read by the client after which its connection is closed."""
_DRAIN_S = 5.0
_SHORT_BYTES = 64

T = TypeVar("T")


class Disconnected(Exception):
    """The client closed its connection, or was silent for too long."""


class Lines:
    """One connection's lines.

    Args:
        socket: The connection, blocking.
        parsing: Held while a line is parsed. Parsed, a line of brackets takes twenty times its bytes, so an owner's
            lines are parsed one after another.
    """

    def __init__(self, socket: socket.socket, parsing: threading.Lock) -> None:
        self.socket = socket
        self._parsing = parsing
        self._received = bytearray()
        self._searched = 0
        self._unsent = bytearray()
        self._ended = False

    def request(self, until: float, parse: Callable[[Any], T]) -> T:
        """Wait for the first line and return what ``parse`` makes of it.

        Args:
            until: Deadline, on the monotonic clock.
            parse: Called with the line as JSON.

        Raises:
            Disconnected: The client closed the connection.
            Refused: The line is not JSON or too long, ``parse`` raised it, or it did not come in time (``deadline``).
        """
        while (line := self._next(MAX_REQUEST)) is None:
            self.receive(until)
        return self._parsed(line, parse)

    def next_data(self) -> bytes | str | None:
        """Return the next line: its data; ``end`` or ``stop``; None if no complete line was received yet.

        Raises:
            Refused: The line is too long or is none of these.
        """
        line = self._next(MAX_LINE)
        return None if line is None else self._parsed(line, data_of)

    def data(self, until: float) -> Iterator[bytes]:
        """Yield the data that the client sends after its request, until its end.

        Args:
            until: Deadline, on the monotonic clock.

        Raises:
            Disconnected: The client closed the connection.
            Refused: A line is something else, or did not come in time.
        """
        while (line := self.next_data()) != "end":
            if line is None:
                self.receive(min(until, time.monotonic() + STALL_S))
            elif isinstance(line, bytes):
                yield line
            else:
                raise Refused("invalid", 'a line with "data" or "end" is required')

    def receive(self, until: float) -> None:
        """Receive bytes from the client, blocking.

        Args:
            until: Deadline, on the monotonic clock.

        Raises:
            Disconnected: The client closed the connection.
            Refused: ``deadline``: nothing came in time.
        """
        ready = select.poll()
        ready.register(self.socket, select.POLLIN)
        if not ready.poll(max(0.0, 1000 * (until - time.monotonic()))):
            raise Refused("deadline", "the client sent nothing for too long: send a line as soon as it is connected")
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            raise Disconnected from error
        if not data:
            self._ended = True
            raise Disconnected
        self._received += data

    def _next(self, longest: int) -> bytes | None:
        """Return the next line; None if no complete line was received yet."""
        end = self._received.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._received)
        if max(end, self._searched if end < 0 else 0) > longest:
            raise Refused("too_large", f"a line of more than {longest} bytes: send data in pieces")
        if end < 0:
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        return line

    def _parsed(self, line: bytes, parse: Callable[[Any], T]) -> T:
        with self._parsing:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                raise Refused("invalid", "a line of JSON is required") from None
            return parse(found)

    def send(self, message: dict[str, Any], until: float | None = None) -> None:
        """Send one line.

        Args:
            message: The line.
            until: Deadline, on the monotonic clock. What it leaves unsent is sent before the next line.

        Raises:
            Disconnected: The client closed the connection, or read nothing for `STALL_S`.
            TimeoutError: The deadline has passed.
        """
        self._unsent += json.dumps(message).encode() + b"\n"
        while not self._flushed():
            writable = select.poll()
            writable.register(self.socket, select.POLLOUT)
            left = STALL_S if until is None else min(STALL_S, until - time.monotonic())
            if not writable.poll(max(0.0, 1000 * left)):
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError
                raise Disconnected("the client does not read")

    def offer(self, message: Callable[[], dict[str, Any] | None]) -> None:
        """Send lines while the client reads them, without waiting.

        Args:
            message: Returns the next line; None if there is none now.

        Raises:
            Disconnected: The client closed the connection.
        """
        while self._flushed() and (line := message()) is not None:
            self._unsent += json.dumps(line).encode() + b"\n"

    def _flushed(self) -> bool:
        """Send what the client takes at once; return whether everything was sent."""
        while self._unsent:
            try:
                del self._unsent[: self.socket.send(self._unsent, socket.MSG_DONTWAIT)]
            except BlockingIOError:
                return False
            except OSError as error:
                raise Disconnected from error
        return True

    def finish(self) -> None:
        """End the connection so that the client can read what was sent.

        A connection that is closed while unread bytes are there is reset, and the client loses the answer. So what it
        still sends is read and dropped, for some seconds.
        """
        until = time.monotonic() + _DRAIN_S
        try:
            self.socket.shutdown(socket.SHUT_WR)
            while not self._ended:
                self._received.clear()
                self.receive(until)
        except (OSError, Disconnected, Refused):
            pass


def data_of(line: Any) -> bytes | str:
    """Return the data in a client's line; ``end`` for the end of the data, ``stop`` for the request to kill a program.

    Raises:
        Refused: ``invalid``: the line is none of these.
    """
    if isinstance(line, dict) and len(line) == 1:
        if line.get("end") is True:
            return "end"
        if line.get("stop") is True:
            return "stop"
        try:
            return base64.b64decode(line["data"], validate=True)
        except (KeyError, TypeError, ValueError):
            pass
    raise Refused("invalid", 'a line with "data" in base64 or "end" is required') from None


def text_of(data: bytes) -> str:
    """Return data as base64."""
    return base64.b64encode(data).decode("ascii")
