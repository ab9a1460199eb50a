"""A full disk freezes sessions and loses nothing (PROTOCOL E4): on a small file system of its own."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError
from errata_server.process import ServerProcess
from errata_server.settings import Settings

from .local_server import LocalServer

COUNT = "tests.server.environments:CountEnvironment"

pytestmark = pytest.mark.sandbox  # mounting a small file system needs root


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Take all space but a few pages; return the file to delete."""
    hog = directory / "hog"
    with hog.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            pass
    return hog


async def until_frozen(step: Callable[[], Any]) -> tuple[asyncio.Task[Any], int]:
    """Step until the last page of the journal that there was is full; return the step that waits, and its number."""
    for n in range(1, 20):
        waiting = asyncio.create_task(asyncio.to_thread(step))
        done, _ = await asyncio.wait([waiting], timeout=1.0)
        if not done:
            return waiting, n
    raise AssertionError("replies although nothing can be made durable")


@pytest.mark.parametrize("floor", [0, 1_000_000], ids=["after the step ran", "before the step runs"])
async def test_a_session_freezes_on_a_full_disk_and_goes_on_when_space_returns(small_disk: Path, floor: int) -> None:
    settings = Settings(disk_floor_bytes=floor)
    with LocalServer(COUNT, small_disk, settings) as server, ErrataClient(server.url).sync() as held:
        held.reset()
        held.step({"n": 1})
        hog = fill(small_disk)
        waiting, t = await until_frozen(lambda: held.step({"n": 2}))
        hog.unlink()
        result = await asyncio.wait_for(waiting, 60)
        assert result.observation["n"] == 1 + 2 * t and held.t == 1 + t
        assert held.step({"n": 1}).observation["n"] == 2 + 2 * t


async def test_a_sandboxed_session_freezes_too_and_the_agent_reads_nothing_of_it(small_disk: Path) -> None:
    with ServerProcess("terminal", small_disk) as server, ErrataClient(server.url).sync() as held:
        held.reset()
        held.step({"command": "echo 1 > f"})
        hog = fill(small_disk)
        waiting = asyncio.create_task(asyncio.to_thread(held.step, {"command": "echo 2 >> f; cat f"}))
        done, _ = await asyncio.wait([waiting], timeout=1.0)
        assert not done
        hog.unlink()
        observation = (await asyncio.wait_for(waiting, 60)).observation
        assert (observation["stdout"], observation["stderr"], observation["error_kind"]) == ("1\n2\n", "", None)


async def test_a_disk_that_stays_full_is_an_exception_with_a_code_and_nothing_ran(small_disk: Path) -> None:
    with LocalServer(COUNT, small_disk, Settings(journal_wait_s=0.5)) as server:
        async with ErrataClient(server.url, message_timeout_s=9.0) as client:
            await client.reset()
            await client.step({"n": 1})
            hog = fill(small_disk)
            with pytest.raises(ErrataError) as caught:
                await client.step({"n": 100})
            assert caught.value.code == "JOURNAL_UNAVAILABLE" and caught.value.retryable
            hog.unlink()
            assert (await client.step({"n": 1})).observation["n"] == 2
            assert client.t == 2
