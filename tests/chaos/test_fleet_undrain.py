"""`errata fleet undrain`: a worker that was drained serves again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import Connection, EnvPool, ErrataClient
from errata_client.fleet import members
from errata_protocol.shards import shard_of
from errata_server.process import ServerProcess
from errata_server.runtime.shard_dirs import shards

from .test_fleet import GIVE_UP_S, TARGET, WORKERS, Fleet, errata, played, shard_names, until

pytestmark = pytest.mark.chaos


async def test_a_drained_worker_serves_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once while it drains, and once after it has ended: then sessions that were kept go on, and forks count again."""
    monkeypatch.setattr(members, "FRESH_S", 0.0)

    def command(*words: str) -> tuple[int, str]:
        made = errata("fleet", *words, "--data-dir", str(tmp_path))
        output, complaint = made.communicate(timeout=GIVE_UP_S)
        return made.returncode, output + complaint

    async def asked(*words: str) -> str:
        status, said = await asyncio.to_thread(command, *words)
        assert status == 0, said
        return said

    async def refused(*words: str) -> str:
        status, said = await asyncio.to_thread(command, *words)
        assert status != 0, said
        return said

    async def opened() -> set[str]:
        """Return the shards of new sessions."""
        async with EnvPool(server.url, 24) as pool:
            await pool.reset_batch()
            return {str(shard_of(str(client.eid))) for client in pool.clients}

    async def playing_at(shard: str) -> tuple[ErrataClient[Any, Any, Any], Connection]:
        """Return a client whose session is at a worker, with a connection of its own."""
        while True:
            connection = Connection(server.url)
            client = ErrataClient[Any, Any, Any](connection=connection)
            if shard_of(await played(client, 2)) == shard:
                return client, connection
            await client.close()
            await connection.aclose()

    async def ended_at(shard: str) -> str:
        """Return an episode of a session that was closed."""
        while True:
            async with ErrataClient[Any, Any, Any](server.url) as client:
                eid = await played(client, 1)
            if shard_of(eid) == shard:
                return eid

    def deleted(eid: str) -> tuple[int, bool]:
        """Return with which status an unused episode is deleted, and whether it was."""
        given = {"eids": [eid], "unused_only": True}
        answer = httpx.post(f"{server.url}/episodes/delete", json=given, timeout=GIVE_UP_S)
        return answer.status_code, eid in answer.json().get("deleted", {})

    env = {"PYTHONHASHSEED": "7", "ERRATA_DETACH_TTL_S": "0.5"}
    options = ("--workers", str(WORKERS), "--no-fsync")
    with ServerProcess(TARGET, tmp_path, *options, env=env, start_s=120) as server:
        await asyncio.to_thread(Fleet(server).wait_for_all)
        names = shard_names(tmp_path)
        assert "is not drained" in await refused("undrain", names[0])
        assert names[1] in await refused("undrain", "nobody")
        for place, shard in enumerate(names[:2]):  # the first one is no exception
            client, connection = await playing_at(shard)
            await asked("drain", shard, "--no-wait")
            assert await opened() == {*names} - {shard}
            assert f"{shard} is up" in await asked("undrain", shard)
            assert await opened() == {*names}, "it takes new sessions again"
            assert (await client.step({"n": 1})).observation["n"] == 3

            ticket = client.ticket()
            await client.close()
            await connection.aclose()  # the socket keeps its sessions attached
            eid = await ended_at(names[2])
            assert "is drained" in await asked("drain", shard)
            assert deleted(eid) == (503, False), "the drained worker may have a fork of it"
            directory = shards(tmp_path, WORKERS)[place]
            if place:
                directory.rename(tmp_path / "moved")
                assert "move it back there" in await refused("undrain", shard)
                (tmp_path / "moved").rename(directory)
            assert f"{shard} is up: {directory}" in await asked("undrain", shard)
            assert await opened() == {*names}
            connection = Connection(server.url)
            again = ErrataClient[Any, Any, Any].resume(server.url, ticket, connection=connection)
            assert (await again.step({"n": 1})).observation["n"] == 4
            assert deleted(eid) == (200, True)
            assert "is drained" not in "".join((await asked("workers")).splitlines()[1:])
            await again.close()
            await connection.aclose()
        await asyncio.to_thread(until, Fleet(server).all_up)
