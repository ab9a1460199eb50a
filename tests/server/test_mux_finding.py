"""Sessions that are looked up in the journal for a multiplexed socket while something happens to them (PROTOCOL D7)."""

from __future__ import annotations

import asyncio
import threading

import pytest

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import ErrataError
from errata_server.app import create_fastapi_app
from errata_server.journal import MemoryJournal
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

from .asgi_peer import Peer
from .conftest import simulated
from .environments import CountAction, CountEnvironment, CountObservation
from .test_mux_door import joined, n_of


class _HeldJournal(MemoryJournal):
    """Its reads take time: one of a session's last number comes back when the test says so."""

    blocking = True

    def __init__(self) -> None:
        super().__init__()
        self.hold = False
        self.was_read, self.goes_on = threading.Event(), threading.Event()

    def last_seq(self, sid: str) -> int:
        seq = super().last_seq(sid)
        if self.hold:
            self.hold = False
            self.was_read.set()
            assert self.goes_on.wait(60)
        return seq


async def test_a_reward_that_comes_while_its_session_is_looked_up_is_pushed() -> None:
    journal = _HeldJournal()
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, runtime=Runtime(Settings(detach_ttl_s=0.0), journal=journal)
    )
    async with joined(app) as trainer:
        opened = await trainer.open()
        reset = await trainer.ask(opened, "reset")
        await trainer.cut()
        async with asyncio.timeout(60):
            while app.state.errata.sessions.table.live:  # noqa: ASYNC110 - it falls asleep, and nobody is told
                await asyncio.sleep(0.01)
        journal.hold = True
        await trainer.join()
        assert await asyncio.to_thread(journal.was_read.wait, 10)
        row = await app.state.errata.runtime.rewards.post(reset.eid, 0, 1.0, "judge", "r", None)
        journal.goes_on.set()
        await trainer.ask(opened, "step", {"n": 1})
        assert row.seq == 1 and [push["reward_id"] for push in trainer.pushed] == ["r"]


async def test_a_lookup_that_fails_tells_the_client_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = simulated()
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, runtime=runtime)

    def fail(sid: str) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(runtime.store.journal, "session", fail)
    async with Peer(app, subprotocols=(PROTOCOL_NAME,)) as peer:
        reply = await peer.ask({"type": "resume", "data": [{"sid": "a" * 22, "key": "b" * 22, "last": 0}]})
    assert reply is not None and reply["type"] == "error"
    assert (reply["data"]["code"], reply["data"]["retry_after"]) == ("JOURNAL_UNAVAILABLE", 1.0)


class _MadeOnce(CountEnvironment):
    """Its factory fails from the second time on, until it is mended."""

    mended = False

    def __init__(self) -> None:
        super().__init__()
        if type(self).made > 1 and not type(self).mended:
            raise OSError("the machine is gone")


async def test_an_open_that_comes_again_finds_its_session_though_no_environment_can_be_made() -> None:
    made = type("Made", (_MadeOnce,), {"made": 0})
    app = create_fastapi_app(made, CountAction, CountObservation, runtime=Runtime(Settings(detach_ttl_s=0.0)))
    async with joined(app) as before:
        assert n_of(await before.ask(await before.open(), "reset")) == 0
        await before.cut()
        async with asyncio.timeout(60):
            while app.state.errata.sessions.table.live:  # noqa: ASYNC110 - it falls asleep, and nobody is told
                await asyncio.sleep(0.01)
    async with joined(app) as again:  # with the same secrets: as one that never heard of its open
        session = await again.open()
        assert session.eid is not None and session.t == 0
        assert n_of(await again.ask(session, "reset")) == 0, "what was recorded"
        made.mended = True  # type: ignore[attr-defined]
        assert n_of(await again.ask(session, "step", {"n": 5})) == 5
    made.mended = False  # type: ignore[attr-defined]
    async with joined(app, seed=1) as other:
        with pytest.raises(ErrataError, match="the machine is gone"):
            await other.open()
