"""``errata demo fleet --ray``: sessions on two simulated nodes; one node is killed, and every step is counted."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError, SessionLost
from errata_protocol.exception_text import text_of
from errata_protocol.shards import shard_of
from errata_server.fleet_engines import ENGINES, FleetEngine, ShardStatus, Wanted

OPENED_AT_ONCE = 200
"""Sessions that are opened together, so that a small machine is not asked for all at once."""

WAIT_S = 300.0
"""Longest wait for a step, seconds: sessions of a dead node wait until it is lost or taken over."""

STARTS = 3
"""Most starts of a simulated node."""

NAME = "errata"
"""Name of the demo's fleet."""


@dataclass(slots=True)
class Counted:
    """What was counted.

    Attributes:
        sessions: Number of sessions.
        steps: Number of steps of each session.
        is_shared: Whether the nodes saw one directory.
        answered: Steps that were answered.
        complete: Sessions whose steps were all answered.
        lost: Sessions that were said to be lost with their node.
        by_shard: Number of sessions of each shard.
        killed: Name of the shard whose node was killed.
        killed_after: Steps that were answered when the node was killed.
        said_s: Time from the kill until the first session of that shard was lost or stepped again, seconds.
        journaled: Deliveries that the shards which serve have, resets included.
        seconds: Time that everything took, seconds.
        failures: Descriptions of what was lost without being said to be, or doubled.
    """

    sessions: int
    steps: int
    is_shared: bool
    answered: int = 0
    complete: int = 0
    lost: int = 0
    by_shard: dict[str, int] = field(default_factory=dict)
    killed: str = ""
    killed_after: int = 0
    said_s: float = 0.0
    journaled: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Play:
    """Plays sessions at the fleet `NAME` of this process's cluster, while one of its nodes is killed.

    Args:
        token: Token of the servers.
        counted: Counts, which it fills.
    """

    def __init__(self, token: str, counted: Counted) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        self._counted = counted
        self._clients: list[ErrataClient[Any, Any, Any]] = [
            ErrataClient(f"ray://{NAME}", headers=self._headers, message_timeout_s=WAIT_S)
            for _ in range(counted.sessions)
        ]
        self._lost: set[ErrataClient[Any, Any, Any]] = set()
        self._third = asyncio.Event()
        self._killed: float | None = None

    async def run(self, kill: Callable[[], str], say: Callable[[str], None]) -> None:
        """Open all sessions, have them step, kill a node meanwhile.

        Args:
            kill: Kills a node and returns the name of the shard that was there.
            say: Called with each line of progress.
        """
        counted = self._counted
        for first in range(0, counted.sessions, OPENED_AT_ONCE):
            await asyncio.gather(*(client.reset() for client in self._clients[first : first + OPENED_AT_ONCE]))
        counted.by_shard = dict(Counter(shard_of(client.eid or "") or "" for client in self._clients))
        say(f"{counted.sessions} sessions are open: {', '.join(map(str, counted.by_shard.values()))} at the shards")
        async with asyncio.TaskGroup() as playing:
            for number in range(counted.sessions):
                playing.create_task(self._session(number))
            await self._third.wait()
            counted.killed_after = counted.answered
            counted.killed = await asyncio.to_thread(kill)
            self._killed = time.monotonic()
            say(f"after {counted.killed_after} steps the node of shard {counted.killed} is killed")
        say(f"{counted.answered} steps were answered; {counted.lost} sessions are said to be lost with their node")

    async def finish(self, members: Sequence[ShardStatus]) -> None:
        """Compare what the shards that serve have with what was answered, and close all sessions.

        Args:
            members: Members of the fleet as they are now.
        """
        counted, per = self._counted, self._counted.steps + 1
        async with httpx.AsyncClient(headers=self._headers, trust_env=False) as http:
            for one in members:
                if one.state == "up" and one.url is not None:
                    answer = await http.get(f"{one.url}/episodes/aggregates", timeout=120.0)
                    answer.raise_for_status()
                    counted.journaled += sum(bucket["deliveries"] for bucket in answer.json()["buckets"])
        wanted = counted.sessions - (0 if counted.is_shared else counted.by_shard.get(counted.killed, 0))
        if counted.complete != wanted or counted.lost != counted.sessions - wanted:
            counted.failures.append(
                f"{counted.complete} sessions are complete and {counted.lost} lost, not {wanted} and "
                f"{counted.sessions - wanted}"
            )
        if counted.journaled != wanted * per:
            counted.failures.append(f"the shards have {counted.journaled} deliveries, not {wanted * per}")
        await asyncio.gather(*(client.close() for client in self._clients if client not in self._lost))

    async def _session(self, number: int) -> None:
        counted, client = self._counted, self._clients[number]
        shard = shard_of(client.eid or "")
        for n in range(1, counted.steps + 1):
            try:
                result = await client.step({"n": 1})
            except SessionLost as error:
                self._say_when(shard)
                counted.lost += 1
                self._lost.add(client)
                if counted.is_shared or shard != counted.killed:
                    counted.failures.append(f"a session of shard {shard} was lost: {text_of(error)[:200]}")
                return
            counted.answered += 1
            if result.observation["total"] != n:
                counted.failures.append(f"step {n} of {client.eid} was answered with {result.observation['total']}")
            if 3 * counted.answered >= counted.sessions * counted.steps:
                self._third.set()
            if n > 1:
                self._say_when(shard)
        counted.complete += 1

    def _say_when(self, shard: str | None) -> None:
        counted = self._counted
        if self._killed is not None and shard == counted.killed and not counted.said_s:
            counted.said_s = time.monotonic() - self._killed


