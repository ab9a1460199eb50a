"""Servers that are none of ours, or mean harm: one socket, whose answer is chosen by the first part of the path."""

from __future__ import annotations

import functools
import itertools
import json
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from select import select
from typing import Any

from ..machine_speed import SLOWDOWN

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202egnp.exe\u2028[bold red]"
"""Text that acts on a terminal, on a reader's eyes, and on rich."""

Parts = Callable[[], Iterable[bytes]]


def _whole(body: bytes | str, status: str = "200 OK", *headers: str) -> Parts:
    content = body if isinstance(body, bytes) else body.encode()
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close", *headers])
    return lambda: [head.encode() + b"\r\n\r\n" + content]


def _json(value: object, status: str = "200 OK", *headers: str) -> Parts:
    return _whole(json.dumps(value), status, *headers)


def _endless(head: bytes, part: bytes) -> Parts:
    return lambda: itertools.chain([head], itertools.repeat(part * (1 + 65_536 // len(part))))


def _dripping(head: bytes, byte: bytes) -> Parts:
    def parts() -> Iterator[bytes]:
        yield head
        while True:
            time.sleep(0.01)
            yield byte

    return parts


def _silent() -> Iterator[bytes]:
    while True:
        time.sleep(0.01)
        yield b""


@functools.cache
def _packed_zeros() -> bytes:
    made = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1024**2)
    return b"".join([*(made.compress(zeros) for _ in range(300)), made.flush()])


def _bomb(encoding: str) -> Parts:
    return lambda: _whole(_packed_zeros(), "200 OK", f"Content-Encoding: {encoding}")()


_OK = b"HTTP/1.1 200 OK\r\n"
EPISODE = {
    "eid": "ep_x",
    "episode_id": None,
    "environment": "count",
    "session": "abc",
    "created": 1e9,
    "done": True,
    "deliveries": 1,
    "reward": 1.0,
    "error_kinds": {},
    "origin": None,
}
_TURN = {"t": 0, "kind": "reset", "reward": 1.0, "done": False, "digest": "sha256:" + "0" * 64}


def _episode(**changes: Any) -> dict[str, Any]:
    return {**EPISODE, "turns": [_TURN], **changes}


REFUSED: dict[str, Parts] = {
    "closes": lambda: [],
    "silent": _silent,
    "garbage": lambda: [b"\x00\xff\x1b]0;x\x07" * 1000],
    "ssh": lambda: [b"SSH-2.0-OpenSSH_9.6\r\n"],
    "http2": lambda: [b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"],
    "drips-head": _dripping(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
    "drips-body": _dripping(_OK + b"Content-Length: 100000000\r\n\r\n[", b" "),
    "drips-until-closed": _dripping(_OK + b"\r\n[", b" "),
    "drips-chunks": _dripping(_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "endless-body": _endless(_OK + b"\r\n[", b" "),
    "endless-chunks": _endless(_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"8\r\n        \r\n"),
    "endless-chunk-size": _endless(_OK + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
    "endless-head": _endless(_OK, b"X-A: b\r\n"),
    "endless-header": _endless(_OK + b"X: ", b"x"),
    "endless-status": _endless(b"HTTP/1.1 200 ", b"x"),
    "endless-100": _endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "endless-error": _endless(b"HTTP/1.1 500 Oops\r\n\r\n", b"<html>"),
    "huge-length": lambda: [_OK + b"Content-Length: 99999999999999999999\r\n\r\n{}"],
    "two-lengths": lambda: [_OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"],
    "short": lambda: [_OK + b"Content-Length: 100\r\n\r\n{}"],
    "bomb": _bomb("gzip"),
    "bomb-twice": _bomb("gzip, gzip"),
    "encoding": _whole(b"x", "200 OK", "Content-Encoding: br"),
    "encoding-escapes": _whole(b"x", "200 OK", "Content-Encoding: \x1b[2J"),
    "no-gzip": _whole(b"x", "200 OK", "Content-Encoding: gzip"),
    "redirect": _whole(b"", "302 Found", "Location: /redirect/"),
    "redirect-file": _whole(b"", "302 Found", "Location: file:///etc/passwd"),
    "redirect-nowhere": _whole(b"", "301 Moved", "Location: \x1b[2J"),
    "no-content": _whole(b"", "204 No Content"),
    "not-modified": _whole(b"", "304 Not Modified"),
    "status": _whole(b"{}", "999 \x1b[2J"),
    "unauthorized": _whole(b"{}", "401 \x1b[2J"),
    "html": _whole("<html>\x1b[2J</html>", "200 OK", "Content-Type: text/html"),
    "html-500": _whole("<html>\x1b[2J</html>", "500 Oops"),
    "other-404": _json({"detail": "Not Found"}, "404 Not Found"),
    "error": _json({"code": "UNKNOWN_EPISODE", "message": ESCAPES}, "404 Not Found"),
    "error-long": _json({"code": "X", "message": "x" * 1_000_000}, "500 Oops"),
    "error-names": _json({"code": "T_OUT_OF_RANGE", "message": "m", "self": 1, "details": 2}, "404 Not Found"),
    "error-types": _json({"code": [1], "message": {"a": [ESCAPES]}}, "500 Oops"),
    "error-deep": _whole('{"code": "X", "message": ' + "[" * 5000 + "]" * 5000 + "}", "500 Oops"),
    "empty": _whole(b""),
    "null": _whole("null"),
    "number": _whole("5"),
    "text": _json(ESCAPES),
    "list-of-lists": _json([[1]]),
    "object": _json({}),
    "deep": _whole("[" * 100_000),
    "deep-objects": _whole('{"a":' * 5000 + "1" + "}" * 5000),
    "not-utf8": _whole(b'{"episodes": "\xff"}'),
    "nan": _json({"episodes": [_episode(created=float("nan"))], "next": None, **_episode(reward=float("nan"))}),
    "infinite": _whole(json.dumps({"episodes": [_episode()], **_episode()}).replace("1000000000.0", "1e999")),
    "long-number": _whole(json.dumps({"episodes": [EPISODE], **_episode()}).replace('"t": 0', '"t": ' + "9" * 5000)),
    "wrong-types": _json({"episodes": {"a": 1}, "turns": 5, "deleted": "x", "eid": [ESCAPES]}),
    "wrong-names": _json({ESCAPES: ESCAPES, "episodes": [{ESCAPES: 1}]}),
}
"""Answers to which no command may end with success."""

WAITS = frozenset(
    {"silent", "drips-head", "drips-body", "drips-until-closed", "drips-chunks", "endless-chunks", "endless-100"}
)
"""Those of `REFUSED` that end only when the time of the command is over."""

STRANGE: dict[str, Parts] = {
    "list": _json([]),
    "escapes": _json(
        {
            "episodes": [{**EPISODE, "eid": ESCAPES, "environment": ESCAPES, "error_kinds": {ESCAPES: 1}}],
            "next": None,
            **_episode(eid=ESCAPES, environment=ESCAPES, origin={"eid": ESCAPES, "t": 1}, session=ESCAPES),
            "turns": [{**_TURN, "error_kind": ESCAPES, "hint_template_key": ESCAPES, "digest": ESCAPES}],
            "deleted": 5,
            "t": 1,
            "value": 1.0,
            "source": ESCAPES,
            "reward_id": ESCAPES,
        },
        "200 OK",
        'ETag: "x"',
        "X-Errata-Kind: step",
    ),
    "escaped-rewards": _json([{"t": 1, "value": 1.0, "source": ESCAPES, "reward_id": ESCAPES}]),
    "surrogates": _whole(
        json.dumps({"episodes": [{**EPISODE, "environment": "\ud800"}], "next": None, **_episode(environment="\ud800")})
    ),
    "far-times": _json({"episodes": [_episode(created=1e300)], "next": None, **_episode(created=1e300)}),
    "endless-pages": _json({"episodes": [], "next": "5", **_episode(turns=[])}),
    "escaped-cursor": _json({"episodes": [], "next": ESCAPES, **_episode(turns=[])}),
}
"""Answers of the form of ours, with odd values: a command may end with success, and prints nothing that does harm."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        connection: socket.socket = self.request
        connection.settimeout(30)
        with suppress(OSError), self.server.counted(self.client_address):
            asked = b""
            while b"\r\n\r\n" not in asked and len(asked) < 65_536:
                part = connection.recv(65_536)
                if not part:
                    return
                asked += part
            name = asked.split(b" ")[1].split(b"/")[1].decode()
            self.server.open[self.client_address] = name
            for content in {**REFUSED, **STRANGE}[name]():
                rest = memoryview(content)
                while True:
                    # A write alone may wait for a client that is gone, because its end was read by nobody.
                    read, write, _ = select([connection], [connection], [], 30)
                    if not write or (read and not connection.recv(65_536)):
                        return
                    rest = rest[connection.send(rest) :]
                    if not rest:
                        break
            connection.shutdown(socket.SHUT_WR)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.open: dict[Any, str] = {}

    @contextmanager
    def counted(self, address: Any) -> Iterator[None]:
        self.open[address] = ""
        try:
            yield
        finally:
            del self.open[address]


@contextmanager
def hostile_server() -> Iterator[str]:
    """Serve all answers; yield the URL, to which the name of an answer is appended.

    Raises:
        AssertionError: A client that has given up an answer has not closed its connection.
    """
    with _Server(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
            until = time.monotonic() + 10 * SLOWDOWN
            while server.open and time.monotonic() < until:
                time.sleep(0.01)
            assert not server.open, f"a client went on reading: {server.open}"
        finally:
            server.shutdown()
