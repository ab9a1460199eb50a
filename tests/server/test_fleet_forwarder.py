"""How long a worker waits for another one that it has sent a request on to (`errata_server.fleet.forwarder`)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from errata_server.fleet import forwarder as forwarders
from errata_server.fleet.board import Phase
from errata_server.fleet.forwarder import ASK_S, LOOK_S, Forwarder
from errata_server.fleet.member import Member

NAMES = ("a" * 12, "b" * 12)


class _Other:
    """A worker that answers at a look, and whose event loop has not run for a time."""

    def __init__(self, answers_at: int | None, silent_s: float) -> None:
        self.looks = 0
        self._answers_at = answers_at
        self._silent_s = silent_s
        self._answer = asyncio.Event()

    def silent_s(self, worker: int) -> float:
        assert worker == 1
        return self._silent_s

    def is_drained(self, worker: int) -> bool:
        return False

    def phase(self, worker: int) -> Phase:
        return Phase.SERVES

    async def wait(self, tasks: set[Any], *, timeout: float) -> tuple[set[Any], set[Any]]:
        """Stand in for `asyncio.wait`: time passes at once."""
        assert timeout == LOOK_S
        self.looks += 1
        if self.looks == self._answers_at:
            self._answer.set()
            await asyncio.gather(*tasks)
            return tasks, set()
        await asyncio.sleep(0)
        return set(), tasks

    async def handle(self, _: httpx.Request) -> httpx.Response:
        await self._answer.wait()
        return httpx.Response(200, stream=httpx.ByteStream(b'{"whose":"b"}'))


async def _asked(other: _Other, monkeypatch: pytest.MonkeyPatch) -> tuple[int, bytes]:
    monkeypatch.setattr(forwarders.asyncio, "wait", other.wait)
    client = httpx.AsyncClient(transport=httpx.MockTransport(other.handle), base_url="http://fleet")
    member = Member(SimpleNamespace(names=NAMES, board=other), 0)  # type: ignore[arg-type]
    monkeypatch.setattr(member, "client", lambda _: client)
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("it is another worker's")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    path = f"/episodes/ep_sh-{NAMES[1]}-{'x' * 22}/replay"
    scope: Scope = {
        "type": "http",
        "asgi": {"spec_version": "2.4"},
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    await Forwarder(app, member=member)(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def test_a_worker_that_runs_may_take_as_long_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    other = _Other(answers_at=10 * int(ASK_S / LOOK_S), silent_s=0.0)
    assert await _asked(other, monkeypatch) == (200, b'{"whose":"b"}')


async def test_a_worker_that_starts_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    other = _Other(answers_at=int(ASK_S / LOOK_S) - 1, silent_s=1e6)
    assert await _asked(other, monkeypatch) == (200, b'{"whose":"b"}')


async def test_a_worker_whose_event_loop_stands_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    other = _Other(answers_at=None, silent_s=ASK_S)
    status, body = await _asked(other, monkeypatch)
    assert status == 503 and b"JOURNAL_UNAVAILABLE" in body and other.looks == int(ASK_S / LOOK_S)
