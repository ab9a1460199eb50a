"""``docker compose --profile engine up containers``: sessions are containers, made by the broker."""

from __future__ import annotations

import json

import pytest

from errata_client import ErrataClient

from .conftest import Compose
from .vanilla import GENERATIONS, played


def test_the_server_has_no_privilege_and_not_the_engines_socket(containers: Compose) -> None:
    state = json.loads(containers.docker("inspect", containers.container("containers")))[0]
    assert state["Config"]["User"] == "errata"
    assert (state["HostConfig"]["CapDrop"], state["HostConfig"]["CapAdd"]) == (["ALL"], None)
    assert sorted(mount["Destination"] for mount in state["Mounts"]) == ["/data", "/run/sandboxd"]
    broker = json.loads(containers.docker("inspect", containers.container("sandboxd")))[0]
    assert broker["HostConfig"]["NetworkMode"] == "none" and broker["NetworkSettings"]["Ports"] == {}


async def test_a_session_is_a_container_and_forks_by_execution_again(containers: Compose) -> None:
    url = f"http://127.0.0.1:{containers.containers_port}"
    mine = ("ps", "-q", "--filter", f"label=errata.sandbox={containers.project}", "--filter", "status=running")
    async with ErrataClient(f"{url}/terminal", headers=containers.headers, message_timeout_s=120) as client:
        await client.reset()
        assert (await client.step({"command": "echo one > kept; cat /proc/1/comm"})).observation["exit_code"] == 0
        assert containers.docker(*mine)
        failed = await client.step({"command": "echo two > kept; cat nothing"})
        assert failed.observation["error_kind"] == "path_not_found"
        assert json.loads((await client.state_at(2)).payload)["observation"] == failed.observation
        async with await client.fork(1) as child:
            assert (await child.step({"command": "cat kept"})).observation["stdout"] == "one\n"
        assert (await client.step({"command": "cat kept"})).observation["stdout"] == "two\n"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_vanilla_clients_play_both_environments(containers: Compose, generation: str) -> None:
    terminal, swe = played(generation, containers.token, containers.containers_port)
    assert (terminal["submit"]["reward"], terminal["submit"]["done"]) == (1.0, True)
    assert (swe["submit"]["reward"], swe["submit"]["done"]) == (0.0, True)
