"""`DockerType`: the entry point of the docker backend, and its checks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base import Backend, BackendConfig, BackendType, Finding
from .backend import SPARE, DockerBackend
from .broker import WAIT_S

SOCKET_VARIABLE, SPARE_VARIABLE = "ERRATA_SANDBOXD_SOCKET", "ERRATA_SANDBOXD_SPARE"
WAIT_VARIABLE = "ERRATA_SANDBOXD_WAIT_S"
DEFAULT_SOCKET = "/run/errata/sandboxd.sock"
_COSTS = "no container sandboxes"


class DockerType(BackendType):
    """Containers of an engine, through the broker ``errata sandboxd``."""

    descriptors = 256  # connections to the broker
    snapshots_each_step = False

    def create(self, config: BackendConfig) -> Backend:
        spare = int(os.environ.get(SPARE_VARIABLE, str(SPARE)))
        wait_s = float(os.environ.get(WAIT_VARIABLE, str(WAIT_S)))
        return DockerBackend(config.directory, broker_socket(), spare=spare, wait_s=wait_s, division=config.division)

    def checks(self, config: BackendConfig, *, usable: bool) -> Iterator[Finding]:
        path = broker_socket()
        try:
            answer = _ask(path, {"do": "ping"})
        except (OSError, ValueError) as error:
            fix = f"start `errata sandboxd`, or set {SOCKET_VARIABLE}"
            yield Finding("broker", "missing", f"{path}: {error}", _COSTS, fix, of_sandboxes=True)
            return
        if "error" in answer:
            fix = "start the container engine, or the broker with the right --engine"
            yield Finding("container engine", "missing", answer["error"]["message"], _COSTS, fix, of_sandboxes=True)
            return
        found = answer["ok"]
        yield Finding("container engine", "ok", f"{found['engine']} through {path}")


def broker_socket() -> Path:
    """Return the path of the broker's socket: ``ERRATA_SANDBOXD_SOCKET``, or the default."""
    return Path(os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET))


def _ask(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request without input to the broker, once, and return its answer; blocks.

    Raises:
        TimeoutError: The broker did not accept the connection, or did not answer, within 15 s each.
        OSError: The broker cannot be reached.
        ValueError: The answer is not JSON, or the broker closed the connection without one.
    """
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(15.0)
        link.connect(str(path))
        link.sendall(json.dumps(request).encode() + b"\n")
        line = link.makefile("rb").readline()
    answer: dict[str, Any] = json.loads(line)
    return answer
