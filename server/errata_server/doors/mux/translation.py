"""`RequestDecoder`: decodes mux requests for a session; and functions that convert journal rows to mux replies."""

from __future__ import annotations

from typing import Any

import msgspec
from openenv.core.env_server.mcp_types import JsonRpcRequest
from openenv.core.env_server.types import Action
from pydantic import ValidationError

from errata_protocol.errors import ErrataError, InvalidRequest
from errata_protocol.mux import Recorded, Reply, Run

from ...journal.base import DeliveryRow
from ...runtime.rows import wire_digest
from ...sessions.decoding import read_action
from ...sessions.session import Request
from ..input_errors import bounded_errors
from ..mcp import McpDoor, invalid_call, parse_rpc
from ..strict_json import parse_object

_REPLY_WITHOUT_T = {"mcp": "mcp", "fork": "forked", "close": "closed"}


class RpcRefused(Exception):
    """A tools/call that reaches no tool: its recorded reply is a JSON-RPC error.

    Attributes:
        response: The JSON-RPC response.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        super().__init__("a tools/call that reaches no tool")
        self.response = response


class RequestDecoder:
    """Decodes the ``data`` of requests.

    Args:
        action_cls: Action class that steps are validated against.
        mcp: Decodes JSON-RPC requests.
    """

    def __init__(self, action_cls: type[Action], mcp: McpDoor) -> None:
        self._action_cls = action_cls
        self._mcp = mcp

    def request(self, run: Run, timeout_s: float | None) -> Request:
        """Return the request of a reset, step or tools/call.

        Raises:
            InvalidRequest: It cannot be decoded; this error is recorded as its reply.
            RpcRefused: A tools/call cannot be decoded; its JSON-RPC error is recorded as its reply.
        """
        data = object_of(run.data)
        if run.kind == "reset":
            return Request("reset", run.data, reset=data, id=run.id, sha=run.sha, timeout_s=timeout_s)
        if run.kind == "step":
            return Request("step", run.data, action=self._action(data), id=run.id, sha=run.sha, timeout_s=timeout_s)
        rpc = parse_rpc(data)
        if not isinstance(rpc, JsonRpcRequest):
            raise RpcRefused(rpc)
        invalid = invalid_call(rpc)
        if invalid is not None:
            raise RpcRefused(invalid)
        request = self._mcp.request(rpc, run.data)
        return Request("mcp", run.data, call=request.call, id=run.id, sha=run.sha, timeout_s=timeout_s)

    def _action(self, data: dict[str, Any]) -> Action:
        try:
            return read_action(data, self._action_cls)
        except ValidationError as error:
            raise InvalidRequest(
                f"this is no {self._action_cls.__name__}: see errors",
                errors=bounded_errors(error.errors(include_context=False, include_url=False)),
            ) from error


def object_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object of ``data``, refusing what plain sockets refuse.

    Raises:
        InvalidRequest: It is no object, or JSON decoders disagree on its meaning.
    """
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        found = None
    if type(found) is dict and data.count(b":") == len(found):  # no inner object, no key twice: most actions
        return found
    try:
        return parse_object({"bytes": data}, len(data))
    except ErrataError as error:
        raise InvalidRequest(error.message) from error


def reply_of(row: DeliveryRow) -> Reply:
    """Return the mux reply of a row."""
    if row.status != "ok":
        return Reply("error", row.payload)
    if row.t is None:
        return Reply(_REPLY_WITHOUT_T[row.kind], row.payload)
    kind = "mcp" if row.kind == "mcp" else "observation"
    return Reply(kind, row.payload, row.eid, row.t, wire_digest(row.digest))


def recorded_of(row: DeliveryRow) -> Recorded:
    """Return a row as the state machine keeps it."""
    if row.id is None:
        raise ValueError("a row of a multiplexed session has an id")
    kind = "reset" if row.kind == "fork" and row.t is not None else row.kind  # a reset to a state(t)
    return Recorded(row.id, kind, row.request_sha, reply_of(row), row.request or None)
