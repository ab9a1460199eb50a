"""Environments whose `submit` waits for one of two slots that all sessions share, as a grading does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.environment import EnvironmentSpec, Snapshot
from errata_server import current_session
from errata_server.concurrency.slots import Slots

GRADING_S = float(os.environ.get("TEST_GRADING_S", "0.02"))
HANG_S = float(os.environ.get("TEST_HANG_S", "3.0"))
"""How long ``hang`` takes, once what stops the clock is over."""
SLOTS = Slots(2)
PLACES = threading.Semaphore(2)
WAITING: list[None] = []
"""An item for each thread that waits for a place."""


def waiting() -> int:
    """Return how many callers wait for a slot or a place."""
    return SLOTS.waiting + len(WAITING)


@contextlib.asynccontextmanager
async def held() -> AsyncIterator[None]:
    """Hold both slots and both places."""
    with PLACES, PLACES:
        async with SLOTS.take(contextlib.nullcontext), SLOTS.take(contextlib.nullcontext):
            yield


class ToolAction(Action):
    tool: str = "run"


class ToolObservation(Observation):
    graded: int = 0


class QueueingEnvironment(Environment[ToolAction, ToolObservation, State]):
    """On the event loop, with snapshots. Each grading is noted in the file of TEST_NOTES."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._graded = 0

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> ToolObservation:
        self._graded = 0
        return ToolObservation()

    async def step_async(self, action: ToolAction, timeout_s: float | None = None, **_: Any) -> ToolObservation:
        if action.tool == "hang":
            with current_session().clock_stopped():
                await asyncio.sleep(0.3)
            await asyncio.sleep(HANG_S)
        if action.tool != "submit":
            return ToolObservation(graded=self._graded)
        async with SLOTS.take(current_session().clock_stopped):
            note("begins")
            await asyncio.sleep(GRADING_S)
            self._graded += 1
            return ToolObservation(graded=self._graded, reward=1.0, done=True)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> ToolObservation:
        raise NotImplementedError

    def step(self, action: ToolAction, timeout_s: float | None = None, **_: Any) -> ToolObservation:
        raise NotImplementedError

    async def snapshot(self) -> Snapshot:
        return Snapshot(str(self._graded).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        self._graded = int(snapshot.state)

    @property
    def state(self) -> State:
        return State(step_count=self._graded)


class BlockingEnvironment(Environment[ToolAction, ToolObservation, State]):
    """The same in a thread for each session, without snapshots."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> ToolObservation:
        return ToolObservation()

    def step(self, action: ToolAction, timeout_s: float | None = None, **_: Any) -> ToolObservation:
        with current_session().clock_stopped():
            WAITING.append(None)
            PLACES.acquire()
            WAITING.pop()
            if action.tool == "hang":
                time.sleep(0.3)
        try:
            if action.tool == "hang":
                time.sleep(HANG_S)
            time.sleep(GRADING_S)
            return ToolObservation(graded=1, reward=1.0, done=True)
        finally:
            PLACES.release()

    @property
    def state(self) -> State:
        return State()


class BlockingWithSnapshots(BlockingEnvironment):
    """The same on the general path of a step."""

    def snapshot(self) -> Snapshot:
        return Snapshot(b"-")

    def restore(self, snapshot: Snapshot) -> None:
        pass


def note(text: str) -> None:
    path = os.environ.get("TEST_NOTES")
    if path:
        with Path(path).open("a") as notes:
            notes.write(f"{text}\n")


def spec(cls: type[Environment[Any, Any, Any]], **timeouts: float) -> EnvironmentSpec:
    return EnvironmentSpec(
        name="queueing",
        factory=f"{__name__}:{cls.__name__}",
        action_cls=ToolAction,
        observation_cls=ToolObservation,
        call_timeouts_s=timeouts,
    )


ASYNC = spec(QueueingEnvironment, submit=120.0)
BLOCKING = spec(BlockingEnvironment, submit=120.0)
SAVED = spec(BlockingWithSnapshots, submit=120.0)
UNANNOUNCED = spec(QueueingEnvironment)
UNANNOUNCED_BLOCKING = spec(BlockingEnvironment)
UNANNOUNCED_SAVED = spec(BlockingWithSnapshots)
