"""A step that blocks its thread until another session lets it go; one that hangs if sessions share a thread."""

import threading

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

GATE = threading.Event()


class GateAction(Action):
    do: str


class GateObservation(Observation):
    waited: bool = False


class GateEnvironment(Environment[GateAction, GateObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="gate", step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id or "gate", step_count=0)
        return GateObservation()

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.do == "wait":
            return GateObservation(waited=GATE.wait(60))
        GATE.set()
        return GateObservation()

    @property
    def state(self):
        return self._state
