"""`FakeEngine`: what the broker uses of a container engine's API, on a unix socket, without containers."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import socketserver
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LABEL = "errata.sandbox"


def identity(*parts: str) -> str:
    """Return 64 hexadecimal digits."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass
class FakeEngine:
    """The state of an engine, and what was asked of it.

    Args:
        path: Path of the engine's socket.
    """

    path: Path
    images: list[dict[str, Any]] = field(default_factory=list)
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Method and target of each request, as they came."""
    written: list[bytes] = field(default_factory=list)
    """The archives that were unpacked."""
    archive: Callable[[str, str], Iterator[bytes] | None] | None = None
    """Makes the archive of a container's path in place of the usual one; None where there is no such path."""
    changes: bytes = b"null"
    before: Callable[[str], None] = lambda target: None
    """Called with each target before it is answered; it may block."""

    def add_image(self, *tags: str, digests: tuple[str, ...] = (), labels: dict[str, str] | None = None) -> str:
        """Add an image and return its id."""
        made = "sha256:" + identity("image", *tags, *digests, json.dumps(labels or {}), str(len(self.images)))
        self.images.append(
            {
                "Id": made,
                "RepoTags": list(tags),
                "RepoDigests": list(digests),
                "Labels": labels or {},
                "Config": {"Labels": labels or {}},
                "Size": 1,
                "Created": 1,
            }
        )
        return made

    def add_container(self, owner: str, labels: dict[str, str] | None = None) -> str:
        """Add a running container, with the owner's label and others, and return its id."""
        made = identity("container", owner, str(len(self.containers)))
        self.containers[made] = {
            "Id": made,
            "Config": {"Labels": {**(labels or {}), LABEL: owner}},
            "State": {"Running": True, "Paused": False, "StartedAt": "now"},
            "Image": "sha256:" + identity("any"),
        }
        return made

    @contextlib.contextmanager
    def held(self, text: str) -> Iterator[threading.Semaphore]:
        """Answer no request whose target has a text until the end; yield a semaphore that each of them releases."""
        entered, release = threading.Semaphore(0), threading.Event()

        def before(target: str) -> None:
            if text in target:
                entered.release()
                release.wait(120)

        self.before = before
        try:
            yield entered
        finally:
            release.set()

    def find_image(self, name: str) -> dict[str, Any] | None:
        """Return an image as an engine finds it: by id, the beginning of an id, a tag, or a digest."""
        bare = name.removeprefix("sha256:")
        full = name if ":" in name.rpartition("/")[2] or "@" in name else name + ":latest"
        for one in self.images:
            by_id = len(bare) >= 4 and one["Id"].removeprefix("sha256:").startswith(bare)
            if by_id or full in one["RepoTags"] or name in one["RepoDigests"]:
                return one
        return None


@contextlib.contextmanager
def running(path: Path) -> Iterator[FakeEngine]:
    """Serve a fake engine on a socket."""
    engine = FakeEngine(path)

    class Handler(_Handler):
        pass

    Handler.engine = engine
    server = _Server(str(path), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The broker closes connections that it does not need any more."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    engine: FakeEngine
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "broker"

    def do_any(self) -> None:
        """Answer by method and path."""
        engine = self.engine
        engine.asked.append(f"{self.command} {self.path}")
        engine.before(self.path)
        body = self._body()
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        segments = [unquote(part) for part in parts.path.removeprefix("/v1.41").split("/")[1:]]
        match (self.command, *segments):
            case ("GET", "version"):
                self._json({"Version": "fake", "ApiVersion": "1.41"})
            case ("GET", "images", "json"):
                self._json(self._labelled(engine.images, query, lambda one: one["Labels"]))
            case ("GET", "images", *name, "json"):
                self._found(engine.find_image("/".join(name)))
            case ("DELETE", "images", *name):
                engine.images = [one for one in engine.images if one["Id"] != "/".join(name)]
                self._json([])
            case ("POST", "commit"):
                self._json({"Id": engine.add_image(labels=json.loads(body)["Labels"])}, 201)
            case ("GET", "containers", "json"):
                rows = self._labelled(list(engine.containers.values()), query, lambda one: one["Config"]["Labels"])
                wanted = json.loads(query.get("filters", "{}")).get("id")
                self._json(
                    [
                        {"Id": one["Id"], "State": "running", "SizeRw": 1, "Labels": one["Config"]["Labels"]}
                        for one in rows
                        if not wanted or one["Id"] in wanted
                    ]
                )
            case ("POST", "containers", "create"):
                labels = json.loads(body)["Labels"]
                made = engine.add_container(labels[LABEL], labels)
                self._json({"Id": made}, 201)
            case ("GET", "containers", name, "json"):
                self._found(engine.containers.get(name))
            case ("GET", "containers", name, "changes"):
                self._send(200, engine.changes, "application/json")
            case ("GET", "containers", name, "archive"):
                self._archive(name, query["path"])
            case ("PUT", "containers", name, "archive"):
                engine.written.append(body)
                self._send(200, b"")
            case ("DELETE", "containers", name):
                engine.containers.pop(name, None)
                self._send(204, b"")
            case ("POST", "containers", name, "exec"):
                self._json({"Id": identity("exec", name)}, 201)
            case ("POST", "containers", name, "start" | "restart" | "pause" | "unpause"):
                self._send(204, b"")
            case ("POST", "exec", name, "start"):
                self._exec()
            case ("GET", "exec", name, "json"):
                self._json({"Running": False, "ExitCode": 0})
            case _:
                self._json({"message": f"page not found: {self.path}"}, 404)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_any  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            read = bytearray()
            while size := int(self.rfile.readline(), 16):
                read += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(read)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _labelled(
        self, rows: list[dict[str, Any]], query: dict[str, str], labels: Callable[[dict[str, Any]], dict[str, str]]
    ) -> list[dict[str, Any]]:
        wanted = json.loads(query.get("filters", "{}")).get("label", [])
        return [row for row in rows if all(f"{k}={v}" in wanted for k, v in labels(row).items() if k == LABEL)]

    def _found(self, one: dict[str, Any] | None) -> None:
        self._json(one if one is not None else {"message": "No such thing"}, 200 if one is not None else 404)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _archive(self, container: str, path: str) -> None:
        chunks = self.engine.archive(container, path) if self.engine.archive else (small_archive(path),)
        if chunks is None:
            self._json({"message": f"Could not find the file {path}"}, 404)
            return
        about = base64.b64encode(json.dumps({"name": "x", "size": 1, "mode": 0o644, "linkTarget": ""}).encode())
        self.send_response(200)
        self.send_header("X-Docker-Container-Path-Stat", about.decode())
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def _exec(self) -> None:
        """Send back the input as standard output."""
        self.wfile.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
        while data := self.connection.recv(65536):
            self.wfile.write(struct.pack(">BxxxL", 1, len(data)) + data)
        self.close_connection = True


def small_archive(path: str) -> bytes:
    """Return a tar archive with one file."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as out:
        member = tarfile.TarInfo("x")
        data = path.encode("utf-8", "surrogatepass")
        member.size = len(data)
        out.addfile(member, io.BytesIO(data))
    return written.getvalue()
