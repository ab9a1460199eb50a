"""``errata demo fleet``: thousands of sessions on several workers; one worker is killed, and every step is counted."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError
from errata_protocol.exception_text import text_of
from errata_protocol.shards import shard_of
from errata_server.process import ServerProcess

TARGET = f"{__name__}:CountEnvironment"
OPENED_AT_ONCE = 200
"""Sessions that are opened together, so that a small machine is not asked for all at once."""

START_S = 120.0
"""How long the server may take to start, seconds."""


class CountAction(Action):  # type: ignore[misc]  # openenv ships no types
    """A number to be added."""

    n: int = 1


class CountObservation(Observation):  # type: ignore[misc]
    """The sum of the numbers so far."""

    total: int = 0


class CountEnvironment(Environment[CountAction, CountObservation, State]):  # type: ignore[misc]
    """Adds up numbers: every step after one that acted twice, or not at all, shows it."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    ANY_THREAD = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)
        self._total = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self._state, self._total = State(episode_id=episode_id, step_count=0), 0
        return CountObservation()

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        self._state.step_count += 1
        self._total += action.n
        return CountObservation(total=self._total, reward=float(action.n))

    @property
    def state(self) -> State:
        return self._state

    def snapshot(self) -> list[int]:
        return [self._state.step_count, self._total]

    def restore(self, snapshot: list[int]) -> None:
        self._state.step_count, self._total = snapshot


@dataclass(slots=True)
class Counted:
    """What the demo counted.

    Attributes:
        workers: Number of workers.
        sessions: Number of sessions.
        steps: Number of steps of each session.
        answered: Steps that were answered.
        by_worker: Number of sessions of each worker, by the name of its shard.
        killed_after: Steps that were answered when the worker was killed.
        again_s: Time from the kill until each session had stepped again, seconds.
        journaled: Deliveries that the server has, resets included.
        seconds: Time that everything took, seconds.
        failures: Descriptions of what was lost or doubled.
    """

    workers: int
    sessions: int
    steps: int
    answered: int = 0
    by_worker: dict[str, int] = field(default_factory=dict)
    killed_after: int = 0
    again_s: float = 0.0
    journaled: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class _Play:
    """Plays all sessions.

    Args:
        url: Address of the server.
        counted: Counts of the demo, which it fills.
    """

    def __init__(self, url: str, counted: Counted) -> None:
        self._url, self._counted = url, counted
        self._clients = [ErrataClient[Any, Any, Any](url) for _ in range(counted.sessions)]
        self._third = asyncio.Event()
        self._killed: float | None = None
        self._waiting: set[int] = set()

    async def run(self, kill: Callable[[], None], say: Callable[[str], None]) -> None:
        """Open all sessions, let them step, kill a worker meanwhile, and read what the server has."""
        counted = self._counted
        for first in range(0, counted.sessions, OPENED_AT_ONCE):
            await asyncio.gather(*(client.reset() for client in self._clients[first : first + OPENED_AT_ONCE]))
        counted.by_worker = dict(Counter(shard_of(client.eid or "") or "" for client in self._clients))
        say(f"{counted.sessions} sessions are open: {', '.join(map(str, counted.by_worker.values()))} at the workers")
        try:
            async with asyncio.TaskGroup() as playing:
                for number in range(counted.sessions):
                    playing.create_task(self._session(number))
                await self._third.wait()
                self._kill(kill, say)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        say(f"{counted.answered} steps were answered; the last session stepped again {counted.again_s:.1f} s after it")
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"{self._url}/episodes/aggregates", timeout=60.0)
            answer.raise_for_status()
            counted.journaled = sum(bucket["deliveries"] for bucket in answer.json()["buckets"])
        await asyncio.gather(*(client.close() for client in self._clients))

    def _kill(self, kill: Callable[[], None], say: Callable[[str], None]) -> None:
        counted = self._counted
        self._waiting, self._killed = set(range(counted.sessions)), time.monotonic()
        counted.killed_after = counted.answered
        kill()
        say(f"after {counted.killed_after} steps a worker is killed with SIGKILL")

    async def _session(self, number: int) -> None:
        counted, client = self._counted, self._clients[number]
        for n in range(1, counted.steps + 1):
            result = await client.step({"n": 1})
            counted.answered += 1
            if result.observation["total"] != n:
                counted.failures.append(f"step {n} of {client.eid} was answered with {result.observation['total']}")
            if 3 * counted.answered >= counted.sessions * counted.steps:
                self._third.set()
            if self._killed is not None and number in self._waiting:
                self._waiting.discard(number)
                counted.again_s = time.monotonic() - self._killed


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo; return 0 when no step was lost or doubled."""
    if "--ray" in arguments:
        from errata_ray import demo

        return demo.main(arguments, TARGET)
    parser = argparse.ArgumentParser(
        prog="errata demo fleet",
        description="Sessions on several workers behind one address; one worker is killed, and every step is counted.",
    )
    parser.add_argument("--workers", type=int, default=4, help="number of workers (4)")
    parser.add_argument("--sessions", type=int, default=2000, help="number of sessions (2000)")
    parser.add_argument("--steps", type=int, default=6, help="number of steps of each session (6)")
    parser.add_argument("--ray", action="store_true", help="two simulated nodes of a Ray cluster; see --ray --help")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end; progress goes to stderr")
    options = parser.parse_args(list(arguments))
    if options.workers < 2 or options.sessions < 1 or options.steps < 3:
        parser.error("it takes at least 2 workers, 1 session and 3 steps")
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr if options.json else None, flush=True)

    counted = Counted(options.workers, options.sessions, options.steps)
    try:
        with tempfile.TemporaryDirectory(prefix="errata-fleet-demo-") as directory:
            say(f"errata serve {TARGET} --workers {options.workers}")
            served = ServerProcess(TARGET, Path(directory), "--workers", str(options.workers), start_s=START_S)
            with served as server:
                asyncio.run(_Play(server.url, counted).run(lambda: _kill_worker(server.process.pid), say))
    except (ErrataError, ConnectionError, TimeoutError, httpx.HTTPError) as error:
        print(f"errata demo fleet: {text_of(error)}", file=sys.stderr)
        return 1
    counted.seconds = time.monotonic() - started
    wanted = counted.sessions * counted.steps
    if counted.answered != wanted:
        counted.failures.append(f"{counted.answered} steps were answered, not {wanted}")
    if counted.journaled != wanted + counted.sessions:
        counted.failures.append(f"the server has {counted.journaled} deliveries, not {wanted + counted.sessions}")
    if options.json:
        print(json.dumps(asdict(counted)))
    elif not counted.failures:
        say(f"{wanted} steps of {counted.sessions} sessions at {counted.workers} workers: 0 lost, 0 doubled")
    for failure in counted.failures:
        print(f"errata demo fleet: {failure}", file=sys.stderr)
    return 1 if counted.failures else 0


def _kill_worker(supervisor: int) -> None:
    """Kill a worker of a server with SIGKILL."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
