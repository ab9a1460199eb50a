"""Environments that are right and unlike the kit's own: they end at once, refuse arguments, or answer at random."""

from __future__ import annotations

import json
import random
import time
from enum import Enum
from typing import Any, Literal

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel, Field

from errata_protocol.environment import Snapshot
from errata_protocol.markers import Detection, ErrorKind, ErrorMarkers, ErrorSite

RESET_S = 0.6


class Direction(Enum):
    NORTH = "north"
    SOUTH = "south"


class Cell(BaseModel):
    row: int = Field(ge=1, le=3)


class Move(Action):
    direction: Direction
    cell: Cell
    kind: Literal["walk", "run"]
    cells: list[Cell] = Field(min_length=1)


class Seen(ErrorMarkers, Observation):
    total: float = 0
    step: int = 0


class Grid(Environment[Move, Seen, State]):
    """Its action has required enums, bounds and nested objects; each step names its number."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    DETERMINISTIC = True
    ends_at: int | None = None
    says_done = True

    def __init__(self) -> None:
        super().__init__()
        self._total: float = 0
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self._total, self._state = 0, State(episode_id=episode_id, step_count=0)
        return Seen()

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        if self.ends_at is not None and self._state.step_count >= self.ends_at:
            raise ValueError("the episode is over: reset")
        self._state.step_count += 1
        self._total += 1 + 10 * action.cell.row + 100 * (action.direction is Direction.NORTH)
        done = self.says_done and self._state.step_count == self.ends_at
        return Seen(total=self._total, step=self._state.step_count, reward=1.0, done=done)

    @property
    def state(self) -> State:
        return self._state


class EndsAtOnce(Grid):
    """An episode has one step."""

    ends_at = 1


class Judge(EndsAtOnce):
    """An episode has one step, which fails where the move is south."""

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        judged = super().step(action)
        if action.direction is Direction.NORTH:
            return judged
        return judged.with_detection(Detection.of(ErrorKind.NONZERO_EXIT, ErrorSite(action_field="kind")))


class EndsSilently(Grid):
    """An episode has four steps; no step says that it was the last."""

    ends_at, says_done = 4, False


class TakesNothing(Grid):
    """Reset has no argument."""

    def reset(self) -> Seen:  # type: ignore[override]
        return super().reset()

    @property
    def state(self) -> State:
        return State()  # which counts nothing


class TakesTask(Grid):
    """Reset needs an argument, and refuses all that it does not know."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, task: str = "", **more: Any) -> Seen:
        if not task or more:
            raise ValueError(f"reset takes task, not {sorted(more)}")
        return super().reset(seed, episode_id)


class NoSeed(Grid):
    """Reset refuses a seed, which the server gives to one that is declared deterministic."""

    DETERMINISTIC = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        if seed is not None:
            raise ValueError("this environment has no seed")
        return super().reset(seed, episode_id)


class ResetsSlowly(Grid):
    """Reset takes longer than a reply may."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        time.sleep(RESET_S)
        return super().reset(seed, episode_id)


class Alone(Grid):
    """One session at a time."""

    SUPPORTS_CONCURRENT_SESSIONS = False


class Dice(Grid):
    """Each episode answers something else; snapshots keep the dice."""

    DETERMINISTIC = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        super().reset(seed, episode_id)
        self._dice = random.Random()
        return Seen(total=self._dice.random())

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        return super().step(action).model_copy(update={"total": self._dice.random()})

    async def snapshot(self) -> Snapshot:
        return Snapshot(json.dumps([self._dice.getstate(), self._total, self._state.model_dump()]).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        (version, words, gauss), self._total, state = json.loads(snapshot.state)
        self._dice = random.Random()
        self._dice.setstate((version, tuple(words), gauss))
        self._state = State(**state)


class CountsForks(Dice):
    """Counts the steps of a fork itself, and its observations say so."""

    async def forked(self, episode_id: str) -> None:
        self._state = State(episode_id=episode_id, step_count=0)


class Picky(Grid):
    """Refuses every other action that its schema allows."""

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        if action.direction is Direction.SOUTH:
            raise ValueError("there is a wall")
        return super().step(action)


class Refuses(Grid):
    """Refuses every action."""

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Seen:
        raise ValueError("not today")
