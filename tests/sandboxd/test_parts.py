"""The containers and layers of several processes of one server, which use one socket of the broker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from errata_os.division import ALONE, Division
from errata_protocol.environment import SnapshotRef
from errata_sandboxd.engine import LABEL, PART
from errata_sandboxd.service import Service
from errata_server.sandbox.base import BackendConfig, Limits
from errata_server.sandbox.docker.backend import SPARE, DockerBackend
from errata_server.sandbox.docker.backend_type import SOCKET_VARIABLE, DockerType
from errata_server.sandbox.docker.containers import Kind

from .attacker import Attacker
from .fake_engine import FakeEngine

OF = 3
WORKERS = [Division(number, OF, Path("/any")) for number in range(OF)]


@asynccontextmanager
async def started(place: Path, division: Division) -> AsyncIterator[DockerBackend]:
    """Start the backend of a process, and wait until it has removed what was left."""
    directory = place / f"sandboxes-{division.number}"
    backend = DockerBackend(directory, place / "one", spare=0, division=division)
    await backend.start()
    await backend.containers.wait_removed()
    try:
        yield backend
    finally:
        await backend.close()


def labelled(engine: FakeEngine, *parts: int | str | None) -> list[str]:
    """Add a container for each label, and return their ids."""
    return [engine.add_container("one", {} if part is None else {PART: str(part)}) for part in parts]


@pytest.mark.parametrize(
    ("division", "left"),
    [
        # without a label: made by a broker of an older version, or labelled by somebody else
        (WORKERS[0], [1, 2]),
        (WORKERS[1], [None, "x", "-1", "", 0, 2, 3, 9]),
        (WORKERS[2], [None, "x", "-1", "", 0, 1, 3, 9]),
        (ALONE, []),
    ],
    ids=["first", "second", "third", "alone"],
)
async def test_a_process_that_starts_removes_its_own_containers_and_the_first_those_of_nobody(
    serve: Callable[..., Service], place: Path, engine: FakeEngine, division: Division, left: list[int | str | None]
) -> None:
    serve("one")
    parts: list[int | str | None] = [None, "x", "-1", "", 0, 1, 2, 3, 9]
    made = dict(zip(parts, labelled(engine, *parts), strict=True))
    neighbours = engine.add_container("two", {PART: str(division.number)})
    async with started(place, division):
        assert set(engine.containers) == {*(made[part] for part in left), neighbours}


async def test_what_a_process_makes_has_its_number(
    serve: Callable[..., Service], place: Path, engine: FakeEngine, attacker: Attacker
) -> None:
    image = engine.add_image("errata/base:default")
    async with started(place, WORKERS[2]) as third, started(place, ALONE) as alone:
        made = [await backend.containers.create(Kind.of(image, Limits())) for backend in (third, alone)]
        assert [engine.containers[one]["Config"]["Labels"][PART] for one in made] == ["2", "0"]
        layer = (await third.broker.call("commit", container=made[0], facts={}))["image"]
        found = engine.find_image(layer)
        assert found is not None and found["Labels"] == {LABEL: "one", PART: "2", "errata.facts": json.dumps({})}
        listed = attacker.ok("list")
        assert {row["container"]: row["part"] for row in listed["containers"]} == dict(zip(made, (2, 0), strict=True))
        assert [row["part"] for row in listed["layers"] if row["image"] == layer] == [2]
    for refused in (-1, 10_000, 1.5, True, "1"):
        assert attacker.code("create", image="errata/base:default", part=refused) == "invalid"


async def test_a_process_collects_its_own_layers_only(
    serve: Callable[..., Service], place: Path, engine: FakeEngine
) -> None:
    serve("one")
    layers = {part: engine.add_image(labels={LABEL: "one", PART: str(part)}) for part in range(OF + 1)}
    old = engine.add_image(labels={LABEL: "one"})
    kept = engine.add_image(labels={LABEL: "one", PART: "1"})
    async with started(place, WORKERS[1]) as second:
        report = await second.collect([SnapshotRef(kind="layer", id=kept.removeprefix("sha256:"))])
        assert report.layers == 1
    ids = {one["Id"] for one in engine.images}
    assert ids == {layers[0], layers[2], layers[3], old, kept}
    async with started(place, WORKERS[0]) as first:
        assert (await first.collect([])).layers == 2
    assert {one["Id"] for one in engine.images} == {layers[2], layers[3], kept}, "of a journal that may be served again"


def test_the_spare_containers_are_those_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "none"))

    def spare(division: Division) -> int:
        made = DockerType().create(BackendConfig(tmp_path, division=division))
        assert isinstance(made, DockerBackend)
        return made.containers._spare

    assert [spare(division) for division in (ALONE, Division(1, 2), Division(7, 8))] == [SPARE, 1, 1]
    monkeypatch.setenv("ERRATA_SANDBOXD_SPARE", "0")
    assert spare(Division(1, 2)) == 0
