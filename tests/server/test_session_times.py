"""Times of a session's life, and its life after a crash, in virtual time on the simulated machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openenv.core.env_server.types import ConcurrencyConfig

from errata_protocol.errors import SessionExpired, SessionLost, SessionUnknown, StepTimeout
from errata_protocol.mux import ClientSession
from errata_server.doors.mux.driver import journal_sid
from errata_server.sessions.session import Request, Session
from errata_server.sessions.sessions import Sessions
from errata_server.settings import Settings
from errata_server.simulation import SimulatedMachine

from .environments import CountAction, CountEnvironment, PinnedEnvironment
from .mux_trainer import Trainer
from .simulated.server import Server

Script = Callable[[Sessions], Awaitable[None]]


def on_a_machine(
    script: Script,
    machine: SimulatedMachine | None = None,
    *,
    env: type = CountEnvironment,
    timeout_s: float | None = None,
) -> SimulatedMachine:
    """Run ``script`` on one boot of a machine with sessions of ``env``."""
    machine = machine or SimulatedMachine(1)

    async def program(machine: SimulatedMachine) -> None:
        runtime = machine.runtime(Settings(step_timeout_s=900.0, detach_ttl_s=600.0))
        await runtime.start()
        config = ConcurrencyConfig(max_concurrent_envs=2, session_timeout=timeout_s)
        sessions = Sessions(runtime, env, "e", config)
        runtime.live_sessions.add(sessions)
        await script(sessions)
        await runtime.close()

    machine.boot(program)
    return machine


async def began(sessions: Sessions) -> Session:
    session = await sessions.open(resumable=True)
    await sessions.admit(session, Request("reset", b"{}"))
    await step(sessions, session, 5)
    return session


async def step(sessions: Sessions, session: Session, n: int, do: str = "") -> bytes:
    return (await sessions.admit(session, Request("step", b"{}", action=CountAction(n=n, do=do)))).payload


def test_a_detached_session_sleeps_after_its_ttl_and_goes_on_where_it_was() -> None:
    async def script(sessions: Sessions) -> None:
        session = await began(sessions)
        sessions.lifetime.keep_idle(session)
        await asyncio.sleep(599)
        assert sessions.capacity.used == 1
        await asyncio.sleep(2)
        assert sessions.capacity.used == 0
        assert b'"n":6,' in await step(sessions, session, 1)

    on_a_machine(script)


def test_a_session_past_upstreams_timeout_is_over() -> None:
    async def script(sessions: Sessions) -> None:
        session = await began(sessions)
        sessions.lifetime.keep_idle(session)
        await asyncio.sleep(1801)
        with pytest.raises(SessionUnknown):
            await sessions.find(session.sid)

    on_a_machine(script, timeout_s=1800.0)


def test_a_step_past_the_deadline_is_rolled_back_after_exactly_that_time() -> None:
    async def script(sessions: Sessions) -> None:
        session, loop = await began(sessions), asyncio.get_running_loop()
        at = loop.time()
        with pytest.raises(StepTimeout):
            await step(sessions, session, 100, "hang")
        assert 900 <= loop.time() - at < 910
        assert b'"n":6,' in await step(sessions, session, 1)

    on_a_machine(script)


def test_after_a_crash_a_given_out_session_goes_on_and_one_without_snapshots_says_where_it_was_lost() -> None:
    for env in (CountEnvironment, PinnedEnvironment):
        kept: list[Session] = []

        async def until_the_crash(sessions: Sessions, kept: list[Session] = kept) -> None:
            kept.append(await began(sessions))
            sessions.runtime.store.journal.close()
            asyncio.get_running_loop().crash_at = 0  # type: ignore[attr-defined]
            await asyncio.sleep(1)

        async def afterwards(sessions: Sessions, kept: list[Session] = kept, env: type = env) -> None:
            if env is CountEnvironment:
                again = await sessions.find(kept[0].sid)
                assert (again.eid, again.t) == (kept[0].eid, 1)
                assert b'"n":6,' in await step(sessions, again, 1)
            else:
                with pytest.raises(SessionLost, match=rf"t=1 of episode {kept[0].eid}"):
                    await sessions.find(kept[0].sid)

        machine = on_a_machine(until_the_crash, env=env)
        assert "crash" in machine.trace[-1]
        on_a_machine(afterwards, machine, env=env)


# -- multiplexed sessions --------------------------------------------------------------------------------------------

MuxScript = Callable[[Server, Trainer], Awaitable[None]]


def multiplexed(script: MuxScript, *, timeout_s: float) -> None:
    """Run ``script`` with a trainer of a server whose sessions sleep after 3 s, and whose steps may take 5 s."""

    async def program(machine: SimulatedMachine) -> None:
        server = await Server.start(
            machine, CountEnvironment, deterministic=False, places=2, session_timeout_s=timeout_s
        )

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await server.app({**scope, "errata.principal": None}, receive, send)

        trainer = Trainer(app, chance=random.Random(1))
        await trainer.join()
        await script(server, trainer)
        if trainer._peer is not None:
            await trainer.cut()
        await server.stop()

    SimulatedMachine(1).boot(program)


def status(server: Server, session: ClientSession) -> str | None:
    row = server.runtime.store.journal.session(journal_sid(session.sid))
    return row.status if row is not None else None


async def asleep(server: Server) -> None:
    """Wait until the server has no session in memory: after 3 s."""
    await asyncio.sleep(4)
    assert not server.sessions.table.live and not server.multiplexer.driver.protocol.sessions


def test_a_multiplexed_session_that_sleeps_is_over_after_upstreams_timeout() -> None:
    async def script(server: Server, trainer: Trainer) -> None:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        await trainer.cut()
        await asleep(server)
        assert status(server, session) == "open"
        await asyncio.sleep(7)
        assert status(server, session) == "expired"
        server.check_nothing_leaked()
        await trainer.join()
        with pytest.raises(SessionExpired):
            await trainer.ask(session, "step", {"n": 1})

    multiplexed(script, timeout_s=10.0)


def test_the_timeout_of_a_multiplexed_session_counts_from_its_last_socket() -> None:
    async def script(server: Server, trainer: Trainer) -> None:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        await trainer.cut()
        await asleep(server)
        await trainer.join()
        assert (await trainer.ask(session, "step", {"n": 1})).t == 1
        await asyncio.sleep(1)
        await trainer.cut()
        await asleep(server)
        await asyncio.sleep(4)  # 13 s after it was detached for the first time, 8 after the second
        assert status(server, session) == "open"
        await trainer.join()
        await asyncio.sleep(20)  # a session with a socket does not expire
        assert (await trainer.ask(session, "step", {"n": 1})).t == 2
        await trainer.cut()
        await asyncio.sleep(11)
        assert status(server, session) == "expired"

    multiplexed(script, timeout_s=10.0)


def test_a_multiplexed_session_whose_timeout_passes_during_a_request_is_over_after_it() -> None:
    async def script(server: Server, trainer: Trainer) -> None:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        trainer.protocol.request(session, "step", b'{"do":"hang"}')
        trainer.protocol.request(session, "step", b"{}")
        trainer._flush()
        await asyncio.sleep(0.1)
        await trainer.cut()
        await asyncio.sleep(3)
        assert status(server, session) == "open"
        await asyncio.sleep(5)
        assert status(server, session) == "expired"
        rows = server.runtime.store.journal.replies(journal_sid(session.sid), 1, 9)
        assert [(row.id, row.status) for row in rows] == [(1, "ok"), (2, "TIMEOUT"), (3, "ok")], "all were answered"
        server.check_nothing_leaked()

    multiplexed(script, timeout_s=2.0)
