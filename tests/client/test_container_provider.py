"""docs/deploy.md: how clients whose server a provider starts get past its token. The provider here runs a process."""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
from openenv.core.containers.runtime.providers import ContainerProvider
from openenv.core.generic_client import GenericEnvClient

from errata_client import ErrataClient
from errata_client.containers import ReportingProvider
from errata_protocol.errors import ServiceError
from errata_server.process import ServerProcess

TARGET = "tests.server.environments:CountEnvironment"


class ProcessProvider(ContainerProvider):
    """Starts what the container's command would, on all addresses, with the variables that it was given."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self.server: ServerProcess | None = None

    def start_container(
        self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **_: Any
    ) -> str:
        self.server = ServerProcess(image, self._data_dir, "--host", "0.0.0.0", env=env_vars)
        return self.server.url.replace("0.0.0.0", "localhost")

    def stop_container(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def wait_for_ready(self, base_url: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with urllib.request.urlopen(f"{base_url}/health", timeout=2) as answer:
                    assert answer.status == 200
                    return
            except URLError:
                if time.monotonic() > deadline:
                    raise


@pytest.fixture
def provider(tmp_path: Path) -> ProcessProvider:
    return ProcessProvider(tmp_path)


@pytest.mark.parametrize("client", [GenericEnvClient, ErrataClient])
async def test_a_client_made_by_hand_sends_the_token_and_stops_the_container(
    client: Any, provider: ProcessProvider
) -> None:
    url = provider.start_container(TARGET, env_vars={"ERRATA_TOKEN": "word"})
    provider.wait_for_ready(url)
    started = provider.server
    assert started is not None
    async with client(base_url=url, provider=provider, headers={"Authorization": "Bearer word"}) as env:
        await env.reset()
        assert (await env.step({"n": 3})).observation["n"] == 3
    assert started.process.poll() == 0


async def test_from_docker_image_needs_a_server_without_a_token(provider: ProcessProvider) -> None:
    env = await GenericEnvClient.from_docker_image(TARGET, provider, env_vars={"ERRATA_INSECURE": "1"})
    async with env:
        await env.reset()
        assert (await env.step({"n": 3})).observation["n"] == 3
    assert provider.server is None


async def test_from_docker_image_of_a_server_with_a_token_is_refused(provider: ProcessProvider) -> None:
    try:
        with pytest.raises(Exception, match="401"):
            await GenericEnvClient.from_docker_image(TARGET, provider, env_vars={"ERRATA_TOKEN": "word"})
    finally:
        provider.stop_container()


def test_a_container_without_a_decision_who_may_use_it_does_not_start(provider: ProcessProvider) -> None:
    with pytest.raises(ServiceError, match=r"set ERRATA_TOKEN, bind 127\.0\.0\.1, or give --insecure"):
        provider.start_container(TARGET)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program ``docker`` that writes down its calls; its containers have ended, or, with ``running``, say nothing."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
echo "$*" >> {tmp_path}/calls
case $1 in
run) echo c0ffee ;;
inspect) [ -e {tmp_path}/running ] && echo true || echo false ;;
logs) printf 'starting\\nerrata: \\033[31mno token is set\\033[0m: set ERRATA_TOKEN\\n\\n' >&2 ;;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_a_container_that_ends_says_why_and_what_to_do(docker: Path) -> None:
    with pytest.raises(RuntimeError, match="the container ended") as caught:
        ErrataClient.from_docker_image("errata/envs:local").sync()
    said = str(caught.value)
    assert "no token is set" in said and "docker compose up envs" in said and "ERRATA_TOKEN" in said
    assert "\n" not in said and "\033" not in said
    calls = (docker / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["version", "run", "inspect", "logs", "stop", "rm"]


def test_a_container_that_runs_and_does_not_answer_is_waited_for(docker: Path) -> None:
    (docker / "running").touch()
    provider = ReportingProvider(None)
    url = provider.start_container("errata/envs:local")
    with pytest.raises(TimeoutError, match=r"not ready within 0 s.*no token is set.*docker compose up envs"):
        provider.wait_for_ready(url, 0.0)


async def test_another_provider_is_passed_everything(provider: ProcessProvider) -> None:
    env = await ErrataClient.from_docker_image(TARGET, provider, env_vars={"ERRATA_INSECURE": "1"})
    async with env:
        await env.reset()
    assert provider.server is None
