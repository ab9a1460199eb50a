"""Counters for the storm: one that says which step it answers, and two that break a promise, to be found out."""

from __future__ import annotations

import json
from typing import Any

from errata_protocol.environment import Snapshot
from tests.server.environments import CountAction, CountEnvironment, CountObservation


class TaggedCounter(CountEnvironment):
    """Counts its steps, and says ``do`` back: a reply shows which request it is of."""

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        observation = await super().step_async(action, timeout_s)
        return observation.model_copy(update={"text": action.do})


class LateSnapshotCounter(TaggedCounter):
    """Its snapshot is one step behind: what was acknowledged last is lost in a crash."""

    async def snapshot(self) -> Snapshot:
        return Snapshot(json.dumps([max(0, self._n - 1), self._state.step_count, self._state.episode_id]).encode())


class TwiceCounter(TaggedCounter):
    """Its restore does the last step once more: what was acknowledged acts twice after a crash."""

    async def restore(self, snapshot: Snapshot) -> None:
        await super().restore(snapshot)
        self._n += 1


class LoudEnvironment(TaggedCounter):
    """Answers with ``n`` bytes: for clients that read nothing."""

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        return CountObservation(n=action.n, text="x" * action.n)
