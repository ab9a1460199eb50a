"""Environments without snapshots that are declared deterministic: honest ones, and ones that lie."""

from __future__ import annotations

import itertools
import os
import random
import sqlite3
import threading
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Observation, State

from .environments import CountAction, CountObservation


class DiceEnvironment(Environment[CountAction, CountObservation, State]):
    """Sync, tied to its thread, with a random generator that only its seed decides."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    DETERMINISTIC = True

    seeds: list[int | None] = []  # noqa: RUF012 - what resets were given, by all instances of this process
    made = 0
    hanging: threading.Event | None = None

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self._db = sqlite3.connect(":memory:")
        self._db.execute("create table c(n integer)")
        self._dice = random.Random(0)
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CountObservation:
        self.seeds.append(seed)
        if kwargs.get("do") == "raise":
            self._db.execute("insert into c values (1000)")
            raise ValueError("no such task")
        self._db.execute("delete from c")
        self._dice = random.Random(seed)
        self._state = State(episode_id=episode_id, step_count=0)
        return self._observation()

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        self._db.execute("insert into c values (?)", (action.n,))
        self._state.step_count += 1
        match action.do:
            case "raise":
                raise ValueError(f"boom of {object()!r}")
            case "big":
                return self._observation().model_copy(update={"metadata": {"big": 2**60}})
            case "hang" if self.hanging is not None:
                self.hanging.wait(60)
            case "unserializable":
                return self._observation().model_copy(update={"metadata": {"odd": object()}})
        return self._observation().model_copy(update={"reward": 1.0, "done": action.do == "done"})

    def _observation(self) -> CountObservation:
        (n,) = self._db.execute("select coalesce(sum(n), 0) from c").fetchone()
        return CountObservation(n=n, text=str(self._dice.random()))

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        self._db.close()


class UndeclaredEnvironment(DiceEnvironment):
    DETERMINISTIC = False


class StampedEnvironment(UndeclaredEnvironment):
    """Deterministic but for a stamp in its metadata, which no two calls share."""

    stamps = itertools.count(os.getpid() * 1_000_000)

    def _observation(self) -> CountObservation:
        made = super()._observation()
        return made.model_copy(update={"metadata": {"stamp": next(self.stamps), "unit": "s"}})


class LiarEnvironment(DiceEnvironment):
    """Says that it is deterministic, and is not from its third step on."""

    noise = itertools.count(os.getpid() * 1_000_000)

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        made = super().step(action)
        if self._state.step_count >= 3:
            made.text = f"noise {next(self.noise)}"
        return made


class AsyncDiceEnvironment(DiceEnvironment):
    """On the event loop; a child says that it is one."""

    def __init__(self) -> None:
        super().__init__()
        self._db = sqlite3.connect(":memory:", check_same_thread=False)  # made in a thread, used on the loop
        self._db.execute("create table c(n integer)")
        self._child = 0

    async def reset_async(self, seed: int | None = None, **kwargs: Any) -> CountObservation:  # type: ignore[override]
        return self.reset(seed, **kwargs)

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        made = self.step(action)
        return made.model_copy(update={"text": f"{made.text} child {self._child}"})

    async def forked(self, episode_id: str) -> None:
        self._child += 1
        self._state = State(episode_id=episode_id, step_count=0)


class ToolEnvironment(MCPEnvironment):
    """A notebook of numbers behind one tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    DETERMINISTIC = True

    def __init__(self) -> None:
        server = FastMCP("notes")
        self._notes: list[int] = []
        self._state = State(episode_id=None, step_count=0)

        @server.tool
        def note(n: int) -> dict[str, Any]:
            if n < 0:
                raise ValueError(f"{n} is negative")
            self._notes.append(n)
            return {"notes": self._notes, "exit_code": int(n == 13), "stderr": "bash: foo: command not found"}

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self._notes = []
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(metadata={"notes": []})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        self._notes.append(1)
        return Observation(metadata={"notes": list(self._notes)})

    @property
    def state(self) -> State:
        return self._state


class OrderEnvironment(DiceEnvironment):
    """Shows the order of a set, which only Python's hash seed decides."""

    def _observation(self) -> CountObservation:
        made = super()._observation()
        return made.model_copy(update={"text": str(list({f"name{i}" for i in range(40)}))})


class UndeclaredOrderEnvironment(OrderEnvironment):
    DETERMINISTIC = False


class AddressEnvironment(DiceEnvironment):
    """Shows the address of one object twice, and a set's text."""

    def _observation(self) -> CountObservation:
        made = super()._observation()
        words = {f"name{i}" for i in range(40)}
        self._kept = [bytearray(7)] * os.getpid()  # so that two processes have other addresses
        thing = object()
        return made.model_copy(update={"text": f"{thing!r} and {thing!r} of {words}"})


class PartlyLiarEnvironment(DiceEnvironment):
    """Differs in one place from its second step on, and from instance to instance."""

    where = ""

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        made = super().step(action)
        noise = next(LiarEnvironment.noise)
        if self._state.step_count < 2:
            return made
        match self.where:
            case "reward":
                return made.model_copy(update={"reward": noise / 7})
            case "done":
                return made.model_copy(update={"done": type(self).made % 2 == 1})
            case "metadata":
                return made.model_copy(update={"metadata": {"kept": 1, "seen": f"soup {noise}"}})
            case "error":
                raise ValueError(f"no luck with {noise}")
            case "no error" if type(self).made % 2 == 1:
                raise ValueError("not this time")
        return made


class RewardLiarEnvironment(PartlyLiarEnvironment):
    where = "reward"


class DoneLiarEnvironment(PartlyLiarEnvironment):
    where = "done"


class MetadataLiarEnvironment(PartlyLiarEnvironment):
    where = "metadata"


class ErrorLiarEnvironment(PartlyLiarEnvironment):
    where = "error"


class NoErrorLiarEnvironment(PartlyLiarEnvironment):
    where = "no error"


class SecondInstanceLiarEnvironment(DiceEnvironment):
    """The first instance of a process is honest; those after it, as a fork's, play another game."""

    def __init__(self) -> None:
        super().__init__()
        self._first = type(self).made == 1

    def _observation(self) -> CountObservation:
        made = super()._observation()
        return made if self._first else made.model_copy(update={"text": "another game"})


class ForkedLiarEnvironment(DiceEnvironment):
    """Honest until it is a fork's child, whose steps nothing decides."""

    child = False

    def forked(self, episode_id: str) -> None:
        self.child = True

    def _observation(self) -> CountObservation:
        made = super()._observation()
        return made.model_copy(update={"text": f"noise {next(LiarEnvironment.noise)}"}) if self.child else made


class StateLiarEnvironment(UndeclaredEnvironment):
    """Honest in all it delivers; only its state tells one process from another."""

    @property
    def state(self) -> State:
        return State.model_validate({**self._state.model_dump(), "secret": f"soup {os.getpid()}"})


class IteratorEnvironment(UndeclaredEnvironment):
    """Each reset without a seed of its own takes the next item of a data set."""

    def __init__(self) -> None:
        super().__init__()
        self._items = itertools.count(1)

    def reset(self, episode_id: str | None = None, item: int | None = None, **kwargs: Any) -> CountObservation:  # type: ignore[override]
        super().reset(item if item is not None else next(self._items), episode_id)
        return self._observation()


class MuteEnvironment(UndeclaredEnvironment):
    """Answers every action alike."""

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        return CountObservation(text="no")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        return CountObservation(text="no")
