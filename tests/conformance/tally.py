"""The conformance kit's environment, written for OpenEnv: it adds ``n``, and ``do`` makes it fail in some way."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.environment import Snapshot
from errata_protocol.errors import SandboxFailed
from errata_protocol.markers import Detection, ErrorKind, ErrorMarkers, ErrorSite

SLEEP_S = 0.4


class TallyAction(Action):
    """Add ``n``; ``do`` names what goes wrong."""

    n: int = 1
    do: str = ""


class TallyObservation(ErrorMarkers, Observation):
    """The sum so far."""

    total: float = 0
    text: str = ""


class PlainObservation(Observation):
    """The same without markers, with the output and the exit status that they are read from."""

    total: float = 0
    text: str = ""
    exit_code: int = 0


class Tally(MCPEnvironment):
    """Re-executed for a fork."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    DETERMINISTIC = True
    observation_cls: type[Any] = TallyObservation

    def __init__(self) -> None:
        mcp = FastMCP("tally")
        self._total: float = 0
        self._state = State(episode_id=None, step_count=0)

        @mcp.tool
        def add(n: int) -> float:
            """Add a number."""
            self._total += n
            return self._total

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        self._total = 0
        self._state = State(episode_id=episode_id, step_count=0)
        return self.observation_cls()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        raise NotImplementedError

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        if not isinstance(action, TallyAction):
            return await super().step_async(action, timeout_s=timeout_s)
        what = action.do.partition(" ")[0]
        if what == "fail":
            raise ValueError("the tally is broken")
        if what == "crash":
            raise SandboxFailed("the machine of the tally is gone")
        if what == "sleep":
            await asyncio.sleep(SLEEP_S)
        self._total += random.random() if what == "random" else action.n
        self._state.step_count += 1
        text = "x" * 300_000 if what == "big" else ""
        total = math.nan if what == "nan" else self._total
        metadata: dict[str, Any] = {"error_kind": "own"} if what == "own" else {}
        observation = self.observation_cls(
            total=total, text=text, reward=float(action.n), done=what == "done", metadata=metadata
        )
        if what == "mark" and isinstance(observation, ErrorMarkers):
            sites = [
                ErrorSite(action_field="do", action_span=word.span(), message=f"{word[0]}: command not found")
                for word in re.finditer(r"\S+", action.do)
            ]
            return observation.with_detection(Detection.of(ErrorKind.COMMAND_NOT_FOUND, *sites))
        if what == "own" and isinstance(observation, ErrorMarkers):
            mirror = {"error_kind": "own", "hint_template_key": None, "error_site": None}
            return observation.model_copy(update={"error_kind": "own", "severity": "error", "metadata": mirror})
        if what in ("mark", "own") and isinstance(observation, PlainObservation):
            return observation.model_copy(update={"text": "bash: mark: command not found", "exit_code": 127})
        return observation

    @property
    def state(self) -> State:
        return self._state

    async def forked(self, episode_id: str) -> None:
        self._state = State(episode_id=episode_id, step_count=0)


class SnapshotTally(Tally):
    """Restored from its snapshot for a fork."""

    DETERMINISTIC = False

    async def snapshot(self) -> Snapshot:
        return Snapshot(json.dumps([self._total, self._state.step_count, self._state.episode_id]).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        self._total, steps, episode_id = json.loads(snapshot.state)
        self._state = State(episode_id=episode_id, step_count=steps)


class PlainTally(Tally):
    """Declares no markers."""

    observation_cls = PlainObservation
