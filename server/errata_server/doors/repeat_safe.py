"""`RepeatSafe`: answers requests of a plain socket that carry a ``request_id``, each executed once (PROTOCOL A7)."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from msgspec.structs import replace
from openenv.core.env_server.mcp_types import JsonRpcRequest, McpMethod, WSMCPMessage
from openenv.core.env_server.types import Action, WSResetMessage, WSStepMessage
from pydantic import ValidationError
from pydantic_core import to_json

from errata_protocol.errors import CODES, EnvironmentFailed, ErrataError, InvalidRequest
from errata_protocol.exception_text import text_of
from errata_protocol.mux import injected_fork

from ..episodes.forks import Forks
from ..journal.base import DeliveryRow
from ..runtime.rows import Admitted, error_row, refused_row, replied_row
from ..sessions.decoding import reset_request, step_request
from ..sessions.named_requests import MAX_LENGTH, NamedRequests, digest_of
from ..sessions.session import Reply, Request, Session
from ..sessions.sessions import Sessions
from .injected_state import reset_to
from .input_errors import bounded_errors, error_json, named_fields
from .json_rpc import invalid_call, parse_rpc
from .mcp import McpDoor, refused
from .readers import Reader

log = logging.getLogger("errata.ws")

TAKE_AN_ID = frozenset(("reset", "step", "mcp"))
"""Types of messages that may have a ``request_id``."""


def read_request_id(frame: dict[str, Any]) -> str:
    """Remove the ``request_id`` from a frame and return it.

    Raises:
        InvalidRequest: It is no string of 1 to 255 characters.
    """
    request_id = frame.pop("request_id")
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_LENGTH:
        raise InvalidRequest(f"request_id is a string of 1 to {MAX_LENGTH} characters")
    return request_id


def validation_error(error: ValidationError) -> dict[str, Any]:
    """Return the ``data`` of the error frame for a message that does not fit its model."""
    errors = bounded_errors(error.errors(include_context=False, include_url=True))
    return {"message": f"Invalid message: {named_fields(errors)}", "code": "VALIDATION_ERROR", "errors": errors}


class RepeatSafe:
    """Runs each named request of one plain socket once, and finds the reply to one that is sent again.

    Args:
        sessions: The environment's sessions.
        forks: Makes forks, for a reset to a state(t).
        mcp: Answers JSON-RPC requests.
        action_cls: Action class that steps are validated against.
        reader: Who opened the socket.
    """

    def __init__(
        self, sessions: Sessions, forks: Forks, mcp: McpDoor, action_cls: type[Action], reader: Reader
    ) -> None:
        self._sessions = sessions
        self._forks = forks
        self._mcp = mcp
        self._action_cls = action_cls
        self._reader = reader
        self._named: NamedRequests | None = None

    async def row(
        self, session: Session, frame: dict[str, Any], request_id: str, size: int, socket: object
    ) -> DeliveryRow:
        """Return the committed row of a request: of now, or of the first time that it came.

        Args:
            session: The socket's session.
            frame: The message without its ``request_id``.
            request_id: The request's id.
            size: Bytes of the message.
            socket: The socket that received it; see `Sessions.admit`.

        Raises:
            RequestIdReused: Another request had this id.
            ReplyGone: The request ran, and its reply is gone.
            ErrataError: The request was refused without effect; it may be sent again under its id.
        """
        store = self._sessions.runtime.store
        if self._named is None:
            self._named = NamedRequests(store, session.sid)
        named, kind, data = self._named, frame["type"], frame.get("data", {})
        digest = await digest_of(kind, data, size)
        async with session.naming:  # the first time, it may have come on a socket that is gone, and still run
            row = await named.reply(request_id, digest)
            if row is None:
                raw = to_json(data)
                admitted = Admitted(
                    eid=session.eid or "",
                    t=(session.t or 0) + 1,
                    sid=session.sid,
                    id=named.number(request_id),
                    kind=kind,
                    request=raw,
                    created=self._sessions.runtime.clock.time(),
                    request_sha=hashlib.sha256(raw).digest(),
                )
                row = await self._run(session, frame, admitted, socket)
                named.ran(request_id, row.id or 0, digest)
            return row

    async def _run(self, session: Session, frame: dict[str, Any], admitted: Admitted, socket: object) -> DeliveryRow:
        """Run a request and return its committed row, which may hold an error."""
        store = self._sessions.runtime.store
        try:
            row = await self._delivered(session, frame, admitted, socket)
            if row.t is not None:
                return row
        except ValidationError as error:
            row = refused_row(admitted, error_json(validation_error(error)), "VALIDATION_ERROR")
        except Exception as error:
            row = _failed(session, admitted, error)
        await store.commit(row)
        return row

    async def _delivered(
        self, session: Session, frame: dict[str, Any], admitted: Admitted, socket: object
    ) -> DeliveryRow:
        """Run a request; return its committed delivery, or the row to commit of a reply that is none."""
        match frame["type"]:
            case "reset":
                asked = WSResetMessage(**frame).data
                place = injected_fork(asked)
                if place is not None:
                    runtime, reader = self._sessions.runtime, self._reader
                    return await reset_to(runtime, self._forks, session, admitted, place, reader, socket)
                request = reset_request(asked)
            case "step":
                request = step_request(WSStepMessage(**frame).data, self._action_cls)
            case _:
                return await self._mcp_row(session, WSMCPMessage(**frame).data, admitted, socket)
        return await self._committed(session, request, admitted, socket)

    async def _mcp_row(self, session: Session, data: dict[str, Any], admitted: Admitted, socket: object) -> DeliveryRow:
        rpc = parse_rpc(data)
        if isinstance(rpc, JsonRpcRequest):
            called = rpc.method == McpMethod.TOOLS_CALL and isinstance(rpc.params, dict) and invalid_call(rpc) is None
            if called:
                try:
                    return await self._committed(session, self._mcp.request(rpc, admitted.request), admitted, socket)
                except ErrataError as error:
                    if not CODES[error.code].consumes_id:
                        raise
                    return replied_row(admitted, error_json(refused(rpc, error)))
            answer = await self._mcp.on_session(session, rpc, admitted.request, socket)
            assert not isinstance(answer, Reply), "only a tools/call is a delivery"
            rpc = answer
        return replied_row(admitted, error_json(rpc))

    async def _committed(self, session: Session, request: Request, admitted: Admitted, socket: object) -> DeliveryRow:
        numbered = replace(request, id=admitted.id, sha=admitted.request_sha)
        return await self._sessions.committed(session, numbered, socket)


def _failed(session: Session, admitted: Admitted, error: Exception) -> DeliveryRow:
    """Return the row to commit for a request that failed.

    Raises:
        ErrataError: The request was refused without effect.
    """
    if not isinstance(error, ErrataError):  # a defect of ours must not cost the client its session
        log.error("request failed", exc_info=error)
        error = EnvironmentFailed(text_of(error))
    if not CODES[error.code].consumes_id:
        raise error
    return error_row(session.as_run(admitted), error)
