"""``docker compose up envs`` from a clean clone, driven through the published port."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time

import httpx
import pytest

from errata_client import Connection, EnvPool, ErrataClient

from .conftest import ROOT, Compose
from .vanilla import GENERATIONS, played


def test_compose_refuses_to_start_without_a_token(checkout: Compose) -> None:
    settings = checkout.directory / ".env"
    kept = settings.read_text("utf-8")
    settings.write_text(re.sub("ERRATA_TOKEN=.*", "ERRATA_TOKEN=", kept), encoding="utf-8")
    try:
        refused = checkout.run("config", check=False)
    finally:
        settings.write_text(kept, encoding="utf-8")
    assert refused.returncode != 0
    assert "ERRATA_TOKEN" in refused.stderr and ".env.example" in refused.stderr


def test_the_file_is_what_the_specification_of_compose_says(checkout: Compose) -> None:
    checker = ROOT / ".cache" / "compose-check-jsonschema-0.39.0" / "bin" / "check-jsonschema"
    assert checker.exists(), f"{checker} is missing: run `make test-docker`, which installs it"
    done = subprocess.run(
        [str(checker), "--builtin-schema", "vendor.compose-spec", str(checkout.directory / "compose.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_container_has_no_more_power_than_the_file_lists(envs: Compose) -> None:
    state = json.loads(envs.docker("inspect", envs.container()))[0]
    host = state["HostConfig"]
    assert not host["Privileged"] and host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert any(option.startswith("seccomp") and "perf_event_open" in option for option in host["SecurityOpt"])
    assert [mount["Destination"] for mount in state["Mounts"]] == ["/data"]
    first = envs.docker("exec", envs.container(), "cat", "/proc/1/comm")
    assert first == "tini"


def test_the_server_has_all_that_a_machine_of_its_own_would_have(envs: Compose) -> None:
    """No line of ``errata doctor`` says that something is missing or worse: cgroups, a uid for each command."""
    doctor = ("errata", "doctor", "--json", "--port", "8002", "--data-dir", "/data/doctor")
    told = json.loads(envs.docker("exec", envs.container(), *doctor))
    lacking = [row for row in told["findings"] if row["verdict"] != "ok"]
    assert lacking == []
    assert envs.docker("inspect", "--format", "{{.State.Health.Status}}", envs.container()) in ("healthy", "starting")


@pytest.mark.smoke
async def test_both_environments_are_played_with_markers_states_and_forks(envs: Compose) -> None:
    async with ErrataClient(f"{envs.url}/terminal", headers=envs.headers) as client:
        await client.reset()
        failed = await client.step({"command": "python3 -c 'import nothing_like_it'"})
        assert failed.observation["error_kind"] == "import_error", failed.observation
        state = await client.state_at(1)
        assert state.source == "server" and json.loads(state.payload)["observation"] == failed.observation
        await client.step({"command": "echo parent > kept"})
        child = await client.fork(1)
        async with child:
            assert (await child.step({"command": "cat kept"})).observation["exit_code"] == 1
        assert (await client.step({"command": "cat kept"})).observation["stdout"] == "parent\n"
    async with ErrataClient(f"{envs.url}/swe_bench_lite", headers=envs.headers, message_timeout_s=300) as client:
        first = await client.reset()
        assert first.observation["problem_statement"]
        assert (await client.step({"tool": "run", "command": "git -C /testbed status --short"})).observation[
            "exit_code"
        ] == 0
        over = await client.step({"tool": "submit"})
        assert (over.done, over.reward) == (True, 0.0)


async def test_the_viewer_and_its_login_are_at_the_published_port(envs: Compose) -> None:
    async with ErrataClient(f"{envs.url}/terminal", headers=envs.headers) as client:
        await client.reset()
        await client.step({"command": "python3 -c 'import nothing_like_it'"})
        async with httpx.AsyncClient(base_url=envs.url, headers={"Origin": envs.url}, timeout=30) as person:
            assert "app.js" in (await person.get("/viewer/")).text
            assert (await person.get("/viewer/app.js")).status_code == 200
            assert (await person.get(f"/episodes/{client.eid}/turns")).status_code == 401
            assert (await person.post("/viewer/login", headers=envs.headers)).status_code == 200
            turns = (await person.get(f"/episodes/{client.eid}/turns")).json()["turns"]
            assert [turn["error_kind"] for turn in turns] == [None, "import_error"]
            fork = await person.post(f"/episodes/{client.eid}/fork", json={"t": 0, "request_id": "by-a-person"})
            assert fork.json()["origin"] == {"eid": client.eid, "t": 0}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_vanilla_clients_play_both_environments(envs: Compose, generation: str) -> None:
    terminal, swe = played(generation, envs.token, envs.port)
    assert (terminal["submit"]["reward"], terminal["submit"]["done"]) == (1.0, True)
    assert (swe["submit"]["reward"], swe["submit"]["done"]) == (0.0, True)


async def test_a_killed_container_comes_back_with_every_acknowledged_delivery(envs: Compose) -> None:
    connection = Connection(f"{envs.url}/terminal", headers=envs.headers)
    clients = [ErrataClient(connection=connection) for _ in range(20)]
    acknowledged: dict[str, list[str]] = {}
    under_way = asyncio.Event()

    async def play(client: ErrataClient) -> None:
        await client.reset()
        outputs = acknowledged.setdefault(str(client.eid), [])
        for turn in range(12):
            outputs.append((await client.step({"command": f"echo {turn} >> log; tail -n 1 log"})).observation["stdout"])
            if sum(map(len, acknowledged.values())) >= 60:
                under_way.set()

    playing = [asyncio.create_task(play(client)) for client in clients]
    await asyncio.wait_for(under_way.wait(), 60)
    envs.docker("kill", "--signal", "KILL", envs.container())
    envs.run("up", "-d", "envs")
    envs.wait_ready()
    await asyncio.wait_for(asyncio.gather(*playing), 180)
    assert all(outputs == [f"{turn}\n" for turn in range(12)] for outputs in acknowledged.values())
    for client in clients:
        assert (await client.step({"command": "cat log"})).observation["stdout"] == "".join(f"{n}\n" for n in range(12))
        assert json.loads((await client.state_at(5)).payload)["observation"]["stdout"] == "4\n"
        await client.close()
    await connection.aclose()


@pytest.mark.parametrize("sessions", [1_000, pytest.param(10_000, marks=pytest.mark.ten_thousand)])
async def test_many_sessions_step_through_the_published_port(envs: Compose, sessions: int) -> None:
    started = time.monotonic()
    async with EnvPool(f"{envs.url}/terminal", sessions, headers=envs.headers, message_timeout_s=800) as pool:
        await pool.reset_batch([{}] * sessions)
        opened = time.monotonic()
        results = await pool.step_batch([{"command": f"echo {n}"} for n in range(sessions)])
        stepped = time.monotonic()
        assert [result.observation["stdout"] for result in results] == [f"{n}\n" for n in range(sessions)]
        ready = httpx.get(f"{envs.url}/ready", timeout=30)
        assert ready.status_code == 200
    print(f"{sessions} sessions: opened in {opened - started:.0f} s, stepped in {stepped - opened:.0f} s")


def test_stopping_is_clean(envs: Compose) -> None:
    envs.run("stop", "envs")
    state = json.loads(envs.docker("inspect", envs.run("ps", "-aq", "envs").stdout.strip()))[0]["State"]
    envs.run("start", "envs")
    envs.wait_ready()
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
