"""Answers over HTTP with a deadline for the whole answer.

The timeout of a socket is for each read, so that a server which sends single bytes could hold a request for ever.
"""

from __future__ import annotations

import io
import ssl
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from socket import socket
from typing import Any


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an answer may take.

    Args:
        head_s: Time until its headers are there, seconds.
        body_s: Time that its body may take whatever its size, seconds.
        bytes_per_s: Rate that gives a large body more time.
    """

    head_s: float
    body_s: float
    bytes_per_s: float


def opener(context: ssl.SSLContext, patience: Patience) -> urllib.request.OpenerDirector:
    """Return an opener whose answers raise TimeoutError, on whatever is read of them, when their time is over."""

    def answer(sock: socket, *arguments: Any, **named: Any) -> _Answer:
        return _Answer(sock, *arguments, patience=patience, **named)

    def plain(*arguments: Any, **named: Any) -> HTTPConnection:
        return _answering(HTTPConnection(*arguments, **named), answer)

    def secure(*arguments: Any, **named: Any) -> HTTPConnection:
        return _answering(HTTPSConnection(*arguments, context=context, **named), answer)

    class Plain(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(plain, req)

    class Secure(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(secure, req)

    return urllib.request.build_opener(Plain, Secure)


def _answering(connection: HTTPConnection, answer: Callable[..., HTTPResponse]) -> HTTPConnection:
    connection.response_class = answer  # type: ignore[assignment]  # which is called only
    return connection


class _Answer(HTTPResponse):
    """An answer whose bytes are read by way of `_Timed`."""

    def __init__(self, sock: socket, *arguments: Any, patience: Patience, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self._timed = _Timed(self.fp.detach(), sock, patience)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        """Read the status and the headers."""
        try:
            super().begin()
        except BaseException:
            self.close()  # `http.client` leaves it open where the connection was closed
            raise
        self._timed.in_body = True


class _Timed(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, sock: socket, patience: Patience) -> None:
        self._raw = raw
        self._socket = sock
        self._patience = patience
        self._read_s = sock.gettimeout()
        self._began_s = time.monotonic()
        self._size = 0
        self.in_body = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._end_s() - time.monotonic()
        if left_s <= 0:
            raise self._late()
        self._socket.settimeout(left_s if self._read_s is None else min(left_s, self._read_s))
        try:
            size = self._raw.readinto(buffer) or 0
        except TimeoutError:
            if time.monotonic() < self._end_s():
                raise
            raise self._late() from None
        self._size += size
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _end_s(self) -> float:
        allowed_s = self._patience.head_s
        if self.in_body:
            allowed_s += self._patience.body_s + self._size / self._patience.bytes_per_s
        return self._began_s + allowed_s

    def _late(self) -> TimeoutError:
        seconds = time.monotonic() - self._began_s
        if self.in_body:
            return TimeoutError(f"only {self._size:,} bytes came in {seconds:.0f} s")
        return TimeoutError(f"no answer within {seconds:.0f} s")
