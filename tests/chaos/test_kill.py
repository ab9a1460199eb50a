"""``kill -9`` at random moments of a stepping load: nothing acknowledged is lost, nothing acts twice (PROTOCOL E1)."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import WebSocketException

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError
from errata_protocol.replay import StateAt
from errata_server.journal import journal_in, journal_problems
from errata_server.process import ServerProcess

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

ROUNDS = int(os.environ.get("ERRATA_CHAOS_ROUNDS", "8"))
COUNTER = "n=$(cat counter 2>/dev/null || echo 0); echo $((n+1)) > counter; cat counter"


@dataclass
class Load:
    """One session under load, and what the server acknowledged to it."""

    client: ErrataClient[Any, Any, Any]
    acknowledged: dict[int, StateAt] = field(default_factory=dict)

    async def step_until_killed(self, action: dict[str, Any]) -> None:
        """Step, noting each acknowledged delivery, until the server is gone."""
        try:
            while True:
                await self.client.step(action)
                t = self.client.t
                assert t is not None and t not in self.acknowledged
                self.acknowledged[t] = (await self.client.history())[-1]
        except (ErrataError, OSError, WebSocketException):
            return  # the connection died with the server


async def _rounds(
    data_dir: Path, target: str, sessions: int, action: dict[str, Any], count: Callable[[dict[str, Any]], int]
) -> None:
    chance = random.Random(20260101)
    loads: list[Load] = []
    for round_ in range(ROUNDS + 1):
        with await asyncio.to_thread(ServerProcess, target, data_dir) as server:
            again: list[Load] = []
            for n in range(sessions):
                if round_ == 0:
                    client = ErrataClient[Any, Any, Any](server.url, durable=True)
                    await client.reset()
                    load = Load(client)
                else:
                    load = loads[n]
                    old = load.client
                    load.client = ErrataClient(server.url, session_id=old.session_id)
                    await load.client.connect()
                    await _check(load, old.eid, count)
                    await old.close()
                again.append(load)
            loads = again
            if round_ == ROUNDS:
                break
            running = [asyncio.create_task(load.step_until_killed(action)) for load in loads]
            await asyncio.sleep(chance.uniform(0.05, 0.8))
            server.kill()
            await asyncio.gather(*running)
        assert await asyncio.to_thread(lambda: journal_problems(journal_in(data_dir))) == []
    assert all(len(load.acknowledged) > ROUNDS for load in loads), "the load made progress in every round"
    for load in loads:
        await load.client.close()


async def _check(load: Load, eid: str | None, count: Callable[[dict[str, Any]], int]) -> None:
    """Compare the restarted server's journal with what was acknowledged, and the counter with t."""
    client = load.client
    assert client.eid == eid and client.t is not None
    last = max(load.acknowledged, default=0)
    assert last <= client.t <= last + 1, "at most the one step whose reply was lost is ahead"
    for t, seen in load.acknowledged.items():
        if t > last - 40:  # older ones were compared in earlier rounds; the whole is compared at the end
            assert (await client.state_at(t)).payload == seen.payload
    for t in range(max(1, client.t - 5), client.t + 1):
        assert count(_observation(await client.state_at(t))) == t
    load.acknowledged[client.t] = await client.state_at(client.t)


def _observation(state: StateAt) -> dict[str, Any]:
    import json

    return dict(json.loads(state.payload)["observation"])


async def test_an_async_environment_loses_and_repeats_nothing(tmp_path: Path) -> None:
    await _rounds(tmp_path, "tests.server.environments:CountEnvironment", 8, {"n": 1}, lambda o: int(o["n"]))


@pytest.mark.sandbox
async def test_sandboxed_sessions_go_on_with_their_files_as_they_were(tmp_path: Path) -> None:
    await _rounds(tmp_path, "terminal", 4, {"command": COUNTER}, lambda o: int(o["stdout"]))
