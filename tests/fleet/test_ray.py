"""A fleet on a simulated Ray cluster: its commands, the deaths of its parts, and what its clients are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import ray

from errata_client import EnvPool, ErrataClient, Fleet
from errata_protocol.errors import InvalidRequest
from errata_protocol.shards import shard_of
from errata_ray import cluster as clusters
from errata_ray.engine import RayEngine
from errata_server.fleet_engines import ShardStatus, Wanted

if TYPE_CHECKING:
    from errata_ray.demo import SimulatedCluster

TARGET = "errata_environment.fleet_demo:CountEnvironment"
TOKEN = "a-token-of-these-tests"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
NAME = "tested"
WAIT_S = 180.0
LOOK_S = 0.2
ENGINE = RayEngine()


def errata(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "errata_server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "ERRATA_TOKEN": TOKEN, **env},
    )


def until(found: Callable[[], Any], what: str) -> Any:
    for _ in range(int(WAIT_S / LOOK_S)):
        if value := found():
            return value
        time.sleep(LOOK_S)
    raise AssertionError(f"it does not come about: {what}")


@pytest.fixture(scope="module")
def fleet(cluster: SimulatedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleeted]:
    """A fleet of two shards with directories of their nodes."""
    data = tmp_path_factory.mktemp("fleet") / "{node}"
    where = ("--ray", "--address", cluster.address, "--name", NAME)
    made = errata("fleet", "up", TARGET, *where, "--data-dir", str(data), "--json", "--", "--max-sessions", "50")
    assert made.returncode == 0, made.stderr
    assert [one["state"] for one in json.loads(made.stdout)] == ["up", "up"]
    assert "2 of 2 shards serve" in made.stderr
    yield Fleeted(cluster, where)
    ended = errata("fleet", "down", *where, "--now")
    assert ended.returncode == 0, ended.stderr
    with pytest.raises(InvalidRequest, match="has no fleet tested"):
        ENGINE.status(cluster.address, NAME)


class Fleeted:
    """The fleet of these tests.

    Args:
        cluster: Ray cluster that the fleet runs on.
        where: Options that name it.
    """

    def __init__(self, cluster: SimulatedCluster, where: tuple[str, ...]) -> None:
        self.cluster, self.where = cluster, where

    def status(self) -> list[ShardStatus]:
        return ENGINE.status(self.cluster.address, NAME)

    def up(self) -> list[ShardStatus]:
        return [one for one in self.status() if one.state == "up"]


async def counted(url: str) -> int:
    async with ErrataClient[Any, Any, Any](url, headers=HEADERS) as client:
        await client.reset()
        return int((await client.step({"n": 7})).observation["total"])


async def test_members_serve_and_know_each_other_and_clients_find_them_by_the_name(fleet: Fleeted) -> None:
    members = fleet.up()
    assert len({one.node for one in members}) == 2, "on different nodes"
    for one in members:
        assert one.url is not None
        assert await counted(one.url) == 7
    async with Fleet.of(f"ray://{NAME}") as known:
        endpoints = await known.endpoints()
    assert [(one.shard, one.url, one.state) for one in endpoints] == [(one.shard, one.url, "up") for one in members]

    def listed(url: str) -> list[tuple[str, str, str]]:
        found = httpx.get(f"{url}/fleet", headers=HEADERS, timeout=30.0, trust_env=False).json()["members"]
        return [(one["shard"], one["url"], one["state"]) for one in found]

    wanted = [(one.shard, one.url, "up") for one in members]
    for one in members:
        assert one.url is not None
        until(lambda url=one.url: listed(url) == wanted, "every member lists all members at their addresses")


async def test_a_pool_has_sessions_at_all_members(fleet: Fleeted) -> None:
    members = until(lambda: len(found := fleet.up()) == 2 and found, "both serve")
    async with EnvPool(f"ray://{NAME}", 24, headers=HEADERS) as pool:
        await pool.reset_batch()
        stepped = await pool.step_batch([{"n": n} for n in range(24)])
        assert [one.observation["total"] for one in stepped] == list(range(24))
        assert {shard_of(client.eid or "") for client in pool.clients} == {one.shard for one in members}


def test_a_process_that_is_killed_is_started_again_with_its_shard(fleet: Fleeted) -> None:
    before = fleet.up()
    pids = [int(one.name) for one in Path("/proc").glob("[0-9]*") if serves(int(one.name), before[0].shard or "")]
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: not serves(pids[0], before[0].shard or ""), "it is dead")
    again = until(
        lambda: [one for one in fleet.up() if one.shard == before[0].shard and one.url != before[0].url], "up"
    )
    assert again[0].node == before[0].node


def serves(pid: int, shard: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return "errata_server.cli" in words and any(word.endswith(f"/{shard}") for word in words)


def test_no_process_shows_the_token(fleet: Fleeted) -> None:
    assert fleet.up()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert TOKEN.encode() not in place.read_bytes()
        except OSError:
            continue


def test_the_status_is_a_table_of_shards(fleet: Fleeted) -> None:
    members = until(lambda: len(found := fleet.up()) == 2 and found, "both serve")
    shown = errata("fleet", "status", *fleet.where)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split()[:5] == ["shard", "node", "state", "sessions", "steps/s"]
    assert {line.split()[0] for line in lines[1:]} == {one.shard for one in members}


def test_a_member_that_drains_ends_and_serves_again_when_that_is_undone(fleet: Fleeted) -> None:
    first, second = until(lambda: len(found := fleet.up()) == 2 and found, "both serve")
    drained = errata("fleet", "drain", first.shard or "", *fleet.where)
    assert drained.returncode == 0, drained.stderr
    assert drained.stdout.splitlines()[-1] == f"{first.shard} is drained; sessions left: 0"
    assert [(one.shard, one.state) for one in fleet.status()] == [(first.shard, "down"), (second.shard, "up")]
    refused = errata("fleet", "drain", second.shard or "", *fleet.where)
    assert refused.returncode != 0 and "the last shard that takes new sessions" in refused.stderr
    again = errata("fleet", "undrain", first.shard or "", *fleet.where)
    assert again.returncode == 0, again.stderr
    assert [one.shard for one in fleet.up()] == [first.shard, second.shard]


def test_a_registry_that_dies_is_told_all_again(fleet: Fleeted) -> None:
    before = until(lambda: len(found := fleet.up()) == 2 and found, "both serve")
    ray.kill(clusters.registry_of(NAME), no_restart=False)

    def again() -> bool:
        try:
            return [(one.shard, one.url) for one in fleet.up()] == [(one.shard, one.url) for one in before]
        except Exception as error:
            assert "does not answer" in str(error)
            return False

    until(again, "the members are as they were")


def test_the_shard_of_a_dead_node_is_lost_and_only_that(fleet: Fleeted) -> None:
    kept, killed = until(lambda: len(found := fleet.up()) == 2 and found, "both serve")
    fleet.cluster.kill(killed.node or "")
    until(lambda: [one.shard for one in fleet.status() if one.state == "lost"] == [killed.shard], "it is lost")
    assert kept.shard in [one.shard for one in fleet.up()]
    fresh = until(lambda: len(found := fleet.up()) == 2 and found, "its slot goes on with a fresh shard")
    assert {one.shard for one in fresh} & {kept.shard, killed.shard} == {kept.shard}

    def told() -> bool:
        found = httpx.get(f"{kept.url}/fleet", headers=HEADERS, timeout=30.0, trust_env=False).json()["members"]
        return {one["shard"]: one["state"] for one in found} == {
            **{one.shard: "up" for one in fresh},
            killed.shard: "lost",
        }

    until(told, "the members say so to clients")
    fleet.cluster.add()


def test_a_second_fleet_of_the_name_and_options_of_the_fleet_itself_are_refused(fleet: Fleeted) -> None:
    address = fleet.cluster.address
    with pytest.raises(InvalidRequest, match="has a fleet tested already"):
        ENGINE.up(address, NAME, Wanted([TARGET], token=TOKEN), print)
    with pytest.raises(InvalidRequest, match="--port=1 is given by the fleet itself"):
        ENGINE.up(address, "other", Wanted([TARGET], ["--port=1"], token=TOKEN), print)
    with pytest.raises(InvalidRequest, match="no token is set"):
        ENGINE.up(address, "other", Wanted([TARGET]), print)
    with pytest.raises(InvalidRequest, match="9 are wanted: add nodes"):
        ENGINE.up(address, "other", Wanted([TARGET], nodes=9, token=TOKEN), print)


def test_a_server_that_does_not_start_ends_the_fleet_with_its_reason(cluster: SimulatedCluster, tmp_path: Path) -> None:
    wanted = Wanted(["no_such_module:Environment"], nodes=1, data_dir=tmp_path, token=TOKEN)
    with pytest.raises(InvalidRequest, match=r"a server process did not start: .*no_such_module"):
        ENGINE.up(cluster.address, "broken", wanted, print)
    with pytest.raises(InvalidRequest, match="has no fleet broken"):
        ENGINE.status(cluster.address, "broken")


def test_a_cluster_that_wants_a_token_and_one_that_is_not_there_say_what_to_do(cluster: SimulatedCluster) -> None:
    status = ("fleet", "status", "--ray", "--address")
    refused = errata(*status, cluster.address, RAY_AUTH_TOKEN="another")
    assert refused.returncode != 0 and "RAY_AUTH_TOKEN" in refused.stderr
    missing = errata(*status, "127.0.0.1:1")
    assert missing.returncode != 0 and "ray start --head" in missing.stderr
