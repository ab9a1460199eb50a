"""A tiny environment for stock OpenEnv: it echoes, and misbehaves on request."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    """What to say."""

    text: str


class EchoObservation(Observation):
    """What was said and how often something was."""

    text: str = ""
    count: int = 0


class EchoState(State):
    """The last text beside upstream's fields."""

    last: str = ""


class EchoEnvironment(Environment):
    """Echoes; ``fail`` raises."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = EchoState()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        """Start counting anew."""
        self._state = EchoState(episode_id=episode_id, step_count=0)
        return EchoObservation(text="ready")

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        """Echo."""
        if action.text == "fail":
            raise ValueError("asked to fail")
        self._state.step_count += 1
        self._state.last = action.text
        metadata = {"said": action.text}
        return EchoObservation(text=action.text, count=self._state.step_count, reward=0.5, metadata=metadata)

    @property
    def state(self) -> EchoState:
        """The state."""
        return self._state


def stock_app(max_concurrent_envs: int = 16) -> Any:
    """Return stock OpenEnv's application around the echo environment."""
    return create_app(
        EchoEnvironment,
        EchoAction,
        EchoObservation,
        env_name="echo",
        max_concurrent_envs=max_concurrent_envs,
        state_cls=EchoState,
    )
