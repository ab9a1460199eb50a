"""Plays requests against one server process, over a plain WebSocket."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from errata_protocol.errors import ServiceError

from ..process import ServerProcess
from ..settings import token_in_environment
from .requests import Request

STEP_S = 120.0
"""Timeout of one answer, seconds."""

_INFRASTRUCTURE = ("CAPACITY_REACHED", "TIMEOUT", "SESSION_ERROR", "FACTORY_ERROR", "JOURNAL_UNAVAILABLE")
"""Error codes that do not come from the environment."""


class PlayFailed(ServiceError):
    """A play could not be completed; the message says why."""


class Socket:
    """A plain session over a WebSocket, used as a context manager.

    Args:
        url: HTTP address of the environment.
        session_id: Id of the session to attach to; None opens a new one.

    Raises:
        PlayFailed: There is no connection, or the server refuses the session.

    Attributes:
        eid: Episode of the last answer.
        t: Delivery number of the last answer.
        capabilities: The server's capabilities answer.
    """

    def __init__(self, url: str, session_id: str | None = None) -> None:
        query = f"?session_id={session_id}" if session_id else ""
        token = token_in_environment()
        headers = {"Authorization": f"Bearer {token}"} if token else None
        self.eid: str | None = None
        self.t: int | None = None
        self._open = ExitStack()
        try:
            address = urlsplit(url)
            raw = socket.create_connection((address.hostname or "", address.port or 80), STEP_S)
            self._socket = self._open.enter_context(
                connect(
                    f"ws{url.removeprefix('http')}/ws{query}",
                    sock=raw,  # not through a proxy: the server is on this machine
                    max_size=None,
                    open_timeout=STEP_S,
                    close_timeout=5,
                    additional_headers=headers,
                )
            )
        except (OSError, WebSocketException) as error:
            raise PlayFailed(f"no socket to {url}: {error}") from error
        answer = self._ask("capabilities")
        if answer.get("type") != "capabilities":
            raise PlayFailed(f"no session: {_message(answer)}")
        self.capabilities: dict[str, Any] = answer["data"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _ask(self, kind: str, data: Any = None) -> dict[str, Any]:
        """Send a message, once, and return the next frame that arrives: its answer, also if that is an error frame.

        Raises:
            PlayFailed: No frame came within `STEP_S` seconds, the socket was lost, or the frame is not JSON.
        """
        try:
            self._socket.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
            return dict(json.loads(self._socket.recv(timeout=STEP_S)))
        except TimeoutError as error:
            raise PlayFailed(f"no answer to a {kind} within {STEP_S:g} s") from error
        except (OSError, WebSocketException, ValueError) as error:
            raise PlayFailed(f"the socket was lost at a {kind}: {error}") from error

    def rpc(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make a JSON-RPC call; return its response, or the data of an error frame."""
        return dict(self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}})["data"])

    def create_resumable_id(self) -> str:
        """Return an id by which another socket can attach to the session."""
        return str(self.rpc("openenv/session/create")["result"]["session_id"])

    def make(self, request: Request) -> dict[str, Any]:
        """Send a request and return the payload of the answer, or ``{"error": {"code", "message"}}``.

        Raises:
            PlayFailed: There was no answer, or an error that does not come from the environment.
        """
        if request.kind == "mcp":
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": request.data}
            frame = self._ask("mcp", call)
        else:
            frame = self._ask(request.kind, request.data)
        self.eid, self.t = frame.get("eid", self.eid), frame.get("t", self.t)
        data = frame.get("data")
        data = data if isinstance(data, dict) else {}
        if frame.get("type") != "error":
            return data
        if data.get("code") in _INFRASTRUCTURE:
            raise PlayFailed(_message(frame))
        return {"error": {"code": data.get("code"), "message": data.get("message")}}

    def state(self) -> dict[str, Any]:
        """Return the environment's ``state``, or ``{"error": ...}``."""
        frame = self._ask("state")
        data = frame.get("data")
        return data if frame.get("type") == "state" and isinstance(data, dict) else {"error": data}


def _message(frame: Mapping[str, Any]) -> str:
    data = frame.get("data")
    return str(data.get("message")) if isinstance(data, dict) else str(frame)


def start_server(target: str, data_dir: Path, options: tuple[str, ...], hash_seed: str | None) -> ServerProcess:
    """Start a server of the target.

    Args:
        target: As for ``errata serve``.
        data_dir: Its data directory.
        options: Further options of ``errata serve``.
        hash_seed: Value of ``PYTHONHASHSEED``; None lets the server choose.

    Raises:
        ServiceError: It did not start within 180 s; the message is the server's.
    """
    env = {"PYTHONHASHSEED": hash_seed or "random", "ENABLE_WEB_INTERFACE": "false"}
    return ServerProcess(target, data_dir, *options, env=env, start_s=180.0)


def fork(url: str, eid: str, t: int) -> str:
    """Fork an episode after delivery ``t`` and return the session id of the fork.

    Raises:
        PlayFailed: The server refused it.
        httpx.HTTPError: The server did not answer.
    """
    token = token_in_environment()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    answer = httpx.post(
        f"{url}/episodes/{eid}/fork",
        json={"t": t, "request_id": "probe"},
        headers=headers,
        timeout=STEP_S,
        trust_env=False,
    )
    if answer.is_error:
        raise PlayFailed(f"the fork was refused: {answer.text[:500]}")
    return str(answer.json()["session_id"])
