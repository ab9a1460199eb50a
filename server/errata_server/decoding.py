"""From request data to a `Request`; the one decoder of the doors and of re-execution."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.serialization import deserialize_action
from openenv.core.env_server.types import Action
from pydantic import ValidationError
from pydantic_core import to_json

from errata_protocol.errors import ErrataError, InvalidRequest

from .session import Request


def reset_request(data: dict[str, Any]) -> Request:
    """Return the request of a reset with these arguments."""
    return Request("reset", to_json(data), reset=data)


def step_request(data: dict[str, Any], action_cls: type[Action]) -> Request:
    """Return the request of a step with this action.

    Raises:
        ValidationError: It is not an action of that class.
        InvalidRequest: Its validators raised something else, as far as one can tell for the caller's input.
    """
    try:
        action = deserialize_action(data, action_cls)
    except (ValidationError, ErrataError):
        raise
    except Exception as error:
        raise InvalidRequest(f"the action could not be read: {error}") from error
    return Request("step", to_json(data), action=action)