class SimulatedCluster:
    """A Ray cluster of a head and nodes that are processes of this machine. It wants a token, which this process has.

    Args:
        nodes: Number of nodes beside the head.
        cpus: CPUs that each node says it has.
    """

    def __init__(self, nodes: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._cpus = cpus
        self._nodes: list[Any] = []
        for _ in range(nodes):
            self.add()
        self.address: str = self._cluster.address

    def kill(self, node: str) -> None:
        """Kill a node with all its processes.

        Args:
            node: Node as `ShardStatus` names it.
        """
        chosen = next(one for one in self._nodes if one.node_id[:8] in node)
        self._nodes.remove(chosen)
        self._cluster.remove_node(chosen, allow_graceful=False)

    def add(self) -> None:
        """Add a node. One that is not up within Ray's 30 s, as on a machine with much else to do, is tried again."""
        for left in reversed(range(STARTS)):
            try:
                self._nodes.append(self._cluster.add_node(num_cpus=self._cpus))
                return
            except Exception as error:  # Ray raises no other
                if not left or "timed out during startup" not in str(error):
                    raise

    def shutdown(self) -> None:
        """End all nodes."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextmanager
def simulated(nodes: int = 2, cpus: int = 2) -> Iterator[SimulatedCluster]:
    """Run a cluster of simulated nodes.

    Args:
        nodes: Number of nodes beside the head.
        cpus: CPUs that each node says it has.
    """
    # Ray reads them when it is imported. Without them everybody who can reach the machine could run code in it.
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
    os.environ.update(RAY_worker_niceness="0")  # 15 by default: servers would get little of a busy machine
    cluster = SimulatedCluster(nodes, cpus)
    try:
        yield cluster
    finally:
        cluster.shutdown()


def play(cluster: SimulatedCluster, target: str, directory: Path, counted: Counted, say: Callable[[str], None]) -> None:
    """Start a fleet, play, kill a node, count, and end the fleet.

    Args:
        cluster: Cluster with at least two nodes.
        target: What the fleet serves.
        directory: Directory of the fleet.
        counted: Counts, which it fills.
        say: Called with each line of progress.
    """
    engine, token = ENGINES.load("ray"), secrets.token_hex(16)
    place = directory if counted.is_shared else directory / "{node}"
    options = ["--max-sessions", str(counted.sessions + 100)]
    wanted = Wanted([target], options, data_dir=place, is_shared=counted.is_shared, token=token, nodes=2)
    members = engine.up(cluster.address, NAME, wanted, say)
    try:
        asyncio.run(_play(engine, cluster, Play(token, counted), members, say))
    finally:
        engine.down(cluster.address, NAME, True, say)


async def _play(
    engine: FleetEngine,
    cluster: SimulatedCluster,
    playing: Play,
    members: Sequence[ShardStatus],
    say: Callable[[str], None],
) -> None:
    victim = members[-1]

    def kill() -> str:
        cluster.kill(victim.node or "")
        return victim.shard or ""

    await playing.run(kill, say)
    await playing.finish(await asyncio.to_thread(engine.status, cluster.address, NAME))


def main(arguments: Sequence[str], target: str) -> int:
    """Run the demo; return 0 when nothing was lost but what was said to be, and nothing doubled.

    Args:
        arguments: Arguments of the command.
        target: What the fleet serves.
    """
    parser = argparse.ArgumentParser(
        prog="errata demo fleet --ray",
        description="Sessions on a fleet of two simulated Ray nodes; one node is killed, and every step is counted.",
    )
    parser.add_argument("--ray", action="store_true", help="on Ray, as here")
    parser.add_argument("--shared", action="store_true", help="both nodes see one directory: its sessions go on")
    parser.add_argument("--sessions", type=int, default=400, help="number of sessions (400)")
    parser.add_argument("--steps", type=int, default=20, help="number of steps of each session (20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end; progress goes to stderr")
    options = parser.parse_args(list(arguments))
    if options.sessions < 2 or options.steps < 3:
        parser.error("it takes at least 2 sessions and 3 steps")
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr if options.json else None, flush=True)

    counted = Counted(options.sessions, options.steps, options.shared)
    try:
        with tempfile.TemporaryDirectory(prefix="errata-ray-demo-") as directory, simulated() as cluster:
            say(f"a Ray cluster of two simulated nodes is up at {cluster.address}")
            play(cluster, target, Path(directory), counted, say)
    except (ErrataError, ConnectionError, TimeoutError, httpx.HTTPError) as error:
        print(f"errata demo fleet: {text_of(error)}", file=sys.stderr)
        return 1
    counted.seconds = time.monotonic() - started
    if options.json:
        print(json.dumps(asdict(counted)))
    elif not counted.failures:
        say(f"{counted.complete} sessions complete, {counted.lost} lost with their node: 0 others lost, 0 doubled")
    for failure in counted.failures[:20]:
        print(f"errata demo fleet: {failure}", file=sys.stderr)
    return 1 if counted.failures else 0
