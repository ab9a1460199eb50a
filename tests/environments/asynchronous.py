"""Asynchronous: overrides ``reset_async`` and ``step_async`` and holds an asyncio lock."""

import asyncio

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    text: str


class EchoObservation(Observation):
    text: str = ""


class AsyncEchoEnvironment(Environment[EchoAction, EchoObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._lock = asyncio.Lock()
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        raise NotImplementedError("use reset_async")

    def step(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError("use step_async")

    async def reset_async(self, seed=None, episode_id=None, **kwargs):
        async with self._lock:
            self._state = State(episode_id=episode_id or "async", step_count=0)
            return EchoObservation(text="ready")

    async def step_async(self, action, timeout_s=None, **kwargs):
        async with self._lock:
            await asyncio.sleep(0)
            self._state.step_count += 1
            return EchoObservation(text=action.text, reward=float(len(action.text)))

    @property
    def state(self):
        return self._state
