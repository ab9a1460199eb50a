from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

try:
    from ..models import GreetingAction, GreetingObservation
except ImportError:
    from models import GreetingAction, GreetingObservation


class GreetingEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs) -> GreetingObservation:
        self._state = State(episode_id=str(uuid4()), step_count=0)
        return GreetingObservation(greeting="who is there?", done=False, reward=0.0)

    def step(self, action: GreetingAction, timeout_s=None, **kwargs) -> GreetingObservation:
        self._state.step_count += 1
        return GreetingObservation(greeting=f"hello, {action.name}", reward=1.0)

    @property
    def state(self) -> State:
        return self._state
