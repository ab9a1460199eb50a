"""``docker compose --profile engine up containers``: sessions are containers, made by the broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from typing import Any

import pytest

from errata_client import ErrataClient

from .conftest import ROOT, Compose
from .vanilla import GENERATIONS, played

BASE = "debian:bookworm-slim"


def test_the_server_has_no_privilege_and_not_the_engines_socket(containers: Compose) -> None:
    state = json.loads(containers.docker("inspect", containers.container("containers")))[0]
    assert state["Config"]["User"] == "errata"
    assert (state["HostConfig"]["CapDrop"], state["HostConfig"]["CapAdd"]) == (["ALL"], None)
    assert sorted(mount["Destination"] for mount in state["Mounts"]) == ["/data", "/run/sandboxd"]
    broker = json.loads(containers.docker("inspect", containers.container("sandboxd")))[0]
    assert broker["HostConfig"]["NetworkMode"] == "none" and broker["NetworkSettings"]["Ports"] == {}
    assert 0 < broker["HostConfig"]["Memory"] <= 2 * 1024**3 and broker["HostConfig"]["PidsLimit"] > 0
    assert "size=" in broker["HostConfig"]["Tmpfs"]["/tmp"]


def test_the_brokers_image_has_what_the_broker_imports_and_no_more(containers: Compose) -> None:
    image = containers.docker("inspect", "--format", "{{.Image}}", containers.container("sandboxd"))
    size, base = (int(containers.docker("image", "inspect", "--format", "{{.Size}}", name)) for name in (image, BASE))
    assert size - base <= 150 * 1000**2
    inside = ("run", "--rm", "--network", "none", "--entrypoint", "python3", image, "-c")
    absent = "import importlib.util as u; print([n for n in {} if u.find_spec(n)])"
    names = [
        "errata_server",
        "errata_os",
        "errata_protocol",
        "errata_client",
        "gradio",
        "pandas",
        "openai",
        "fastapi",
        "pip",
        "apsw",
    ]
    assert containers.docker(*inside, absent.format(names)) == "[]"
    modules = "import errata_sandboxd.cli, errata_sandboxd.service, errata_sandboxd.images, docker; print('all')"
    assert containers.docker(*inside, modules) == "all"


async def test_a_restart_of_the_broker_is_a_wait_of_the_sessions(containers: Compose) -> None:
    url = f"http://127.0.0.1:{containers.containers_port}/terminal"
    clients = [ErrataClient(url, headers=containers.headers, message_timeout_s=120) for _ in range(6)]
    async with contextlib.AsyncExitStack() as opened:
        for client in clients:
            await opened.enter_async_context(client)
            await client.reset()
            assert (await client.step({"command": "echo 0 > n"})).observation["exit_code"] == 0
        restarting = asyncio.to_thread(containers.run, "--profile", "engine", "restart", "sandboxd")
        steps = [client.step({"command": f"sleep 1; echo {n} >> n; cat n"}) for n, client in enumerate(clients)]
        *answers, _ = await asyncio.gather(*steps, restarting)
        answers += await asyncio.gather(*(client.step({"command": "cat n"}) for client in clients))
        shown = [answer.observation["stdout"] for answer in answers]
        assert shown == [f"0\n{n}\n" for n in range(6)] * 2


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


INSTANCES = [
    json.loads(line)
    for line in (ROOT / "envs/swe_bench_lite_env/tasks/instances.jsonl").read_text("utf-8").splitlines()
]


async def graded(url: str, headers: dict[str, str], row: dict[str, Any], patch: str) -> float | None:
    """Return the reward of a patch on an instance."""
    async with ErrataClient(f"{url}/swe_bench_lite", headers=headers, message_timeout_s=300) as client:
        await client.reset(instance_id=row["instance_id"])
        if patch:
            applied = await client.step({"tool": "run", "command": f"printf %s {shlex.quote(patch)} | git apply"})
            assert applied.observation["exit_code"] == 0, applied.observation
        over = await client.step({"tool": "submit"})
        assert over.done
        return over.reward


@pytest.mark.parametrize("row", INSTANCES[:3], ids=lambda row: row["instance_id"])
async def test_gradings_are_those_of_the_namespace_backend(
    envs: Compose, containers: Compose, row: dict[str, Any]
) -> None:
    services = [f"http://127.0.0.1:{port}" for port in (envs.port, containers.containers_port)]
    for patch, reward in ((row["patch"], 1.0), ("", 0.0)):
        here, there = [await graded(url, envs.headers, row, patch) for url in services]
        assert here == there == reward


async def test_a_killed_server_gives_back_or_refuses_and_leaves_no_container(containers: Compose) -> None:
    url = f"http://127.0.0.1:{containers.containers_port}/terminal"
    mine = ("ps", "-aq", "--filter", f"label=errata.sandbox={containers.project}")
    clients = [ErrataClient(url, headers=containers.headers, message_timeout_s=120) for _ in range(4)]
    for n, client in enumerate(clients):
        await client.reset()
        assert (await client.step({"command": f"echo {n} > kept; cat kept"})).observation["stdout"] == f"{n}\n"
    containers.docker("kill", "--signal", "KILL", containers.container("containers"))
    containers.run("--profile", "engine", "up", "-d", "containers")
    containers.wait_ready("containers")
    for n, client in enumerate(clients):  # the bundled tasks are deterministic: their requests run again
        assert (await client.step({"command": "cat kept"})).observation["stdout"] == f"{n}\n"
        assert json.loads((await client.state_at(1)).payload)["observation"]["stdout"] == f"{n}\n"
        await client.close()
    for _ in range(100):
        left = containers.docker(*mine, "--filter", "status=running").splitlines()
        if len(left) <= 4:  # those that are started ahead
            break
        await asyncio.sleep(0.2)
    assert len(left) <= 4, left
