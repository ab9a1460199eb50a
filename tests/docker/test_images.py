"""The Dockerfile that each environment brings for itself, and what stands beside compose.yaml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from errata_client import ErrataClient

from .conftest import ROOT, Compose, free_port

CAPABILITIES = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]["envs"]["cap_add"]


def dockerfile(package: str) -> str:
    return (ROOT / "envs" / package / "server" / "Dockerfile").read_text("utf-8")


def test_both_environments_have_the_same_dockerfile_but_for_names() -> None:
    terminal, swe = dockerfile("terminal_env").splitlines(), dockerfile("swe_bench_lite_env").splitlines()
    differing = [(a, b) for a, b in zip(terminal, swe, strict=True) if a != b]
    assert all("terminal" in a and "swe" in b for a, b in differing) and len(differing) == 5, differing


def test_every_page_and_manifest_lists_the_capabilities_of_compose() -> None:
    manifest = yaml.safe_load((ROOT / "docker/kubernetes/base/statefulset.yaml").read_text("utf-8"))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": CAPABILITIES}
    for text in (dockerfile("terminal_env"), dockerfile("swe_bench_lite_env")):
        assert [word for word in text.split() if word in CAPABILITIES] == CAPABILITIES
    page = (ROOT / "docs/docker.md").read_text("utf-8")
    assert [name for name in CAPABILITIES if name not in page] == []


def test_probes_ask_the_health_port_with_timeouts_and_nothing_publishes_it() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    for name in ("envs", "containers"):
        service = services[name]
        port = service["environment"]["ERRATA_HEALTH_PORT"]
        check = service["healthcheck"]
        assert f"127.0.0.1:{port}/ready" in check["test"][-1] and check["timeout"] == "5s"
        assert not any(published.endswith(f":{port}") for published in service["ports"])
    assert f"ERRATA_HEALTH_PORT={port}" in (ROOT / "docker/Dockerfile").read_text("utf-8")


async def test_the_dockerfile_of_an_environment_serves_it(checkout: Compose, tmp_path: Path) -> None:
    context = checkout.directory / "envs/terminal_env"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(context / "dist"),
            ".",
        ],
        cwd=checkout.directory,
        check=True,
    )
    certificates = context / "certificates"
    certificates.mkdir()
    for file in (checkout.directory / "docker/certificates").glob("*.crt"):
        (certificates / file.name).write_bytes(file.read_bytes())
    name, port = f"{checkout.project}-terminal", free_port()
    checkout.docker(
        *("build", "-q", "-t", name, "--build-arg", "CA_BUNDLE=certificates"),
        *("-f", str(context / "server/Dockerfile"), str(context)),
        timeout_s=600,
    )
    refused = checkout.docker("run", "--rm", name, check=False)
    assert refused == "", "without a token it does not start"
    power = [word for capability in CAPABILITIES for word in ("--cap-add", capability)]
    checkout.docker(
        *("run", "-d", "--name", name, "--cap-drop", "ALL", *power, "--security-opt", "apparmor=unconfined"),
        *("--security-opt", f"seccomp={checkout.directory}/docker/seccomp.json", "-v", f"{name}:/data"),
        *("-e", f"ERRATA_TOKEN={checkout.token}", "-p", f"127.0.0.1:{port}:8000", name),
    )
    try:
        checkout.wait_until_ready(port, lambda: checkout.docker("logs", "--tail", "20", name))
        async with ErrataClient(f"http://127.0.0.1:{port}", headers=checkout.headers) as client:
            await client.reset(task_id="access-report")
            assert (await client.step({"command": "true"})).observation["exit_code"] == 0
            over = await client.step({"tool": "submit"})
            assert (over.done, over.reward) == (True, 0.0)
    finally:
        checkout.docker("rm", "-f", name, check=False)
        checkout.docker("volume", "rm", name, check=False)


async def test_openenvs_own_provider_starts_an_image_that_needs_no_privilege(
    envs: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends no token, so the container is started with one and the client gets it as a header (docs/deploy.md)."""
    from openenv.core.containers.runtime import LocalDockerProvider

    monkeypatch.setenv("DOCKER_HOST", envs.engine)
    image, name = f"{envs.project}-echo", "tests.client.echo_environment:EchoEnvironment"
    (envs.directory / "echo").mkdir()
    for file in ("tests/__init__.py", "tests/client/__init__.py", "tests/client/echo_environment.py"):
        source = ROOT / file
        target = envs.directory / "echo" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes() if source.exists() else b"")
    (envs.directory / "echo/Dockerfile").write_text(
        "FROM errata/envs:test\nCOPY tests /srv/tests\nENV PYTHONPATH=/srv ERRATA_SANDBOX=fake\n"
        "RUN mkdir -p /data && chown errata /data\nUSER errata\n"
        f"CMD {json.dumps(['errata', 'serve', name, '--host', '0.0.0.0'])}\n"
    )
    envs.docker("build", "-q", "-t", image, str(envs.directory / "echo"))
    await _the_compose_file_of_the_page_serves(envs, image)
    provider = LocalDockerProvider()
    url = provider.start_container(image, env_vars={"ERRATA_TOKEN": envs.token})
    try:
        provider.wait_for_ready(url, timeout_s=60)
        async with ErrataClient(url, headers=envs.headers) as client:
            await client.reset()
            assert (await client.step({"text": "hello"})).observation["text"] == "hello"
    finally:
        provider.stop_container()


async def _the_compose_file_of_the_page_serves(envs: Compose, image: str) -> None:
    """Play an environment by docs/deploy.md's file, kill its container, and find the episode again."""
    page = (ROOT / "docs/deploy.md").read_text("utf-8")
    (file,) = re.findall(r"```yaml\n(version.*?)```", page, re.S)
    directory, port = envs.directory / "echo", free_port()
    (directory / "compose.yaml").write_text(file.replace("image: my-env", f"image: {image}"), encoding="utf-8")
    (directory / ".env").write_text(f"ERRATA_TOKEN={envs.token}\nMY_ENV_PORT={port}\n", encoding="utf-8")
    own = Compose(directory, envs.engine, port, port, envs.token)
    project = ("-p", f"{envs.project}own")
    own.run(*project, "up", "-d")
    try:
        own.wait_until_ready(port, lambda: own.run(*project, "logs", "--tail", "20").stdout)
        async with ErrataClient(f"http://127.0.0.1:{port}", headers=envs.headers) as client:
            await client.reset()
            first = await client.step({"text": "kept"})
            eid = client.eid
            own.docker("kill", own.run(*project, "ps", "-q", "my-env").stdout.strip())
        own.run(*project, "up", "-d")
        own.wait_until_ready(port, lambda: own.run(*project, "logs", "--tail", "20").stdout)
        # The session is lost: its environment does not say that it is deterministic. What was delivered is not.
        async with ErrataClient(f"http://127.0.0.1:{port}", headers=envs.headers) as client:
            await client.reset()
            state = await client.state_at(1, eid)
            assert json.loads(state.payload)["observation"] == first.observation
    finally:
        own.run(*project, "down", "-v", check=False)
