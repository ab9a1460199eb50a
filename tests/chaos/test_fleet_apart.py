"""Servers with addresses of their own as one fleet (``errata serve --members``): killed, moved, lost and added."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from errata_client import EnvPool
from errata_protocol.errors import SessionLost
from errata_protocol.labels import Labels
from errata_protocol.shards import shard_of
from errata_server.process import ServerProcess
from errata_server.runtime.shard_dirs import name_of

from .test_fleet import TARGET, until

pytestmark = pytest.mark.chaos

SESSIONS = 48
"""One of three members has none of these by chance once in 94 million runs."""


class Apart:
    """Members at addresses of their own, and the file that lists them.

    Args:
        directory: Where the file and the data directories are.
        running: Stops the servers.
    """

    def __init__(self, directory: Path, running: ExitStack) -> None:
        self.directory = directory
        self.path = directory / "fleet.json"
        self.address = f"file://{self.path}"
        self.servers: dict[str, ServerProcess] = {}
        self.states: dict[str, str] = {}
        self._running = running

    def start(self, shard: str) -> None:
        """Start the server of a data directory, on a free port, and list it."""
        options = ("--members", self.address, "--no-fsync")
        server = ServerProcess(TARGET, self.directory / shard, *options, start_s=120)
        self._running.callback(lambda: server.process.poll() is None and server.kill())
        self.servers[shard], self.states[shard] = server, "up"
        self.write()

    def write(self) -> None:
        listed = [
            {"shard": shard, "url": server.url, "state": self.states[shard]} for shard, server in self.servers.items()
        ]
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({"members": listed}))
        draft.replace(self.path)

    def add(self, name: str) -> str:
        """Make a data directory and start its server; return the shard."""
        shard = name_of(self.directory / name)
        (self.directory / name).rename(self.directory / shard)
        self.start(shard)
        return shard

    def set(self, shard: str, state: str) -> None:
        self.states[shard] = state
        self.write()

    @property
    def url(self) -> str:
        """Address of the first member."""
        return next(iter(self.servers.values())).url

    def wait_for_list(self) -> None:
        """Wait until each server that runs has the list as it is now."""
        listed = json.loads(self.path.read_text())["members"]
        for server in self.servers.values():
            if server.process.poll() is None:
                until(lambda server=server: httpx.get(f"{server.url}/fleet").json()["members"] == listed)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Apart]:
    with ExitStack() as running:
        made = Apart(tmp_path, running)
        for name in ("first", "second", "third"):
            made.add(name)
        made.wait_for_list()
        yield made


def shards_of(pool: EnvPool) -> list[str]:
    return [str(shard_of(str(client.eid))) for client in pool.clients]


async def test_sessions_are_at_all_members_and_go_on_where_their_member_is(fleet: Apart) -> None:
    labels = [Labels(group=f"prompt-{n // 2}") for n in range(SESSIONS)]
    async with EnvPool(fleet.url, SESSIONS, message_timeout_s=300) as pool:
        await pool.reset_batch(labels=labels)
        shards = shards_of(pool)
        assert set(shards) == set(fleet.servers)
        assert all(len(set(shards[at : at + 2])) == 1 for at in range(0, SESSIONS, 2)), "a group is at one member"
        await pool.step_batch([{"n": 1}] * SESSIONS)
        connections = {id(client._mux._lease.connection) for client in pool.clients if client._mux._lease is not None}
        assert len(connections) == len(fleet.servers), "one connection for each member"

        # A member is killed, also the one that the client was given, and comes back at another port.
        for moved in list(fleet.servers)[1::-1]:
            fleet.servers[moved].kill()
            fleet.set(moved, "down")
            waiting = asyncio.ensure_future(pool.step_batch([{"n": 10}] * SESSIONS))
            before = fleet.servers[moved].url
            await asyncio.to_thread(fleet.start, moved)
            assert fleet.servers[moved].url != before
            await waiting
        results = await pool.step_batch([{"n": 100}] * SESSIONS)
        assert [result.observation["n"] for result in results] == [121] * SESSIONS, "each step acted once"
        assert shards_of(pool) == shards

        # Another member gets new sessions once the list has it.
        added = await asyncio.to_thread(fleet.add, "fourth")
        await asyncio.to_thread(fleet.wait_for_list)

        async def opened() -> set[str]:
            async with EnvPool(fleet.url, SESSIONS) as other:
                await other.reset_batch()
                return set(shards_of(other))

        for _ in range(60):
            if added in await opened():
                break
        else:
            pytest.fail("the member that was added gets no sessions")

        # One is lost: its sessions are, and only they.
        lost = list(fleet.servers)[2]
        fleet.servers[lost].kill()
        fleet.set(lost, "lost")
        found = await pool.step_batch([{"n": 1000}] * SESSIONS, return_exceptions=True)
        for shard, result in zip(shards, found, strict=True):
            if shard == lost:
                assert isinstance(result, SessionLost), result
            else:
                assert not isinstance(result, BaseException) and result.observation["n"] == 1121
