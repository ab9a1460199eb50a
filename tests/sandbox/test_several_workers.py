"""`errata serve --workers` with sandboxes: each worker has its own, and together they have what one process has."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_client import EnvPool
from errata_os.division import Division
from errata_protocol.shards import shard_of
from errata_server.process import ServerProcess
from errata_server.runtime.shard_dirs import shards
from errata_server.sandbox.namespace.backend import COMMANDS_AT_ONCE, NamespaceBackend
from tests.server.worker_processes import worker_of

WORKERS = 2
SESSIONS = 24  # at two workers by chance
KEEP = "echo kept > file"
FORKS = "python3 -c 'import os, time\nfor _ in range(5000):\n    os.fork() or time.sleep(9)'"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def server(data_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess("terminal", data_dir, "--workers", str(WORKERS), start_s=120) as server:
        yield server
        log = "".join(server.log)
    assert server.process.returncode == 0, log


async def test_a_killed_worker_has_its_sandboxes_again_and_others_go_on(server: ServerProcess, data_dir: Path) -> None:
    directories = shards(data_dir, WORKERS)
    async with EnvPool(server.url, SESSIONS) as pool:
        await pool.reset_batch()
        await pool.step_batch([{"command": KEEP}] * SESSIONS)
        assert len({shard_of(str(client.eid)) for client in pool.clients}) == WORKERS
        stepping = asyncio.ensure_future(pool.step_batch([{"command": "sleep 1; cat file"}] * SESSIONS))
        await asyncio.sleep(0.2)
        os.kill(worker_of(directories[1]), signal.SIGKILL)
        results = await stepping
        assert [result.observation["stdout"] for result in results] == ["kept\n"] * SESSIONS
        assert [client.t for client in pool.clients] == [2] * SESSIONS


async def test_the_limit_of_processes_acts_at_each_worker(server: ServerProcess) -> None:
    async with EnvPool(server.url, SESSIONS) as pool:
        await pool.reset_batch()
        at = {shard_of(str(client.eid)): client for client in pool.clients}
        assert len(at) == WORKERS
        results = await asyncio.gather(*(client.step({"command": FORKS}) for client in at.values()))
        assert [result.observation["limit_hit"] for result in results] == ["pids"] * WORKERS


def test_workers_have_other_uids_and_share_the_commands_at_one_time(tmp_path: Path) -> None:
    """The first worker has the uids that the directory has when one process serves it."""
    places = [tmp_path, *(tmp_path / f"shards/{number}" for number in range(1, 4))]
    alone = NamespaceBackend(tmp_path / "sandboxes")
    backends = [
        NamespaceBackend(place / "sandboxes", division=Division(number, 4, tmp_path))
        for number, place in enumerate(places)
    ]
    first = [backend._first_uid() for backend in backends]
    assert first[0] == alone._first_uid() and len(set(first)) == 4
    assert sum(backend._wanted_bound for backend in backends) == COMMANDS_AT_ONCE
