"""The environments that both servers serve, unmodified; nothing of Errata is imported here."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from .factories import Tally

COUNTER_VARIABLE = "ERRATA_BENCH_COUNTER"
"""Names the file in which environments count themselves."""

WORK_S = 0.020
BLOCKED_S = 0.2


_COUNTER = Tally(Path(os.environ[COUNTER_VARIABLE])) if COUNTER_VARIABLE in os.environ else None


class EchoAction(Action):
    """Say something."""

    text: str = ""


class EchoObservation(Observation):
    """What was said."""

    text: str = ""


class PinnedEcho(Environment[EchoAction, EchoObservation, State]):
    """Synchronous: all its calls on one thread."""

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
    """Synchronous, on any thread."""

    ANY_THREAD = True


class AsyncEcho(PinnedEcho):
    """On the event loop."""

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> EchoObservation:
        return self.reset(seed, episode_id)

    async def step_async(self, action: EchoAction, timeout_s: float | None = None, **_: Any) -> EchoObservation:
        return self.step(action)


class BusyEcho(PinnedEcho):
    """A step computes for 20 ms, in Python, whatever else the machine does meanwhile."""

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
    """The same, and it says that it does not care for threads."""

    ANY_THREAD = True


KINDS: dict[str, type[PinnedEcho]] = {
    "pinned": PinnedEcho,
    "any-thread": FreeEcho,
    "async": AsyncEcho,
    "work": BusyEcho,
    "blocking": BlockingEcho,
    "blocking-any-thread": FreeBlockingEcho,
}
"""By the names that scenarios use."""
