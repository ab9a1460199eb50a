"""`errata serve --workers` with containers: each worker has its own, and nobody removes those of another one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from errata_client import EnvPool
from errata_protocol.shards import shard_of
from errata_server.process import ServerProcess
from errata_server.runtime.shard_dirs import shards
from tests.server.worker_processes import worker_of

from .conftest import RunningBroker
from .test_lifetimes import until

pytestmark = pytest.mark.containers

WORKERS = 2
SESSIONS = 24  # at two workers by chance


async def test_a_worker_that_starts_again_removes_its_own_containers_only(
    broker: RunningBroker, api: Any, tmp_path: Path
) -> None:
    """A server that is started with fewer workers removes those of all others."""

    def containers() -> dict[str, str]:
        """Return the worker of each container of the server, by its id."""
        rows = api.containers(all=True, filters={"label": f"errata.sandbox={broker.owners['two']}"})
        return {row["Id"]: row["Labels"]["errata.part"] for row in rows}

    def started(*options: str) -> ServerProcess:
        env = {"ERRATA_SANDBOX": "docker", "ERRATA_SANDBOXD_SOCKET": str(broker.sockets["two"])}
        # A container's sessions are recovered by executing their requests again.
        return ServerProcess("terminal", tmp_path, "--deterministic", "--no-fsync", *options, env=env, start_s=120)

    server = await asyncio.to_thread(started, "--workers", str(WORKERS))
    try:
        async with EnvPool(server.url, SESSIONS) as pool:
            await pool.reset_batch()
            await pool.step_batch([{"command": "echo kept > file"}] * SESSIONS)
            of_shards = Counter(shard_of(str(client.eid)) for client in pool.clients)
            assert len(of_shards) == WORKERS
            before = containers()
            assert set(before.values()) == {"0", "1"}
            os.kill(worker_of(shards(tmp_path, WORKERS)[1]), signal.SIGKILL)
            results = await pool.step_batch([{"command": "cat file; echo more >> file"}] * SESSIONS)
            assert [result.observation["stdout"] for result in results] == ["kept\n"] * SESSIONS
            assert [client.t for client in pool.clients] == [2] * SESSIONS
            theirs = {container for container, part in before.items() if part == "1"}
            await until(lambda: not theirs & containers().keys())
            assert {one for one, part in before.items() if part == "0"} <= containers().keys(), "the other goes on"
            left = containers()
            assert set(left.values()) == {"0", "1"}
            await asyncio.to_thread(server.kill)
        server = await asyncio.to_thread(started)
        async with EnvPool(server.url, 1) as pool:
            await pool.reset_batch()
            await until(lambda: not left.keys() & containers().keys())
            assert set(containers().values()) == {"0"}
    finally:
        await asyncio.to_thread(server.stop)
    assert containers() == {}
