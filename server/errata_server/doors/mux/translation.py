"""`RequestDecoder`: decodes mux requests for a session; and functions that convert journal rows to mux replies."""

from __future__ import annotations

from typing import Any

import msgspec
from openenv.core.env_server.mcp_types import JsonRpcRequest
from openenv.core.env_server.types import Action
from pydantic import ValidationError

from errata_protocol.errors import EnvironmentOutputInvalid, ErrataError, InvalidRequest
from errata_protocol.json_text import is_readable
from errata_protocol.labels import NO_LABELS
from errata_protocol.mux import EncodedReply, RecordedReply, RunRequest

from ...journal.base import DeliveryRow
from ...runtime.fleet import DeliveredState
from ...runtime.rows import wire_digest
from ...sessions.decoding import read_action
from ...sessions.reexecution import as_received
from ...sessions.session import Request
from ..input_errors import bounded_errors, named_fields
from ..json_rpc import invalid_call, parse_rpc
from ..mcp import McpDoor
from ..strict_json import parse_object

_REPLY_WITHOUT_T = {"mcp": "mcp", "fork": "forked", "close": "closed"}


class RpcRefused(Exception):
    """Raised for a tools/call that is not well-formed; its recorded reply is a JSON-RPC error.

    Attributes:
        response: The JSON-RPC response.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        super().__init__("a tools/call that is not well-formed")
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

    def request(self, run: RunRequest, now: float, data: dict[str, Any] | None = None) -> Request:
        """Return the session request of a reset, step or tools/call.

        Args:
            run: The request.
            now: The current time, on the clock of ``run.deadline``, seconds.
            data: `object_of` its ``data``, if that was called before.

        Raises:
            InvalidRequest: Its ``data`` cannot be decoded; this error is recorded as its reply.
            RpcRefused: A tools/call is not well-formed; its JSON-RPC error is recorded as its reply.
        """
        data = object_of(run.data) if data is None else data
        timeout_s = None if run.deadline is None else run.deadline - now
        if run.kind == "step":
            try:
                action = read_action(data, self._action_cls)
            except ValidationError as error:
                raise self._no_action(error) from error
            return Request("step", run.data, action=action, id=run.id, sha=run.sha, timeout_s=timeout_s)
        if run.kind == "reset":
            labels = run.labels or NO_LABELS
            return Request("reset", run.data, reset=data, id=run.id, sha=run.sha, timeout_s=timeout_s, labels=labels)
        rpc = parse_rpc(data)
        if not isinstance(rpc, JsonRpcRequest):
            raise RpcRefused(rpc)
        invalid = invalid_call(rpc)
        if invalid is not None:
            raise RpcRefused(invalid)
        request = self._mcp.request(rpc, run.data)
        return Request("mcp", run.data, call=request.call, id=run.id, sha=run.sha, timeout_s=timeout_s)

    def _no_action(self, error: ValidationError) -> InvalidRequest:
        errors = bounded_errors(error.errors(include_context=False, include_url=False))
        return InvalidRequest(f"this is no {self._action_cls.__name__}: {named_fields(errors)}", errors=errors)


def object_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``, as strict as `parse_object` is.

    Raises:
        InvalidRequest: It is no object, or holds something on which JSON decoders disagree.
    """
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        found = None
    # Most actions take this way: with as many colons as keys, no key stands twice and no object is nested.
    if type(found) is dict and data.count(b":") == len(found):
        return found
    try:
        return parse_object({"bytes": data}, len(data))
    except ErrataError as error:
        raise InvalidRequest(error.message) from error


def reply_of(row: DeliveryRow) -> EncodedReply:
    """Return the reply that a row holds."""
    if row.status != "ok":
        return EncodedReply("error", row.payload)
    if row.t is None:
        return EncodedReply(_REPLY_WITHOUT_T[row.kind], row.payload)
    kind = "mcp" if row.kind == "mcp" else "observation"
    return EncodedReply(kind, row.payload, row.eid, row.t, wire_digest(row.digest))


def replayed_reply(row: DeliveryRow) -> EncodedReply:
    """Return the reply that an earlier row holds; an error where a shared socket cannot carry its payload.

    Journals of earlier versions may hold halves of surrogate pairs. A client that cannot read one message of a frame
    may lose all others in it, and get them again after each reconnect.
    """
    if is_readable(row.payload):
        return reply_of(row)
    return EncodedReply("error", msgspec.json.encode(unreadable(row).to_wire()))


def unreadable(row: DeliveryRow | DeliveredState) -> EnvironmentOutputInvalid:
    """Return the error for a payload that a shared socket cannot carry."""
    where = f"GET /episodes/{row.eid}/states/{row.t} has its bytes" if row.t is not None else "it is in the journal"
    return EnvironmentOutputInvalid(
        f"this payload was written by an earlier version and holds half of a surrogate pair, which not every client on "
        f"a shared socket can read: {where}"
    )


def recorded_of(row: DeliveryRow) -> RecordedReply:
    """Return the recorded request and reply of a row, as the state machine keeps them.

    Raises:
        ValueError: The row has no id: its session is not a multiplexed one.
    """
    if row.id is None:
        raise ValueError("this row has no id: it is not of a multiplexed session")
    kind = "reset" if row.kind == "fork" and row.t is not None else row.kind  # a reset to a state(t)
    request = as_received(row.request, row.request_sha) if row.kind == "reset" and row.request else row.request or None
    return RecordedReply(row.id, kind, row.request_sha, replayed_reply(row), request)
