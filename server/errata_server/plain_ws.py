"""The plain ``/ws`` door: upstream's messages unchanged, with capabilities, state(t) and attach (PROTOCOL A).

One request at a time, answered in order; nothing is ever pushed. Whatever a client sends, it gets an error frame with a
code, and its session lives.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

from openenv.core.env_server.mcp_types import JsonRpcErrorCode, JsonRpcRequest, JsonRpcResponse, WSMCPMessage
from openenv.core.env_server.serialization import deserialize_action
from openenv.core.env_server.types import (
    Action,
    WSCloseMessage,
    WSResetMessage,
    WSStateMessage,
    WSStepMessage,
)
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from errata_protocol.capabilities import Capabilities, SessionPosition
from errata_protocol.environment import Recovery
from errata_protocol.errors import (
    CallerError,
    ErrataError,
    InvalidRequest,
)
from errata_protocol.payload import splice
from errata_protocol.replay import StateAtRequest

from .mcp import McpDoor
from .replay import Replay
from .session import Reply, Request, Session
from .sessions import Sessions

log = logging.getLogger("errata.ws")

MAX_PIPELINED = 64
"""Frames read ahead of the one that runs; beyond it the socket is not read, and TCP slows the sender down."""

MAX_DEPTH = 256
"""Nesting of a frame; far above any action, far below what makes a decoder or a validator give up."""

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


class PlainSocket:
    """One connection on ``/ws``.

    Args:
        websocket: Not yet accepted.
        sessions: The environment's sessions.
        replay: Reads of the journal; None in production mode, which has no state(t).
        mcp: JSON-RPC requests.
        action_cls: Action class that steps are validated against.
        capabilities: What the server answers to a probe.
        principal: Who opened the socket.
    """

    def __init__(
        self,
        websocket: WebSocket,
        sessions: Sessions,
        replay: Replay | None,
        mcp: McpDoor,
        action_cls: type[Action],
        capabilities: Callable[[], Capabilities],
        principal: str | None,
    ) -> None:
        self._websocket = websocket
        self._sessions = sessions
        self._replay = replay
        self._mcp = mcp
        self._action_cls = action_cls
        self._capabilities = capabilities
        self._principal = principal
        self._attached_by_id = False
        self._inbox: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_PIPELINED)
        self._told = False  # the client asked for capabilities: frames may carry eid, t and digest (C1)

    async def serve(self) -> None:
        """Accept, open or attach a session, answer until the client leaves."""
        await self._websocket.accept()
        try:
            session = await self._session()
        except Exception as error:
            if isinstance(error, ErrataError):
                told = error.to_wire()
                if "factory_name" in error.details:
                    told["code"] = "FACTORY_ERROR"
            else:
                log.exception("session could not be opened")
                told = {"message": str(error), "code": "SESSION_ERROR"}
            await self._send(_error_frame(told))
            await self._close()
            return
        reader = asyncio.create_task(self._read(session))
        try:
            while (message := await self._next()) is not None and session.attached is self:
                reply = await self._answer(session, message)
                if reply is None:
                    break
                await self._send(reply)
        except WebSocketDisconnect:
            pass
        finally:
            reader.cancel()
            await self._sessions.detach(session, self)
            await self._close()

    async def _read(self, session: Session) -> None:
        """Queue what the client sends. Reading on while a step runs shows at once when the client is gone.

        A given-out session is free for its next socket from that moment; the step that runs still commits.
        """
        limit = self._sessions.runtime.settings.max_frame
        try:
            while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
                size = len(message.get("bytes") or message.get("text") or "")
                await self._room.acquire()
                self._inbox.put_nowait(message if size <= limit else {"oversize": size})
            if session.given_out:
                await self._sessions.detach(session, self)
        finally:
            self._inbox.put_nowait(None)

    async def _next(self) -> dict[str, Any] | None:
        message = await self._inbox.get()
        self._room.release()
        return message

    async def _session(self) -> Session:
        wanted = self._websocket.query_params.get("session_id")
        if wanted:
            session = await self._sessions.find(wanted, self._principal)
            self._attached_by_id = True
        else:
            session = await self._sessions.open(principal=self._principal)
        self._sessions.attach(session, self)
        return session

    async def _answer(self, session: Session, message: dict[str, Any]) -> bytes | None:
        """Return the frame that answers ``message``, None to hang up."""
        try:
            frame = _parse(message, self._sessions.runtime.settings.max_frame)
            return await self._dispatch(session, frame)
        except ValidationError as error:
            return _error_frame(
                {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": json.loads(_errors_json(error))}
            )
        except ErrataError as error:
            return _error_frame(error.to_wire())
        except Exception as error:  # a defect of ours must not cost the client its session
            log.exception("request failed")
            return _error_frame({"message": str(error), "code": "EXECUTION_ERROR"})

    async def _dispatch(self, session: Session, frame: dict[str, Any]) -> bytes | None:
        match frame.get("type", ""):
            case "reset":
                data = WSResetMessage(**frame).data
                return self._delivered(
                    "observation",
                    await self._sessions.admit(session, Request("reset", to_json(data), reset=data), self),
                )
            case "step":
                data = WSStepMessage(**frame).data
                action = _action(data, self._action_cls)
                return self._delivered(
                    "observation",
                    await self._sessions.admit(session, Request("step", to_json(data), action=action), self),
                )
            case "state" if "data" in frame and self._replay is not None:
                return await self._state_at(session, frame, self._replay)
            case "state":
                WSStateMessage(**frame)
                return to_json({"type": "state", "data": await self._sessions.state(session)}, inf_nan_mode="null")
            case "capabilities":
                self._told = True
                position = SessionPosition(
                    session_id=session.sid if session.given_out else None, eid=session.eid, t=session.t
                )
                told = self._capabilities().model_copy(
                    update={"session": position, "recovery": Recovery(session.row.recovery)}
                )
                return to_json({"type": "capabilities", "data": told.model_dump(mode="json")})
            case "close":
                WSCloseMessage(**frame)
                session.closing = session.closing or not self._attached_by_id  # upstream: an attached socket detaches
                return None
            case "mcp":
                return await self._mcp_frame(session, WSMCPMessage(**frame).data)
            case other:
                shown = other if isinstance(other, str) else type(other).__name__
                return _error_frame({"message": f"Unknown message type: {shown}", "code": "UNKNOWN_TYPE"})

    async def _state_at(self, session: Session, frame: dict[str, Any], replay: Replay) -> bytes:
        extra = set(frame) - {"type", "data"}
        if extra:
            raise InvalidRequest(f"a state message has the keys type and data, not {sorted(extra)}")
        asked = StateAtRequest.model_validate(frame["data"])
        row = await replay.state_at(session, asked.t, asked.eid, self._principal)
        head = {
            "type": "state_at",
            "eid": row.eid,
            "t": row.t,
            "kind": row.wire_kind,
            "digest": f"sha256:{row.digest.hex()}",
        }
        return splice(head, row.payload)

    async def _mcp_frame(self, session: Session, data: dict[str, Any]) -> bytes:
        try:
            rpc = JsonRpcRequest(**data)
        except (ValidationError, TypeError) as error:
            response = JsonRpcResponse.error_response(JsonRpcErrorCode.INVALID_REQUEST, f"Invalid request: {error}")
            return to_json({"type": "mcp", "data": response.model_dump()})
        answer = await self._mcp.on_session(session, rpc, to_json(data), self)
        if isinstance(answer, Reply):
            return self._delivered("mcp", answer)
        return to_json({"type": "mcp", "data": answer})

    def _delivered(self, kind: str, reply: Reply) -> bytes:
        head: dict[str, Any] = {"type": kind}
        if self._told:
            head |= {"eid": reply.eid, "t": reply.t, "digest": reply.digest}
        return splice(head, reply.payload)

    async def _send(self, frame: bytes) -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            try:
                await self._websocket.send_text(frame.decode())
            except (RuntimeError, OSError) as error:  # starlette's and uvicorn's words for a peer that is gone
                raise WebSocketDisconnect(code=1006, reason=str(error)) from error

    async def _close(self) -> None:
        try:
            await self._websocket.close()
        except (RuntimeError, WebSocketDisconnect):
            pass  # the peer closed first


def _parse(message: dict[str, Any], max_frame: int) -> dict[str, Any]:
    if "oversize" in message:
        raise _Refused(
            f"a frame of {message['oversize']} characters is over the limit of {max_frame}: send less in one action",
            "FRAME_TOO_LARGE",
        )
    text = message.get("text")
    if text is None:
        try:
            text = message["bytes"].decode()
        except UnicodeDecodeError as error:
            raise _Refused(f"Invalid JSON: a binary frame that is not UTF-8: {error}", "INVALID_JSON") from error
    try:
        frame = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise _Refused("Invalid JSON: nested too deeply", "INVALID_JSON") from error
    except ValueError as error:
        raise _Refused(f"Invalid JSON: {error}", "INVALID_JSON") from error
    if text.count("{") + text.count("[") > MAX_DEPTH and _deeper_than(frame, MAX_DEPTH):
        raise _Refused(f"Invalid JSON: nested deeper than {MAX_DEPTH} levels", "INVALID_JSON")
    if not isinstance(frame, dict):
        raise InvalidRequest(f"a frame is a JSON object, not {type(frame).__name__}")
    if _LONE_SURROGATE.search(text) or "\\ud" in text.lower():
        _refuse_surrogates(frame)
    return frame


def _deeper_than(value: Any, levels: int) -> bool:
    """Say whether containers nest deeper; level by level, because recursion limits differ between Pythons."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse_surrogates(frame: dict[str, Any]) -> None:
    try:
        to_json(frame)
    except Exception as error:
        raise InvalidRequest("a string holds half of a surrogate pair, which has no UTF-8 form") from error


def _action(data: dict[str, Any], action_cls: type[Action]) -> Action:
    """Validate an action; a validator that raises anything is the caller's invalid input, as far as one can tell."""
    try:
        return deserialize_action(data, action_cls)
    except (ValidationError, ErrataError):
        raise
    except Exception as error:
        raise InvalidRequest(f"the action could not be read: {error}") from error


def _errors_json(error: ValidationError) -> bytes:
    return to_json(error.errors(include_context=False, include_url=True), serialize_unknown=True, inf_nan_mode="null")


def _error_frame(data: dict[str, Any]) -> bytes:
    return to_json({"type": "error", "data": data}, serialize_unknown=True, inf_nan_mode="null")


class _Refused(CallerError):
    """A frame that is refused before it means anything; its code is given."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.__dict__["code"] = code
