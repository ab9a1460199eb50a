"""Echo environments that stock OpenEnv and Errata serve unmodified. Imports nothing of Errata."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from .factories import COUNTER_VARIABLE, Tally

WORK_S = 0.020
BLOCKED_S = 0.2


_COUNTER = Tally(Path(os.environ[COUNTER_VARIABLE])) if COUNTER_VARIABLE in os.environ else None


class EchoAction(Action):
    """A text to be returned."""

    text: str = ""


class EchoObservation(Observation):
    """The text of the action."""

    text: str = ""


class PinnedEcho(Environment[EchoAction, EchoObservation, State]):
    """Synchronous environment; all its calls run on one thread."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="echo", step_count=0)
        if _COUNTER is not None:
            _COUNTER.add()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
        self._state = State(episode_id=episode_id or "echo", step_count=0)
        return EchoObservation(text="go")

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        self._state.step_count += 1
        return EchoObservation(text=action.text, reward=1.0)

    @property
    def state(self) -> State:
        return self._state


class FreeEcho(PinnedEcho):
    """Synchronous environment that may be called from any thread."""

    ANY_THREAD = True


class AsyncEcho(PinnedEcho):
    """Asynchronous environment; it runs on the event loop."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
        return self.reset(seed, episode_id)

    async def step_async(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        return self.step(action)


class BusyEcho(PinnedEcho):
    """A step uses 20 ms of its thread's CPU time, in Python."""

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        end = time.thread_time() + WORK_S
        while time.thread_time() < end:
            sum(range(200))
        return super().step(action)


class BlockingEcho(PinnedEcho):
    """A step blocks its thread for 0.2 s."""

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        time.sleep(BLOCKED_S)
        return super().step(action)


class FreeBlockingEcho(BlockingEcho):
    """A step blocks its thread for 0.2 s; the environment may be called from any thread."""

    ANY_THREAD = True


KINDS: dict[str, type[PinnedEcho]] = {
    "pinned": PinnedEcho,
    "any-thread": FreeEcho,
    "async": AsyncEcho,
    "work": BusyEcho,
    "blocking": BlockingEcho,
    "blocking-any-thread": FreeBlockingEcho,
}
"""Environment classes by the names that scenarios use."""
