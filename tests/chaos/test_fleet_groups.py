"""Where the sessions of a group of rollouts are on a server of several workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from errata_client import EnvPool, ErrataClient
from errata_protocol.labels import Labels
from errata_protocol.shards import shard_of
from errata_server.process import ServerProcess

from .test_fleet import TARGET, Fleet, until

pytestmark = pytest.mark.chaos

WORKERS, SIZE = 4, 3
GROUPS = 48
"""One of four workers has none of these by chance once in 250,000 runs."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    options = ("--workers", str(WORKERS), "--no-fsync")
    with ServerProcess(TARGET, tmp_path_factory.mktemp("groups"), *options, start_s=120) as server:
        made = Fleet(server)
        until(lambda: len(made.scraped()) == WORKERS)
        yield made


def labels_of(step: int) -> list[Labels]:
    return [Labels(group=f"prompt-{n // SIZE}", step=step) for n in range(GROUPS * SIZE)]


def of_groups(pool: EnvPool) -> list[set[str | None]]:
    """Return the shards of each group's episodes."""
    shards = [shard_of(str(client.eid)) for client in pool.clients]
    return [set(shards[at : at + SIZE]) for at in range(0, len(shards), SIZE)]


@pytest.fixture(params=["opened", "lazy"])
async def pool(fleet: Fleet, request: pytest.FixtureRequest) -> AsyncIterator[EnvPool]:
    """A pool whose sessions are opened before its first reset, or by that."""
    made = EnvPool(fleet.url, GROUPS * SIZE)
    if request.param == "opened":
        await made.connect()
    yield made
    await made.aclose()


async def test_a_group_is_at_one_worker_and_groups_are_at_all(fleet: Fleet, pool: EnvPool) -> None:
    def episodes() -> dict[str, str]:
        return {one["eid"]: one["group"] for one in fleet.episodes(limit=500) if one["group"]}

    relayed, before = fleet.relayed(), episodes()
    await pool.reset_batch(labels=labels_of(1))
    found = of_groups(pool)
    assert [len(shards) for shards in found] == [1] * GROUPS
    assert len(set.union(*found)) == WORKERS
    results = await pool.step_batch([{"n": n} for n in range(len(pool))])
    assert [result.observation["n"] for result in results] == list(range(len(pool)))
    await pool.reset_batch(labels=labels_of(2))
    assert of_groups(pool) == found, "a session that has had an episode stays where it is"
    assert fleet.relayed() == relayed
    made = [group for eid, group in episodes().items() if eid not in before]
    assert Counter(made) == {f"prompt-{n}": 2 * SIZE for n in range(GROUPS)}, "nothing was begun twice"


async def test_a_session_that_was_given_out_does_not_move(fleet: Fleet) -> None:
    async def episode_of(client: ErrataClient[Any, Any, Any]) -> str | None:
        client.labels = Labels(group="prompt-1")
        await client.reset()
        return shard_of(str(client.eid))

    first = ErrataClient[Any, Any, Any](fleet.url)
    home = await episode_of(first)
    clients = [ErrataClient[Any, Any, Any](fleet.url) for _ in range(GROUPS)]
    for client in clients:
        await client.connect()
        client.ticket()
    assert {await episode_of(client) for client in clients} > {home}
    for client in (first, *clients):
        await client.close()
