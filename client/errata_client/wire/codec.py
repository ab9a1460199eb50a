"""`Codec`: converts between an environment's classes and the mappings on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openenv.core.client_types import StepResult
from pydantic import BaseModel, ValidationError

from errata_protocol.errors import InvalidRequest

from .frames import FrameInvalid


@dataclass(frozen=True, slots=True)
class Codec:
    """The Pydantic classes that a client uses; None means plain mappings, as in OpenEnv's `GenericEnvClient`.

    Args:
        action_cls: Class of actions; an action that is a mapping is validated by it.
        observation_cls: Class of `StepResult.observation`.
        state_cls: Class of what ``state()`` returns.
    """

    action_cls: type[Any] | None = None
    observation_cls: type[Any] | None = None
    state_cls: type[Any] | None = None

    def action(self, action: Any) -> dict[str, Any]:
        """Return an action as the ``data`` of a step.

        Raises:
            InvalidRequest: It is neither a Pydantic model nor a mapping, or is no valid ``action_cls``, or has no JSON
                form.
        """
        if isinstance(action, Mapping) and self.action_cls is not None:
            try:
                action = self.action_cls.model_validate(dict(action))
            except ValidationError as error:
                raise InvalidRequest(f"the action does not fit {self.action_cls.__name__}: {error}") from error
        if isinstance(action, BaseModel):
            try:
                return action.model_dump(mode="json")
            except (ValueError, TypeError, RecursionError) as error:
                raise InvalidRequest(f"the {type(action).__name__} has no JSON form: {error}") from error
        if isinstance(action, Mapping):
            return dict(action)
        raise InvalidRequest(f"an action is a Pydantic model or a mapping, not {type(action).__name__}")

    def result(self, payload: dict[str, Any]) -> Any:
        """Return the `StepResult` of a decoded payload.

        Raises:
            FrameInvalid: It is no object, or the observation is no valid ``observation_cls``.
        """
        if not isinstance(payload, dict):
            raise FrameInvalid(f"the server sent a payload that is no object: {payload!r:.200}")
        observation: Any = payload.get("observation", {})
        if self.observation_cls is not None:
            if not isinstance(observation, dict):
                raise FrameInvalid(f"the server sent an observation that is no object: {observation!r:.200}")
            # OpenEnv's server moves reward and done out of the observation; the class has them as fields.
            outer = {key: payload[key] for key in ("reward", "done", "metadata") if payload.get(key) is not None}
            observation = _fit(self.observation_cls, {**outer, **observation})
        return StepResult(
            observation=observation,
            reward=payload.get("reward"),
            done=payload.get("done", False),
            metadata=payload.get("metadata"),
        )

    def state(self, payload: dict[str, Any]) -> Any:
        """Return the state of a decoded ``state`` reply.

        Raises:
            FrameInvalid: It is no valid ``state_cls``.
        """
        return payload if self.state_cls is None else _fit(self.state_cls, payload)


def _fit(cls: type[Any], fields: Any) -> Any:
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise FrameInvalid(f"what the server sent does not fit {cls.__name__}: {error}") from error
