"""Fixtures for tests of compose.yaml and the images: an engine, a clean clone, the running service.

``make test-docker`` starts an engine (``docker/engine.sh``) and names it with ``ERRATA_ENGINE``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.sandbox.docker.conftest import api, engine  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[2]
HOST_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this room."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.timeout(900))


def compose_command() -> list[str]:
    """Return how compose is called here: v2's plugin, else the program of v1."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    program = shutil.which("docker-compose")
    if program is None:
        pytest.fail("neither `docker compose` nor docker-compose is there: docker/engine.sh up installs one")
    return [program]


@dataclass(frozen=True)
class Compose:
    """A checkout in which compose is run.

    Args:
        directory: The checkout.
        engine: Address of the engine.
        port: Published port of ``envs``.
        containers_port: Published port of ``containers``.
        token: Its token.
    """

    directory: Path
    engine: str
    port: int
    containers_port: int
    token: str

    @property
    def project(self) -> str:
        """Name of the project, which is the directory's; v1 and v2 drop other characters than these."""
        return self.directory.name

    @property
    def url(self) -> str:
        """Address of the service."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What a client sends."""
        return {"Authorization": f"Bearer {self.token}"}

    def run(self, *arguments: str, check: bool = True, timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
        """Run compose; with ``check``, fail with what it printed."""
        return self._run([*compose_command(), *arguments], check, timeout_s)

    def docker(self, *arguments: str, check: bool = True, timeout_s: float = 120.0) -> str:
        """Run docker; return what it printed."""
        return self.run_docker(*arguments, check=check, timeout_s=timeout_s).stdout.strip()

    def run_docker(
        self, *arguments: str, check: bool = True, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run docker; with ``check``, fail with what it printed."""
        return self._run(["docker", *arguments], check, timeout_s)

    def _run(self, command: list[str], check: bool, timeout_s: float) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("ERRATA_", "COMPOSE_"))
        }
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=environment | {"DOCKER_HOST": self.engine, "DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done

    def container(self, service: str = "envs") -> str:
        """Return the id of a service's container."""
        return self.run("ps", "-q", service).stdout.strip()

    def wait_ready(self, service: str = "envs") -> float:
        """Wait until a service says that it is ready; return how long that took, seconds."""
        port = self.port if service == "envs" else self.containers_port
        return self.wait_until_ready(port, lambda: self.run("logs", "--tail", "20", service).stdout)

    def wait_until_ready(self, port: int, log: Callable[[], str], timeout_s: float = 120.0) -> float:
        """Wait until the server on a port says that it is ready; return how long that took, seconds."""
        started = time.monotonic()
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass
            if time.monotonic() - started > timeout_s:
                raise AssertionError(f"not ready after {timeout_s} s: {log()}")
            time.sleep(0.2)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def checkout(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Compose:  # noqa: F811
    """A clean copy of what git has, or would add, with a ``.env`` made of the example."""
    directory = tmp_path_factory.mktemp("errata") / f"errata{secrets.token_hex(3)}"
    directory.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    packed = subprocess.run(
        ["tar", "-c", "--null", "--ignore-failed-read", "-T", "-"],
        cwd=ROOT,
        input=listed.stdout,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-x", "-C", str(directory)], input=packed.stdout, check=True)
    if HOST_AUTHORITIES.exists():  # the builds see the network that this machine sees
        shutil.copy(HOST_AUTHORITIES, directory / "docker/certificates/host.crt")
    token = secrets.token_hex(16)
    made = Compose(directory, engine, free_port(), free_port(), token)
    settings = (directory / ".env.example").read_text("utf-8")
    settings = settings.replace("ERRATA_TOKEN=\n", f"ERRATA_TOKEN={token}\n").replace("8020", str(made.port))
    settings += f"ERRATA_CONTAINERS_PORT={made.containers_port}\nENGINE_SOCKET={engine.removeprefix('unix://')}\n"
    settings += f"ERRATA_OWNER={directory.name}\nERRATA_TAG=test\n"
    (directory / ".env").write_text(settings, encoding="utf-8")
    return made


@pytest.fixture(scope="session")
def project(checkout: Compose) -> Iterator[Compose]:
    """The checkout; at the end ``down``, after which nothing may be left."""
    try:
        yield checkout
    finally:
        checkout.run("--profile", "engine", "down", "-v", "--remove-orphans", check=False)
    label = f"label=com.docker.compose.project={checkout.project}"
    for kind in (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q")):
        assert checkout.docker(*kind, "--filter", label) == "", kind


@pytest.fixture(scope="session")
def envs(project: Compose) -> Compose:
    """``docker compose up -d envs``, ready."""
    project.run("up", "-d", "--build", "envs")
    project.wait_ready()
    return project


@pytest.fixture(scope="session")
def containers(project: Compose) -> Iterator[Compose]:
    """``docker compose --profile engine up -d containers``, ready; at the end no sandbox may be left."""
    project.run("--profile", "engine", "up", "-d", "--build", "envs", "containers")
    project.wait_ready(service="containers")
    yield project
    project.run("--profile", "engine", "stop", "containers")
    assert project.docker("ps", "-aq", "--filter", f"label=errata.sandbox={project.project}") == ""
