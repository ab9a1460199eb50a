"""Fixtures: a fake engine, and a broker on it with the owners ``one`` and ``two``."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from errata_sandboxd.engine import Policy
from errata_sandboxd.service import Service

from . import fake_engine
from .attacker import Attacker
from .fake_engine import FakeEngine


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="sandboxd"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def engine(place: Path) -> Iterator[FakeEngine]:
    with fake_engine.running(place / "engine") as made:
        yield made


@pytest.fixture
def serve(place: Path, engine: FakeEngine) -> Iterator[Callable[..., Service]]:
    """Starts the broker's socket of an owner, by default with the policy's defaults."""
    made: list[Service] = []

    def start(owner: str, **policy: object) -> Service:
        service = Service(place / owner, Policy(engine=f"unix://{engine.path}", **policy), owner)  # type: ignore[arg-type]
        threading.Thread(target=service.serve_forever, args=(0.02,), daemon=True).start()
        made.append(service)
        return service

    yield start
    for service in made:
        if service.socket.fileno() < 0:  # a test has ended it
            continue
        service.ending.set()
        service.end(10.0)


@pytest.fixture
def attacker(place: Path, serve: Callable[..., Service]) -> Attacker:
    serve("one")
    return Attacker(place / "one")


@pytest.fixture
def neighbour(place: Path, serve: Callable[..., Service]) -> Attacker:
    serve("two")
    return Attacker(place / "two")
