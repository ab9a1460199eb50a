"""A client that waits says for what, since when and how long at most: every 10 s, in one line for all sessions."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from mux_peer import MuxPeer, peered, until

from errata_client import Backoff, Connection, EnvPool, ErrataClient
from errata_client.connections.dialing import Dial
from errata_client.connections.waiting import WARN_S, blocking_wait, waits_at
from errata_client.sync import run_blocking
from errata_server.simulation.loop import run

URL = "http://token:secret@envs.example:8000/left"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of this thread: the background loop may have clients of other tests that wait."""
    of_this_thread = (record for record in caplog.records if record.thread == threading.get_ident())
    return [r.getMessage() for r in of_this_thread if r.levelno == logging.WARNING and r.name == "errata.client"]


def in_virtual_time(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await story()

    run(main())


def test_a_line_comes_after_ten_seconds_and_every_ten_until_the_wait_is_over(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        waits = waits_at(URL)
        with waits.on("the reply to a step", 1000.0, lambda: "no room"):
            await asyncio.sleep(35.0)
        await asyncio.sleep(100.0)
        with waits.on("a session", 20.0):
            await asyncio.sleep(9.9)
        with waits.on("a session", 20.0):
            await asyncio.sleep(10.1)

    in_virtual_time(story)
    said = "waiting for envs.example:8000/left: "
    assert lines(caplog) == [
        *(f"{said}the reply to a step for {s} s now, 1000 s at most, no room" for s in (10, 20, 30)),
        f"{said}a session for 10 s now, 20 s at most",
    ]


def test_the_first_line_has_the_connection_that_was_lost_just_after_a_step_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        with waits_at(URL).on("the reply to a step", 60.0):
            await asyncio.sleep(0.2)
            with waits_at(URL).on("a connection", 120.0, lambda: ConnectionError()):
                await asyncio.sleep(15.0)

    in_virtual_time(story)
    (line,) = lines(caplog)
    assert line.endswith("; a connection for 10 s now, 120 s at most, ConnectionError")


def test_ten_thousand_waits_are_one_line_and_quick_ones_none(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async def wait(url: str) -> None:
            with waits_at(url).on("the reply to a step", 60.0):
                await asyncio.sleep(15.0)

        urls = [URL, URL.replace("http:", "ws:") + "/ws?session_id=geheim"]
        waiting = [asyncio.create_task(wait(urls[n % 2])) for n in range(10_000)]
        for _ in range(1000):
            with waits_at(URL).on("a reply"):
                await asyncio.sleep(0.01)
        await asyncio.gather(*waiting)

    in_virtual_time(story)
    (line,) = lines(caplog)
    assert "the reply to a step (10,000 callers, this is the oldest) for 10 s" in line
    assert "geheim" not in line and "secret" not in line


class NobodyThere(Dial):
    """No socket is ever opened."""

    async def open(self, *, compression: str | None = None) -> Any:
        """Refuse at once."""
        raise ConnectionError("Failed to connect: refused")


def test_a_server_that_is_gone_is_told_until_it_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        connection = Connection(URL, backoff=Backoff(give_up_s=60.0))
        connection.dial = NobodyThere("ws://envs.example:8000/left/ws")
        connection.stats.connects = 1  # the first attempt of all is not repeated
        reads = [asyncio.create_task(connection.read("capabilities", most_s=1000.0)) for _ in range(100)]
        failed = await asyncio.gather(*reads, return_exceptions=True)
        assert all(isinstance(error, ConnectionError) for error in failed)

    in_virtual_time(story)
    told = lines(caplog)
    assert len(told) == 5, told
    for n, line in enumerate(told, 1):
        assert f"a connection for {10 * n} s now, 60 s at most, Failed to connect: refused" in line
        assert f"the answer to a capabilities read (100 callers, this is the oldest) for {10 * n} s now, 1000 s" in line


async def test_a_blocking_caller_is_noted_with_the_blocking_clients() -> None:
    def texts() -> tuple[str | None, str | None]:
        async def ask() -> str | None:
            return waits_at(URL).text(now_and_later())

        with blocking_wait(URL, "the server's tasks", 60.0):
            during = run_blocking(ask())
        return during, run_blocking(ask())

    during, after = await asyncio.to_thread(texts)
    assert during == "waiting for envs.example:8000/left: the server's tasks for 10 s now, 60 s at most"
    assert after is None


@pytest.fixture
async def held() -> Any:
    """A server that answers no request."""
    async with peered() as peer:
        yield peer


def now_and_later() -> float:
    return asyncio.get_running_loop().time() + WARN_S


async def test_a_slow_step_is_noted_on_any_socket_and_no_longer_when_it_is_answered(held: MuxPeer) -> None:
    async with ErrataClient(held.url, message_timeout_s=77.0) as client:
        await client.reset()
        waits = waits_at(held.url)
        assert waits.text(now_and_later()) is None
        held.hold()
        step = asyncio.create_task(client.step({"n": 1}))
        await until(lambda: waits.text(now_and_later()) is not None)
        assert "the reply to a step for 10 s now, 77 s at most" in str(waits.text(now_and_later()))
        held.release()
        await step
        assert waits.text(now_and_later()) is None


async def test_a_batch_is_one_wait_with_the_number_that_is_missing(held: MuxPeer) -> None:
    async with EnvPool(held.url, 3) as pool:
        await pool.reset_batch()
        held.hold()
        steps = asyncio.create_task(pool.step_batch([{"n": 1}] * 3, timeout_s=88.0))
        await until(lambda: waits_at(held.url).text(now_and_later()) is not None)
        line = str(waits_at(held.url).text(now_and_later()))
        assert "the replies to a batch of steps for 10 s now, 88 s at most, 3 of 3 are missing" in line
        held.release()
        await steps
        assert waits_at(held.url).text(now_and_later()) is None
