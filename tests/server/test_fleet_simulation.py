"""A fleet of servers and its clients under one seed: what goes wrong and must hold says docs/simulation.md."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from openenv.core.env_server.interfaces import Environment

from errata_protocol.fleet import FleetMember
from errata_server.simulation import SimulatedDisk

from .simulated.__main__ import failure
from .simulated.fleet_member import Member
from .simulated.fleet_world import FleetWorld
from .simulated.server import Server

SEEDS = int(os.environ.get("ERRATA_FLEET_SEEDS", "30"))
BLOCKS = max(1, SEEDS // 30)
"""`make test-schedules` runs those from 30 to 119, and `make simulate-fleet SEEDS=0..9999` any others.

`python -m tests.server.simulated.fleet --trace SEED` shows one.
"""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "errata")  # injected faults are no news


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_promise_holds_in_a_fleet(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block, SEEDS, BLOCKS):
        world, error = failure(seed, schedule=FleetWorld)
        if error is not None:
            error.add_note(f"seed {seed}: python -m tests.server.simulated.fleet --trace {seed}")
            raise error
        seen.update(world.seen())
    schedules = SEEDS // BLOCKS
    assert seen["acknowledged"] > 20 * schedules and seen["arrivals of groups"] > 5 * schedules, f"too little: {seen}"
    often = ("crashes", "stops", "moves", "starts")
    assert all(seen[what] > schedules // 2 for what in often), f"too little goes wrong: {seen}"
    rare = ("drains", "boxes lost", "sessions said to be lost", "members upgraded", "misdirected")
    assert all(seen[what] > 0 for what in rare), f"something never happens: {seen}"
    assert seen["earlier deliveries read"] > 0 and seen["states"] > schedules, f"too little is read: {seen}"


class Doubling(Server):
    """Lets each step act twice: a control."""

    def __init__(self, runtime: Any, factory: Any, **more: Any) -> None:
        def made() -> Any:
            env = factory()
            step, step_async = env.step, env.step_async

            def act_twice(*args: Any, **more: Any) -> Any:
                step(*args, **more)
                return step(*args, **more)

            async def act_twice_async(*args: Any, **more: Any) -> Any:
                await step_async(*args, **more)
                return await step_async(*args, **more)

            if type(env).step_async is Environment.step_async:
                env.step = act_twice
            else:
                env.step_async = act_twice_async
            return env

        super().__init__(runtime, made, **more)


class Hasty(Server):
    """Answers before the commit: a control."""

    def __init__(self, runtime: Any, *args: Any, **more: Any) -> None:
        super().__init__(runtime, *args, **more)
        submit = runtime.store.journal.submit

        def answer_first(records: Any, settled: Any, loop: Any = None) -> None:
            submit(records, lambda *_: None, loop)
            (loop or asyncio.get_running_loop()).call_soon(settled, records, None)

        runtime.store.journal.submit = answer_first


class Forgetful(Member):
    """Comes back at another address with an empty directory of the same name: a control."""

    forgets = False

    async def restart(self, *, announced: bool, moved: str | None, away_s: float) -> None:
        self.forgets = moved is not None
        await super().restart(announced=announced, moved=moved, away_s=away_s)

    def start(self) -> None:
        if self.forgets and (self._booted is None or self._booted.done()):
            self.forgets = False
            self.machine.disk = SimulatedDisk(self.machine.chance("empty"), on_crash=self.machine._stop_now)
        super().start()


class Hopeless(Member):
    """Is listed as lost for a while when it moves, although it comes back: a control."""

    is_despaired_of = False

    async def restart(self, *, announced: bool, moved: str | None, away_s: float) -> None:
        self.is_despaired_of = moved is not None
        await super().restart(announced=announced, moved=moved, away_s=away_s + 3.0)
        self.is_despaired_of = False

    def listed(self) -> FleetMember:
        told = super().listed()
        return told.model_copy(update={"state": "lost"}) if self.is_despaired_of else told


def found_out(times: int, **fault: Any) -> bool:
    """Return whether so many of the first 30 schedules fail; no more of them run than it takes."""
    failures = (seed for seed in range(30) if failure(seed, schedule=FleetWorld, **fault)[1] is not None)
    return len(list(itertools.islice(failures, times))) == times


@pytest.mark.parametrize(
    "fault",
    [{"server": Doubling}, {"server": Hasty}, {"member": Forgetful}, {"member": Hopeless}],
    ids=lambda fault: next(iter(fault.values())).__name__,
)
def test_a_planted_fault_is_found_out(fault: dict[str, Any]) -> None:
    assert found_out(3, **fault)


def test_the_same_seed_is_the_same_fleet_in_every_process() -> None:
    """Another hash seed gives sets another order: nothing may hang on it."""
    command = [sys.executable, "-m", "tests.server.simulated.fleet", "--whole", "--trace", "7"]
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    there = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
    assert FleetWorld(7).run().trace == there[:-1]
    assert len(there) > 20
