"""Says nothing about its classes; and classes of which a server can make no environment."""

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State


class SilentEnvironment(Environment):
    def reset(self, seed=None, episode_id=None, **kwargs):
        from .asynchronous import EchoObservation

        return EchoObservation(text="silent")

    def step(self, action, timeout_s=None, **kwargs):
        from .asynchronous import EchoObservation

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
