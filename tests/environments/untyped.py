"""Says nothing about its classes, or only part of it; and classes of which a server can make no environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from .asynchronous import EchoAction, EchoObservation

if TYPE_CHECKING:
    from nowhere import Deadline

A = TypeVar("A", bound=Action)


class SilentEnvironment(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return EchoObservation(text="silent")

    def step(self, action, timeout_s=None, **kwargs):
        return EchoObservation(text=action.text)

    @property
    def state(self):
        return State(episode_id="silent", step_count=0)


class NeedsArgument(SilentEnvironment):
    def __init__(self, path):
        super().__init__()


class HalfDone(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return None


class PartlyHinted(SilentEnvironment):
    def step(self, action: EchoAction, timeout_s: Deadline | None = None, **kwargs) -> EchoObservation:
        return EchoObservation(text=action.text)


class Typed(Environment[A, EchoObservation, State], Generic[A]):
    pass


class ThroughGenericBase(Typed[EchoAction]):
    reset = SilentEnvironment.reset
    step = SilentEnvironment.step
    state = SilentEnvironment.state


class BareAction(SilentEnvironment):
    def step(self, action: Action, timeout_s=None, **kwargs) -> Observation:
        return Observation()


def silent() -> SilentEnvironment:
    """A factory that is no class."""
    return SilentEnvironment()
