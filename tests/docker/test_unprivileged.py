"""The service ``unprivileged`` of compose.yaml: no capability, an ordinary user, and a volume that root has used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from errata_client import ErrataClient

from .conftest import Compose, free_port


def options_of(checkout: Compose, name: str) -> list[str]:
    """Return the options of ``docker run`` for a service of compose.yaml."""
    service = yaml.safe_load((checkout.directory / "compose.yaml").read_text("utf-8"))["services"][name]
    several = {"tmpfs": "--tmpfs", "cap_drop": "--cap-drop", "cap_add": "--cap-add", "security_opt": "--security-opt"}
    options = ["--user", service["user"]] if "user" in service else []
    options += ["--read-only"] if service["read_only"] else []
    for key, option in several.items():
        for value in service.get(key, ()):
            if key == "security_opt":
                value = value.replace(":", "=", 1).replace("=docker/", f"={checkout.directory}/docker/")
            options += [option, value]
    return options


class Server:
    """A service started as ``docker run`` does it: docker-compose 1.29 does not know ``systempaths``.

    Args:
        checkout: The checkout.
        name: Name of the service, and of the container.
        volume: Name of the volume for ``/data``.
    """

    def __init__(self, checkout: Compose, name: str, volume: str) -> None:
        self.checkout = checkout
        self.name = f"{checkout.project}-{name}"
        self.port = free_port()
        words = options_of(checkout, name)
        words += ["-v", f"{volume}:/data", "-e", f"ERRATA_TOKEN={checkout.token}", "-p", f"127.0.0.1:{self.port}:8000"]
        self.words = [*words, "--name", self.name, "errata/envs:test"]

    def __enter__(self) -> Server:
        self.checkout.docker("run", "-d", *self.words)
        self.checkout.wait_until_ready(self.port, lambda: self.checkout.docker("logs", "--tail", "20", self.name))
        return self

    def __exit__(self, *_: object) -> None:
        self.checkout.docker("stop", "-t", "45", self.name)
        self.checkout.docker("rm", "-f", self.name)

    def address(self, environment: str) -> dict[str, Any]:
        return {
            "base_url": f"http://127.0.0.1:{self.port}/{environment}",
            "headers": self.checkout.headers,
            "message_timeout_s": 300,
        }


@pytest.fixture
def volume(envs: Compose) -> Iterator[str]:
    name = f"{envs.project}-unprivileged"
    yield name
    envs.docker("volume", "rm", name)


async def test_both_environments_are_played_without_any_capability(envs: Compose, volume: str) -> None:
    with Server(envs, "unprivileged", volume) as server:
        state = json.loads(envs.docker("inspect", server.name))[0]
        assert state["HostConfig"]["CapAdd"] is None and state["HostConfig"]["CapDrop"] == ["ALL"]
        status = envs.docker("exec", server.name, "grep", "CapEff", "/proc/1/status")
        assert status.split() == ["CapEff:", "0000000000000000"]
        async with ErrataClient(**server.address("terminal")) as client:
            await client.reset(task_id="access-report")
            await client.step({"command": "echo parent > kept"})
            async with await client.fork(1) as child:
                assert (await child.step({"command": "cat kept"})).observation["stdout"] == "parent\n"
            over = await client.step({"tool": "submit"})
            assert (over.done, over.reward) == (True, 0.0)
        async with ErrataClient(**server.address("swe_bench_lite")) as client:
            await client.reset()
            over = await client.step({"tool": "submit"})
            assert (over.done, over.reward) == (True, 0.0)


def test_it_lacks_what_the_page_says(envs: Compose, volume: str) -> None:
    with Server(envs, "unprivileged", volume) as server:
        doctor = ("errata", "doctor", "--json", "--port", "8002", "--data-dir", "/data/doctor")
        told = json.loads(envs.docker("exec", server.name, *doctor))
    lacking = {row["name"]: row for row in told["findings"] if row["verdict"] != "ok"}
    assert set(lacking) == {"cgroups", "id-mapped mounts"}, "docs/docker.md, Without any capability"
    assert "held: pids" in lacking["cgroups"]["says"]


async def test_a_volume_that_root_has_used_goes_on_once_it_is_given_away(envs: Compose, volume: str) -> None:
    with Server(envs, "envs", volume) as server:
        client = ErrataClient(**server.address("terminal"))
        await client.connect()
        await client.reset()
        await client.step({"command": "echo root > kept; chmod 700 kept"})
        ticket = client.ticket()
        await client.disconnect()
    server = Server(envs, "unprivileged", volume)
    refused = envs.run_docker("run", "--rm", *server.words, check=False)
    assert refused.returncode == 78 and "-R 10001:" in refused.stderr and "/data" in refused.stderr, refused.stderr
    chown = ("-u", "root", "-v", f"{volume}:/data", "--entrypoint", "chown", "errata/envs:test")
    envs.docker("run", "--rm", *chown, "-R", "errata:errata", "/data")
    with server:
        async with ErrataClient.resume(ticket=ticket, **server.address("terminal")) as client:
            again = await client.step({"command": "cat kept; echo more >> kept; cat kept"})
            assert again.observation["stdout"] == "root\nroot\nmore\n"
