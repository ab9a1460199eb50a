"""Fixtures for tests on a container engine: its socket, the base image, a broker process, a backend.

``ERRATA_ENGINE=unix:///PATH`` names the engine; without it ``/var/run/docker.sock`` is tried. Where none answers the
tests are skipped, and the line says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from errata_server.sandbox.base_trees.tree import find_base
from errata_server.sandbox.docker.backend import DockerBackend
from tests.hangs import HANGS_S

IMAGE = "errata/base:default"


@pytest.fixture(scope="session")
def engine() -> str:
    """The engine's address."""
    docker = pytest.importorskip("docker", reason="no docker SDK: pip install 'openenv-errata[docker]'")
    address = os.environ.get("ERRATA_ENGINE", "unix:///var/run/docker.sock")
    try:
        api = docker.APIClient(base_url=address, version="1.41", timeout=30)
        api.ping()
    except Exception as error:
        pytest.skip(
            f"no container engine answers on {address} ({type(error).__name__}): docker/engine.sh up starts one"
        )
    return address


@pytest.fixture(scope="session")
def api(engine: str) -> Iterator[Any]:
    """The engine itself, for what a test has to see or do beside the broker."""
    import docker

    client = docker.APIClient(base_url=engine, version="1.41", timeout=120)
    yield client
    client.close()


@pytest.fixture(scope="session")
def base_image(engine: str, api: Any) -> str:
    """The base tree of the namespace backend as an image, so that both backends run the same programs."""
    if not api.images(name=IMAGE):
        root = find_base().root
        packed = subprocess.Popen(
            ["tar", "-C", str(root), "--exclude=./usr/lib/errata-verifier", "-c", "."], stdout=subprocess.PIPE
        )
        assert packed.stdout is not None
        repository, tag = IMAGE.split(":")
        api.import_image_from_stream(packed.stdout, repository=repository, tag=tag)
        assert packed.wait() == 0
    return IMAGE


@dataclass
class RunningBroker:
    """A broker process with one socket for each owner."""

    process: subprocess.Popen[str]
    sockets: dict[str, Path]
    owners: dict[str, str] = field(default_factory=dict)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(HANGS_S)


def start_broker(engine: str, directory: Path, *owners: str, options: tuple[str, ...] = ()) -> RunningBroker:
    """Start a broker; labels are made unique, so that tests of one engine do not meet."""
    made = {owner: f"test-{owner}-{uuid.uuid4().hex[:8]}" for owner in owners}
    sockets = {owner: directory / f"{owner}.sock" for owner in owners}
    serve = [part for owner in owners for part in ("--serve", f"{made[owner]}={sockets[owner]}")]
    command = [sys.executable, "-m", "errata_sandboxd", "--engine", engine, *serve, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=(directory / "broker.log").open("w"), text=True)
    assert process.stdout is not None
    for _ in owners:
        assert process.stdout.readline().startswith("errata sandboxd: test-")
    return RunningBroker(process, sockets, made)


def remove_all(api: Any, owner: str) -> None:
    """Remove what a test left in the engine."""
    mine = {"label": f"errata.sandbox={owner}"}
    for row in api.containers(all=True, filters=mine):
        api.remove_container(row["Id"], force=True, v=True)
    left = [row["Id"] for row in api.images(all=True, filters=mine)]
    for _ in range(130):  # a layer goes after those above it
        if not left:
            return
        for image in list(left):
            try:
                api.remove_image(image, noprune=True)
                left.remove(image)
            except Exception:
                continue


@pytest.fixture(scope="module")
def broker(engine: str, base_image: str, api: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker with the owners ``one`` and ``two``."""
    made = start_broker(engine, tmp_path_factory.mktemp("broker"), "one", "two")
    yield made
    made.stop()
    for owner in made.owners.values():
        remove_all(api, owner)


@pytest.fixture
async def docker_backend(broker: RunningBroker, api: Any, tmp_path: Path) -> AsyncIterator[DockerBackend]:
    """A started backend with no spare containers."""
    backend = DockerBackend(tmp_path / "sandboxes", broker.sockets["one"], spare=0)
    await backend.start()
    yield backend
    await backend.close()
    remove_all(api, broker.owners["one"])


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until something holds, at most 30 s."""

    def wait(holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 60.0
        while not holds():
            assert time.monotonic() < until, "it did not come to hold"
            time.sleep(0.05)

    return wait
