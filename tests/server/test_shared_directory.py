"""Two ``errata serve --lease`` on one directory: the first is stopped, the second takes over, the first goes on."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient
from errata_protocol.errors import InvalidRequest, JournalUnavailable
from errata_server.process import ServerProcess
from errata_server.runtime.lease import LeaseWriter, now_ns
from errata_server.serve.leased import LEASE_LOST, own_directory

COUNT, DICE = "tests.server.environments:CountEnvironment", "tests.server.repeatable:DiceEnvironment"
NAMES = ("CountEnvironment", "DiceEnvironment")
"""One restores a snapshot that is in the journal, the other runs its requests again."""

HOUR_NS = 3_600_000_000_000
SEED = {"PYTHONHASHSEED": "7"}  # or each process would start twice, to choose one


class Box:
    """A box with a lease file of its own; both see the data directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.data_dir = directory / "shared"
        self.lease = directory / f"lease-{name}"
        self.keeper = LeaseWriter(self.lease)

    def serve(self, *options: str) -> ServerProcess:
        return ServerProcess(COUNT, self.data_dir, DICE, "--lease", str(self.lease), *options, env=SEED)


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[tuple[Box, Box]]:
    found = Box(tmp_path, "a"), Box(tmp_path, "b")
    yield found
    for box in found:
        box.keeper.close()


def events(directory: Path) -> dict[str, Any]:
    """Return what ``errata journal verify`` says of a data directory."""
    command = [sys.executable, "-m", "errata_server.cli", "journal", "verify", "--json", "--data-dir", str(directory)]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout))


async def test_a_server_that_was_stopped_and_followed_acknowledges_nothing_and_ends(boxes: tuple[Box, Box]) -> None:
    a, b = boxes
    a.keeper.grant(1, now_ns() + HOUR_NS)
    with a.serve() as first:
        clients = {name: ErrataClient[Any, Any, Any](f"{first.url}/{name}", mux=True, durable=True) for name in NAMES}
        for client in clients.values():
            await client.reset(seed=7)
            assert (await client.step({"n": 3})).observation["n"] >= 0
        tickets = {name: client.ticket() for name, client in clients.items()}
        first.process.send_signal(signal.SIGSTOP)
        pending = {name: asyncio.create_task(client.step({"n": 100})) for name, client in clients.items()}
        await asyncio.sleep(0)
        a.keeper.grant(1, now_ns())  # it is not renewed, and runs out
        b.keeper.grant(2, now_ns() + HOUR_NS)
        with b.serve() as second:
            assert await asyncio.to_thread(httpx.get, f"{second.url}/ready") is not None
            counts = {}
            for name, ticket in tickets.items():
                async with ErrataClient[Any, Any, Any].resume(f"{second.url}/{name}", ticket) as again:
                    assert again.t == 1
                    counts[name] = [(await again.step({"n": 1})).observation["n"] for _ in range(3)]
            assert counts["CountEnvironment"] == [4, 5, 6], "what the stopped server was sent acted nowhere"
            first.process.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(first.process.wait, 120) == LEASE_LOST
            assert any("acknowledges nothing more" in line for line in first.log)
            for task in pending.values():
                assert not task.done() or task.exception() is not None
                task.cancel()
            await asyncio.gather(*pending.values(), return_exceptions=True)
            for client in clients.values():
                await client.close()
            found = events(b.data_dir)
            assert found["ok"] and found["deliveries"] == 2 * 5, found
            listed = httpx.get(f"{second.url}/episodes").json()["episodes"]
            assert [episode["deliveries"] for episode in listed] == [5, 5]


async def test_a_server_whose_lease_ran_out_waits_for_it(boxes: tuple[Box, Box]) -> None:
    a, _ = boxes
    a.keeper.grant(1, now_ns() + HOUR_NS)
    with a.serve() as server:
        async with ErrataClient[Any, Any, Any](f"{server.url}/CountEnvironment", mux=True, durable=True) as client:
            await client.reset(seed=7)
            a.keeper.grant(1, now_ns())
            step = asyncio.create_task(client.step({"n": 3}))
            ready = await asyncio.to_thread(httpx.get, f"{server.url}/ready")
            assert ready.status_code == 503 and "lease" in ready.text
            assert not step.done()
            a.keeper.grant(1, now_ns() + HOUR_NS)
            assert (await step).observation["n"] == 3 and client.t == 1


def test_what_does_not_go_with_a_lease_is_refused(boxes: tuple[Box, Box], monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = boxes

    def directory(*, several: bool = False, fsync: bool | None = None) -> Path:
        return own_directory(a.data_dir, a.lease, None, several=several, fsync=fsync)

    with pytest.raises(JournalUnavailable, match="its keeper has to take one first"):
        directory()
    a.keeper.grant(5, now_ns() + HOUR_NS)
    with pytest.raises(InvalidRequest, match="--workers 1"):
        directory(several=True)
    with pytest.raises(InvalidRequest, match="--fsync"):
        directory(fsync=False)
    with monkeypatch.context() as environment, pytest.raises(InvalidRequest, match="--fsync"):
        environment.setenv("ERRATA_FSYNC", "false")
        directory()
    assert directory() == a.data_dir / "epochs" / f"{5:020d}"
    a.keeper.grant(4, now_ns() + HOUR_NS)
    with pytest.raises(JournalUnavailable, match="epoch 5 has taken"):
        directory()
