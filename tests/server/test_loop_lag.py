"""How late the event loop is, in virtual time; and probes that are answered whatever it does."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from errata_protocol.errors import InvalidRequest
from errata_server.runtime.loop_lag import LoopLag
from errata_server.runtime.readiness import Readiness
from errata_server.runtime.runtime import Runtime
from errata_server.serve.health_port import MAX_CONNECTIONS, HealthPort, listen_for_probes
from errata_server.serve.server import _health_port
from errata_server.settings import Settings
from errata_server.simulation.loop import run


class Stalling:
    """A clock that a loop in virtual time does not see jump: what happens when a callback takes long."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


def test_a_late_loop_shows_at_once_for_a_minute_and_is_unready_only_past_30_s() -> None:
    async def main() -> None:
        clock = Stalling()
        lag = LoopLag(clock.monotonic)
        assert not lag.is_measured and lag.overdue_s == 0.0
        lag.start()
        lag.start()  # once
        await asyncio.sleep(10.2)
        assert (lag.overdue_s, lag.worst_s, lag.trouble()) == (0.0, 0.0, None)
        clock.ahead_s = 20.0
        assert lag.overdue_s == lag.worst_s == pytest.approx(19.7) and lag.trouble() is None
        await asyncio.sleep(5.0)
        assert lag.worst_s == pytest.approx(20.0) and lag.overdue_s == 0.0
        clock.ahead_s += 40.0
        assert "is 40 s late" in str(lag.trouble())
        await asyncio.sleep(0.4)
        assert "is 40 s late" in str(lag.trouble()), "also for a request that waited for the late callback"
        await asyncio.sleep(1.0)
        assert lag.trouble() is None and lag.worst_s == pytest.approx(40.0)
        await asyncio.sleep(61.0)
        assert lag.worst_s == 0.0
        lag.stop()
        clock.ahead_s += 100.0
        assert (lag.is_measured, lag.overdue_s) == (False, 0.0)

    run(main())


class FixedLag(LoopLag):
    """A loop that is as late as a test says."""

    late_s = 0.0
    is_measured = True

    @property
    def overdue_s(self) -> float:
        return self.late_s


@pytest.fixture
def lag() -> FixedLag:
    return FixedLag()


@pytest.fixture
def port(lag: FixedLag) -> Iterator[HealthPort]:
    port = HealthPort(listen_for_probes("127.0.0.1", 0), Readiness(lag.trouble), lag)
    yield port
    port.close()


def get(port: HealthPort, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port.port}{path}", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_health_port_says_when_the_loop_is_late_and_when_it_is_stuck(port: HealthPort, lag: FixedLag) -> None:
    assert get(port, "/health") == (200, {"status": "healthy"})
    assert get(port, "/ready?verbose") == (200, {"status": "ready"})
    assert get(port, "/episodes")[0] == 404
    lag.late_s = 31.0
    assert get(port, "/health")[0] == 200
    status, body = get(port, "/ready")
    assert (status, body["status"]) == (503, "unavailable") and "31 s late" in body["reasons"][0]
    lag.late_s = 121.0
    assert get(port, "/health") == (503, {"status": "stuck", "reasons": ["the event loop has not run for 121 s"]})


def test_workers_share_the_port_and_say_so_where_another_is_stuck() -> None:
    listening, stuck = listen_for_probes("127.0.0.1", 0), ["the event loop of worker 1 has not run for 121 s"]
    lags = [FixedLag(), FixedLag()]
    ports = [HealthPort(listening.dup(), Readiness(lag.trouble), lag, lambda: list(stuck)) for lag in lags]
    listening.close()
    for _ in range(20):
        assert get(ports[0], "/health") == (503, {"status": "stuck", "reasons": stuck})
    said, stuck = list(stuck), []
    assert said and get(ports[0], "/health") == (200, {"status": "healthy"})
    ports.pop().close()
    assert get(ports[0], "/health") == (200, {"status": "healthy"}), "the others go on"
    ports[0].close()


def test_the_health_port_is_not_ready_before_the_server_is(port: HealthPort, lag: FixedLag) -> None:
    lag.is_measured = False  # type: ignore[misc]
    assert get(port, "/ready")[0] == 503 and get(port, "/health")[0] == 200


def test_connections_that_say_nothing_take_only_their_own_places(port: HealthPort) -> None:
    silent = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(MAX_CONNECTIONS)]
    with socket.create_connection(("127.0.0.1", port.port)) as refused:
        refused.settimeout(60)
        assert refused.recv(100) == b""
    for connection in silent:
        connection.close()
    while True:  # as soon as the threads have seen it
        try:
            assert get(port, "/health")[0] == 200
            break
        except (urllib.error.URLError, ConnectionError):
            continue


def test_a_server_opens_it_where_the_settings_say_so_and_answers_while_the_loop_is_blocked() -> None:
    runtime = Runtime(Settings(health_port=0))
    blocked, go_on = threading.Event(), threading.Event()

    async def serve() -> None:
        await runtime.acquire()
        blocked.set()
        go_on.wait(60)
        await runtime.release()

    with _health_port(runtime, "127.0.0.1") as port:
        assert port is not None
        loop = threading.Thread(target=asyncio.run, args=[serve()])
        loop.start()
        assert blocked.wait(60)
        assert get(port, "/health") == (200, {"status": "healthy"})
        assert get(port, "/ready") == (200, {"status": "ready"})
        go_on.set()
        loop.join()
        with pytest.raises(InvalidRequest, match="set another ERRATA_HEALTH_PORT"):
            listen_for_probes("127.0.0.1", port.port)
    with _health_port(Runtime(Settings()), "127.0.0.1") as none:
        assert none is None
