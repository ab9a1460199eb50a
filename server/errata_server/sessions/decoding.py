"""Builds a `Request` from the data of a reset, step or tools/call, received or journaled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from openenv.core.env_server.serialization import deserialize_action
from openenv.core.env_server.types import Action
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from errata_protocol.errors import ErrataError, InvalidRequest
from errata_protocol.exception_text import text_of

from ..journal.base import DeliveryRow
from .session import Request


def reset_request(data: dict[str, Any]) -> Request:
    """Return the request of a reset with these arguments."""
    return Request("reset", to_json(data), reset=data)


def read_action(data: dict[str, Any], action_cls: type[Action]) -> Action:
    """Decode and validate the action of a step.

    Raises:
        ValidationError: ``data`` is not an action of that class.
        InvalidRequest: Another exception was raised during validation; presumably the input is at fault.
    """
    try:
        return deserialize_action(data, action_cls)
    except (ValidationError, ErrataError):
        raise
    except BaseException as error:  # of a validator; asyncio would let SystemExit end the event loop
        raise InvalidRequest(f"the action could not be read: {text_of(error)[:1000]}") from error


def step_request(data: dict[str, Any], action_cls: type[Action]) -> Request:
    """Return the request of a step with this action.

    Raises:
        ValidationError: See `read_action`.
        InvalidRequest: See `read_action`; or a string of the action is not valid Unicode.
    """
    action = read_action(data, action_cls)
    try:
        return Request("step", to_json(data), action=action)
    except PydanticSerializationError as error:  # sockets refuse such a frame earlier
        raise InvalidRequest(
            "a string of the action holds half of a surrogate pair, which has no UTF-8 form"
        ) from error


class Decoder:
    """Decodes journaled requests of one environment with the functions that its doors use.

    Args:
        action_cls: Action class that steps are validated against.

    Attributes:
        read_mcp: Decodes a tools/call; set by the MCP door, None without one.
    """

    def __init__(self, action_cls: type[Action]) -> None:
        self._action_cls = action_cls
        self.read_mcp: Callable[[bytes], Request] | None = None

    def recorded(self, row: DeliveryRow) -> Request:
        """Return the request of a journaled row, as the door originally passed it.

        Raises:
            ValueError: The request cannot be decoded, for example because the environment's action class changed.
            InvalidRequest: See `read_action`.
        """
        match row.kind:
            case "reset":
                return reset_request(json.loads(row.request))
            case "step":
                return step_request(json.loads(row.request), self._action_cls)
            case "mcp" if self.read_mcp is not None:
                return self.read_mcp(row.request)
        raise ValueError(f"a {row.kind} cannot be run again here")
