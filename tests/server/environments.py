"""Small environments that the server's tests drive."""

from __future__ import annotations

import json
import sqlite3
import threading
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.environment import Snapshot
from errata_protocol.errors import SandboxFailed
from errata_protocol.markers import Detection, ErrorKind, ErrorMarkers, ErrorSite


class CountAction(Action):
    """Add ``n``; or do what ``do`` says."""

    n: int = 1
    do: str = ""


class CountObservation(ErrorMarkers, Observation):
    """The count so far."""

    n: int = 0
    text: str = ""


class CountEnvironment(Environment[CountAction, CountObservation, State]):
    """Async, recoverable counter; ``do`` makes it fail in the ways an environment can."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    gate: threading.Event | None = None
    made = 0
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self._n = 0
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        raise NotImplementedError

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        raise NotImplementedError

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self._n = 0
        self._state = State(episode_id=episode_id or "count", step_count=0)
        return CountObservation(n=0, text="go")

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        self._n += action.n
        self._state.step_count += 1
        match action.do:
            case "raise":
                raise ValueError("boom")
            case "break":
                raise SandboxFailed("the launcher died")
            case "nan":
                return CountObservation(n=self._n, reward=float("nan"))
            case "mark":
                site = ErrorSite(action_field="do", action_span=(0, 4))
                marked = CountObservation(n=self._n, reward=0.0)
                return marked.with_detection(Detection.of(ErrorKind.NONZERO_EXIT, site))
            case "own":
                return CountObservation(n=self._n, metadata={"error_kind": "a kind of its own"})
            case "hang":
                import asyncio

                await asyncio.Event().wait()
        return CountObservation(n=self._n, reward=1.0, done=action.do == "done")

    @property
    def state(self) -> State:
        return self._state

    async def snapshot(self) -> Snapshot:
        return Snapshot(json.dumps([self._n, self._state.step_count, self._state.episode_id]).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        self._n, steps, episode_id = json.loads(snapshot.state)
        self._state = State(episode_id=episode_id, step_count=steps)

    async def forked(self, episode_id: str) -> None:
        self._state = State(episode_id=episode_id, step_count=0)

    def close(self) -> None:
        type(self).closed += 1


class CommandAction(Action):
    """Run a command."""

    command: str = ""


class CommandObservation(ErrorMarkers, Observation):
    """What a command printed."""

    task_id: str = ""
    stderr: str = ""
    exit_code: int | None = None
    duration_s: float = 0.0


class CommandEnvironment(Environment[CommandAction, CommandObservation, State]):
    """``head`` finds no file, which is marked; ``fail`` is an exception; every other command succeeds."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, task_id: str = "", **_: Any
    ) -> CommandObservation:
        return CommandObservation(task_id=task_id)

    def step(self, action: CommandAction, timeout_s: float | None = None, **_: Any) -> CommandObservation:
        if action.command == "fail":
            raise RuntimeError("it broke")
        command, _, file = action.command.partition(" ")
        if command != "head":
            return CommandObservation(exit_code=0, reward=1.0)
        site = ErrorSite(action_field="command", action_span=(5, len(action.command)))
        told = f"head: {file}: No such file or directory"
        seen = CommandObservation(exit_code=2, stderr=told, duration_s=0.25, reward=0.0)
        return seen.with_detection(Detection.of(ErrorKind.PATH_NOT_FOUND, site))

    @property
    def state(self) -> State:
        return State(episode_id="commands", step_count=0)


class PinnedEnvironment(Environment[CountAction, CountObservation, State]):
    """Sync, not recoverable, and tied to its thread by a sqlite3 connection made in ``__init__``."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._db = sqlite3.connect(":memory:")
        self._db.execute("create table c(n integer)")
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self._db.execute("delete from c")
        self._state = State(episode_id=episode_id or "pinned", step_count=0)
        return CountObservation(n=0)

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        self._db.execute("insert into c values (?)", (action.n,))
        self._state.step_count += 1
        return CountObservation(n=self._db.execute("select sum(n) from c").fetchone()[0], reward=1.0)

    @property
    def state(self) -> State:
        self._db.execute("select 1")
        return self._state

    def close(self) -> None:
        self._db.close()


class ToolsEnvironment(MCPEnvironment):
    """Has tools alone: a reset and a step do nothing."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation()

    @property
    def state(self) -> State:
        return State(episode_id="tools", step_count=0)
