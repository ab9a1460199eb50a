"""Between an environment's own classes and the mappings on the wire."""

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
    """Which classes a client speaks in; None stands for plain mappings, as `GenericEnvClient` has it.

    Args:
        action_cls: A Pydantic class, as the others are. Actions given as mappings are validated by it.
        observation_cls: What `StepResult.observation` is.
        state_cls: What ``state()`` returns.
    """

    action_cls: type[Any] | None = None
    observation_cls: type[Any] | None = None
    state_cls: type[Any] | None = None

    def action(self, action: Any) -> dict[str, Any]:
        """Return the ``data`` of a step.

        Raises:
            InvalidRequest: It is neither a model nor a mapping, or does not fit ``action_cls``.
        """
        if isinstance(action, Mapping) and self.action_cls is not None:
            try:
                action = self.action_cls.model_validate(dict(action))
            except ValidationError as error:
                raise InvalidRequest(f"the action does not fit {self.action_cls.__name__}: {error}") from error
        if isinstance(action, BaseModel):
            return action.model_dump(mode="json")
        if isinstance(action, Mapping):
            return dict(action)
        raise InvalidRequest(f"an action is a Pydantic model or a mapping, not {type(action).__name__}")

    def result(self, payload: dict[str, Any]) -> Any:
        """Return the `StepResult` of a decoded payload.

        Raises:
            FrameInvalid: The observation does not fit ``observation_cls``.
        """
        observation: Any = payload.get("observation", {})
        if self.observation_cls is not None:
            # Upstream's server moves reward and done out of the observation; a model has them inside.
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
            FrameInvalid: It does not fit ``state_cls``.
        """
        return payload if self.state_cls is None else _fit(self.state_cls, payload)


def _fit(cls: type[Any], fields: Any) -> Any:
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise FrameInvalid(f"what the server sent does not fit {cls.__name__}: {error}") from error
