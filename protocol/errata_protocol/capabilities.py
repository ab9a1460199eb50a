"""What a server can do beyond stock OpenEnv, and how a client finds out (PROTOCOL A1, G).

A client sends ``{"type": "capabilities"}``. Errata answers with `Capabilities`; a vanilla server answers UNKNOWN_TYPE
and keeps the session, and the client falls back to its own history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from .environment import Recovery, tool_of

PROTOCOL_NAME = "openenv.mux.v1"
PROBE: dict[str, Any] = {"type": "capabilities"}


class ServerLimits(BaseModel):
    """Bounds the server holds its peers to.

    Attributes:
        max_frame: Largest accepted frame, bytes.
        max_elements: Elements of one mux frame.
        in_flight_socket: Requests in flight on one mux socket.
        in_flight_session: Requests in flight of one mux session.
        detach_ttl_s: How long a detached session is kept ready before it is hibernated.
    """

    max_frame: int = 16 * 1024**2
    max_elements: int = 256
    in_flight_socket: int = 1024
    in_flight_session: int = 16
    detach_ttl_s: float = 600.0


class SessionPosition(BaseModel):
    """Where the asking session stands; only on a socket, never in ``GET /capabilities``.

    Attributes:
        session_id: Address of this session for ``?session_id=`` once it was given out.
        eid: Current episode, None before the first reset.
        t: Last committed delivery, None before the first reset.
        read_key: Opens the session's episodes outside of it, as a bearer token; left out where the server has tokens,
            and in production mode.
        first: First delivery of ``eid`` that ``delivery`` reads; left out where the socket has no such message.
    """

    session_id: str | None = None
    eid: str | None = None
    t: int | None = None
    read_key: str | None = None
    first: int | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        if values.get("read_key") is None:
            values.pop("read_key", None)
        if "first" not in self.model_fields_set:
            values.pop("first", None)
        return values


class Capabilities(BaseModel):
    """``data`` of the capabilities reply.

    Attributes:
        protocol: Name of the mux subprotocol.
        environment: Name of the environment behind this door.
        extensions: Extension name to version; an absent name is not offered.
        recovery: What becomes of a session when the server crashes.
        agent_text_version: Version of the environment's ``agent_text``.
        limits: Bounds.
        session: Position of the asking session.
        call_timeouts_s: How long a step may take by the tool of its action, in seconds, where that is longer than other
            steps; left out where no tool has one.
        shard: Name of the data directory, which the ids of new sessions and episodes have in them; left out where it
            has none.
    """

    model_config = ConfigDict(extra="allow")

    protocol: str = PROTOCOL_NAME
    environment: str
    extensions: dict[str, int] = Field(default_factory=dict)
    recovery: Recovery = Recovery.NONE
    agent_text_version: str | None = None
    limits: ServerLimits = Field(default_factory=ServerLimits)
    session: SessionPosition | None = None
    call_timeouts_s: dict[str, float] = Field(default_factory=dict)
    shard: str | None = None

    @model_serializer(mode="wrap")
    def _without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        if not values.get("call_timeouts_s"):
            values.pop("call_timeouts_s", None)
        if values.get("shard") is None:
            values.pop("shard", None)
        return values

    def step_timeout_s(self, action: Any, timeout_s: float) -> float:
        """Return how long a client should wait for the reply to a step, in seconds.

        That is ``timeout_s``, or the time that ``call_timeouts_s`` gives the tool of the action if that is longer.

        Args:
            action: ``data`` of the step.
            timeout_s: How long the client waits for other steps.
        """
        if not self.call_timeouts_s or not isinstance(action, Mapping):
            return timeout_s
        return max(timeout_s, self.call_timeouts_s.get(tool_of(action.get("tool"), action.get("tool_name")), 0.0))

    def offers(self, extension: str, version: int = 1) -> bool:
        """Return whether the server offers ``extension`` in at least ``version``."""
        return self.extensions.get(extension, 0) >= version
