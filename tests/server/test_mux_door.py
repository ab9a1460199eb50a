"""Multiplexed sessions through ``/ws`` of a real application (PROTOCOL D)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server.interfaces import Environment
from pydantic import SecretStr

from errata_protocol.errors import (
    EnvironmentFailed,
    EnvironmentOutputInvalid,
    ErrataError,
    InvalidRequest,
    JournalUnavailable,
    NotSupported,
    PreconditionFailed,
    SandboxFailed,
    SessionClosed,
    SessionLost,
    SessionUnknown,
    StateOutOfRange,
    StepTimeout,
    UnknownEpisode,
)
from errata_server.app import create_fastapi_app
from errata_server.doors.mux import reads
from errata_server.doors.mux.driver import journal_sid
from errata_server.doors.mux.socket import READS_AT_ONCE
from errata_server.runtime.retention_clock import EVERY_S
from errata_server.runtime.runtime import Runtime
from errata_server.runtime.store import Store
from errata_server.sessions.execution import Execution
from errata_server.settings import Settings
from tests.garbage import no_collections

from .asgi_peer import Peer
from .conftest import simulated, until
from .environments import CountAction, CountEnvironment, CountObservation
from .mux_trainer import Trainer
from .repeatable import DiceEnvironment, UndeclaredEnvironment

Join = Callable[..., AbstractAsyncContextManager[Trainer]]


def application(runtime: Runtime | None = None, *, places: int = 8, **more: Any) -> FastAPI:
    return create_fastapi_app(
        CountEnvironment,
        CountAction,
        CountObservation,
        max_concurrent_envs=places,
        runtime=runtime or simulated(Settings(journal_wait_s=0.3)),
        **more,
    )


def _with(environment: type[Environment[Any, Any, Any]]) -> FastAPI:
    """Return an application of another environment, whose sessions soon fall asleep when they are detached."""
    runtime = simulated(Settings(detach_ttl_s=0.05))
    return create_fastapi_app(environment, CountAction, CountObservation, max_concurrent_envs=8, runtime=runtime)


async def _asleep(app: FastAPI) -> None:
    """Wait until no session is in memory."""
    await until(lambda: not app.state.errata.sessions.table.live)


@contextlib.asynccontextmanager
async def joined(app: FastAPI, path: str = "/ws", seed: int = 0, **more: Any) -> AsyncIterator[Trainer]:
    trainer = Trainer(app, path, chance=random.Random(seed), **more)
    await trainer.join()
    yield trainer
    if trainer._peer is not None:
        await trainer.cut()


def n_of(reply: Any) -> int:
    return int(json.loads(reply.payload)["observation"]["n"])


async def test_sessions_of_one_socket_do_not_meet() -> None:
    async with joined(application()) as trainer:
        first, second = await trainer.open(), await trainer.open()
        for session in (first, second):
            assert (await trainer.ask(session, "reset")).t == 0
        for n in (1, 2, 3):
            reply = await trainer.ask(first, "step", {"n": 10})
            assert (reply.t, n_of(reply), reply.id) == (n, 10 * n, n + 1)
        reply = await trainer.ask(second, "step", {"n": 1})
        assert (reply.t, n_of(reply)) == (1, 1)
        assert reply.digest == f"sha256:{hashlib.sha256(reply.payload).hexdigest()}"


async def test_state_at_t_is_the_payload_as_it_was_sent() -> None:
    app = application()
    async with joined(app) as trainer:
        session = await trainer.open()
        replies = [await trainer.ask(session, "reset")] + [await trainer.ask(session, "step") for _ in range(3)]
        for reply in replies:
            found = await trainer.read("state", session, {"t": reply.t})
            assert (found.type, found.payload, found.digest, found.eid) == (
                "state_at",
                reply.payload,
                reply.digest,
                reply.eid,
            )
        own = await trainer.read("state", session)
        assert own.type == "state" and json.loads(own.payload)["step_count"] == 3
        capabilities = json.loads((await trainer.read("capabilities")).payload)
        assert capabilities["extensions"]["mux"] == 1 and capabilities["recovery"] == "snapshot"
        assert json.loads((await trainer.read("rewards", session)).payload) == []
        eid = replies[0].eid
    with TestClient(app) as client:
        assert client.get(f"/episodes/{eid}/states/2").content == replies[2].payload


async def test_a_cut_socket_loses_and_repeats_nothing() -> None:
    async with joined(application()) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        later = [trainer.ask_later(session, "step", {"n": 1}) for _ in range(12)]
        await asyncio.sleep(0)
        for _ in range(3):
            await trainer.cut()
            await trainer.join()
        replies = [await reply for reply in later]
        assert [n_of(r) for r in replies] == list(range(1, 13))
        assert [r.t for r in replies] == list(range(1, 13))


@pytest.mark.parametrize(
    ("first", "equal", "others"),
    [
        ('{"a":1, "b":2}', '{"b":2,"a":1.0}', ['{"a":1}', '{"a":1,"b":2,"seed":5}', '{"a":1,"b":2,"seed":null}']),
        ('{"a":1,"seed":5 }', '{"seed": 5, "a": 1}', ['{"a":1}', '{"a":1,"seed":6}']),
        ('{"episode_id":"mine","a":1}', '{"a":1,"episode_id":"mine"}', ['{"a":1}', '{"a":1,"episode_id":"yours"}']),
        ('{"episode_id":"mine","seed":5}', '{"seed":5,"episode_id":"mine"}', ["{}", '{"seed":5}']),
        ("{}", "{ }", ['{"a":1}', '{"seed":null}']),
        ("{ }", "{}", ['{"a":1}']),
    ],
)
async def test_d4_a_reset_in_another_form_is_the_same_where_the_server_drew_its_seed(
    first: str, equal: str, others: list[str]
) -> None:
    app = create_fastapi_app(
        DiceEnvironment, CountAction, CountObservation, max_concurrent_envs=8, runtime=simulated(Settings())
    )
    async with Peer(app, subprotocols=("openenv.mux.v1",)) as peer:
        sid = "Zq3vK8s0T1u5Wb7Yc9Xd2A"
        opened = await peer.ask(f'{{"sid":"{sid}","type":"open","data":{{"key":"n4Jr6Lm8Po0Qs2Tu4Vw6Xy"}}}}')
        assert opened is not None and opened["type"] == "opened"

        async def reset(data: str) -> Any:
            return await peer.ask(f'{{"sid":"{sid}","id":1,"type":"reset","data":{data}}}')

        reply = await reset(first)
        assert reply["t"] == 0
        for again in (first, equal):
            assert await reset(again) == reply
        for other in others:
            assert (await reset(other))["data"]["code"] == "CONFLICT"
        row = app.state.errata.runtime.store.journal.replies(journal_sid(sid), 1, 1)[0]
        assert json.loads(row.request).items() >= {"seed": DiceEnvironment.seeds[-1], **json.loads(first)}.items()


async def test_an_environments_errors_are_recorded_replies() -> None:
    async with joined(application()) as trainer:
        session = await trainer.open()
        with pytest.raises(InvalidRequest):
            await trainer.ask(session, "step", {"n": "many"})  # before any episode
        await trainer.ask(session, "reset")
        with pytest.raises(EnvironmentFailed, match="boom"):
            await trainer.ask(session, "step", {"do": "raise"})
        with pytest.raises(InvalidRequest):
            await trainer.ask(session, "step", {"m": 1})
        with pytest.raises(SandboxFailed):
            await trainer.ask(session, "step", {"do": "break"})
        with pytest.raises(EnvironmentOutputInvalid, match="NaN"):
            await trainer.ask(session, "step", {"do": "nan"})
        reply = await trainer.ask(session, "step")
        assert (reply.t, reply.id) == (1, 7)
        for data in ('{"n":1,"n":2}', '{"n":1e400}', "[]"):
            request = trainer.protocol.request(session, "step", data.encode())
            with pytest.raises(InvalidRequest):
                await trainer._outcome(request)
        await trainer.cut()
        await trainer.join()
        assert (await trainer.ask(session, "step")).t == 2


async def test_a_step_past_its_own_deadline_is_rolled_back() -> None:
    async with joined(application()) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        await trainer.ask(session, "step")
        with pytest.raises(StepTimeout):
            await trainer.ask(session, "step", {"n": 100, "do": "hang"}, deadline_ms=50)
        assert n_of(await trainer.ask(session, "step")) == 2


async def test_a_condition_that_does_not_hold_has_no_effect() -> None:
    async with joined(application()) as trainer:
        session = await trainer.open()
        reset = await trainer.ask(session, "reset")
        await trainer.ask(session, "step", condition=(0, reset.eid))
        with pytest.raises(PreconditionFailed) as caught:
            await trainer.ask(session, "step", condition=(0, reset.eid))
        assert caught.value.details["t"] == 1
        assert (await trainer.ask(session, "step", condition=(1, None))).t == 2


async def test_a_fork_goes_on_from_where_its_parent_was() -> None:
    async with joined(application()) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        at = {t: await trainer.ask(session, "step", {"n": 5}) for t in (1, 2, 3)}
        child = await trainer.fork(session, 1)
        found = await trainer.read("state", child, {"t": 0})
        assert found.payload == at[1].payload and found.kind == "reset"
        assert n_of(await trainer.ask(child, "step", {"n": 1})) == 6
        assert n_of(await trainer.ask(session, "step", {"n": 1})) == 16
        with pytest.raises(StateOutOfRange):
            await trainer.fork(session, 9)
        assert n_of(await trainer.ask(session, "step", {"n": 1})) == 17


async def test_a_fork_whose_child_has_a_taken_sid_is_refused_in_words_and_under_its_id() -> None:
    runtime = simulated(Settings(journal_wait_s=0.3, token=SecretStr("owner,foe")))
    app = application(runtime)
    async with (
        joined(app, headers={"authorization": "Bearer owner"}) as owner,
        joined(app, seed=1, headers={"authorization": "Bearer foe"}) as foe,
    ):
        foreign, session = await foe.open(), await owner.open()
        await owner.ask(session, "reset")
        child = await owner.fork(session, 0)
        told: set[str] = set()
        for taken in (session, foreign, child):
            fork = {"t": 0, "child": {"sid": taken.sid, "key": taken.key}}
            refused = owner.protocol.request(session, "fork", json.dumps(fork).encode())
            behind = owner.ask_later(session, "step", {"n": 1})
            with pytest.raises(InvalidRequest, match="taken: pick another sid and key") as caught:
                await owner._outcome(refused)
            told.add(caught.value.message)
            await behind
        assert len(told) == 1, "a foreign session is not told from one's own"
        assert session.t == 3 and (await owner.ask(child, "step")).t == 1
        rows = runtime.store.journal.replies(journal_sid(session.sid), 1, 99)
        assert [(row.kind, row.status) for row in rows[2:4]] == [("fork", "VALIDATION_ERROR"), ("step", "ok")]


async def test_a_reset_to_a_state_goes_on_from_there() -> None:
    async with joined(application()) as trainer:
        session = await trainer.open()
        first = await trainer.ask(session, "reset")
        at = [await trainer.ask(session, "step", {"n": 5}) for _ in range(3)]
        again = await trainer.ask(session, "reset", {"injected_state": {"episode_id": first.eid, "t": 2}})
        assert (again.payload, again.t) == (at[1].payload, 0) and again.eid != first.eid
        reply = await trainer.ask(session, "step", {"n": 1})
        assert (n_of(reply), reply.t, reply.eid) == (11, 1, again.eid)
        await trainer.cut()
        await trainer.join()
        assert n_of(await trainer.ask(session, "step", {"n": 1})) == 12


async def test_a_reset_takes_no_state_of_another_environment_of_the_server() -> None:
    runtime = simulated(Settings(journal_wait_s=0.3))
    here, there = (application(runtime, env_name=name) for name in ("here", "there"))
    async with joined(here) as trainer, joined(there, seed=1) as other:
        foreign = await other.ask(await other.open(), "reset")
        session = await trainer.open()
        first = await trainer.ask(session, "reset")
        with pytest.raises(UnknownEpisode):
            await trainer.ask(session, "reset", {"injected_state": {"episode_id": foreign.eid, "t": 0}})
        reply = await trainer.ask(session, "step")
        assert (reply.eid, reply.t) == (first.eid, 1)


async def test_a_session_that_is_closed_meanwhile_is_reset_to_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = simulated(Settings(journal_wait_s=0.3))
    parent_of = Store.owned_parent

    async def parent(self: Store, *given: Any) -> Any:
        found = await parent_of(self, *given)
        await runtime.live_sessions.end(found.row.sid)  # its episode is deleted by somebody else, for example
        return found

    async with joined(application(runtime)) as trainer:
        session = await trainer.open()
        first = await trainer.ask(session, "reset")
        episodes = len(runtime.store.journal.episodes(limit=9, principal=None)[0])
        monkeypatch.setattr(Store, "owned_parent", parent)
        with pytest.raises((SessionClosed, SessionUnknown)):
            await trainer.ask(session, "reset", {"injected_state": {"episode_id": first.eid, "t": 0}})
        assert len(runtime.store.journal.episodes(limit=9, principal=None)[0]) == episodes, "no episode was begun"


async def test_reads_that_wait_for_a_step_hold_up_no_others() -> None:
    async with joined(application(places=16)) as trainer:
        slow = [await trainer.open() for _ in range(READS_AT_ONCE + 1)]
        for session in slow:
            await trainer.ask(session, "reset")
            trainer.protocol.request(session, "step", b'{"do":"hang"}')
            trainer.protocol.read("state", session)
        quick = await trainer.open()
        reset = await trainer.ask(quick, "reset")
        assert (await trainer.read("state", quick, {"t": 0})).payload == reset.payload


async def test_a_session_whose_socket_left_before_it_was_open_makes_room_for_others() -> None:
    gate = threading.Event()

    class Slow(CountEnvironment):
        def __init__(self) -> None:
            super().__init__()
            gate.wait(60)

    app = create_fastapi_app(
        Slow, CountAction, CountObservation, max_concurrent_envs=1, runtime=Runtime(Settings(journal_wait_s=0.3))
    )
    async with joined(app) as gone, joined(app, seed=1) as other:
        gone.protocol.open(gone.secret(), gone.secret())
        gone._flush()
        await asyncio.sleep(0.05)
        await gone.cut()
        gate.set()
        opened = asyncio.ensure_future(other.open())
        for _ in range(200):
            await asyncio.sleep(0.01)
            await other.tick()
            if opened.done():
                break
        session = await opened
        assert (await other.ask(session, "reset")).t == 0


async def test_opens_let_old_episodes_go() -> None:
    app = application(simulated(Settings(journal_wait_s=0.3, retention_days=0)))
    runtime = app.state.errata.runtime
    async with joined(app) as trainer:
        session = await trainer.open()
        old = await trainer.ask(session, "reset")
        await trainer.ask(session, "close")
        runtime.retention_clock._last -= EVERY_S
        await trainer.open()
        for _ in range(200):
            if runtime.store.journal.episode(old.eid) is None:
                return
            await asyncio.sleep(0.01)
    raise AssertionError("nothing was deleted")


async def test_a_key_that_is_not_the_sessions_gets_nothing_and_learns_nothing() -> None:
    app = application()
    async with joined(app) as owner, joined(app, seed=1) as thief:
        session = await owner.open()
        await owner.ask(session, "reset")
        told = []
        for sid in (session.sid, thief.secret()):
            stolen = thief.protocol.adopt(sid, thief.secret(), last=0, last_seq=0)
            with pytest.raises(SessionLost) as caught:
                await thief._outcome(("opened", sid))
            told.append((caught.value.message, caught.value.details))
            assert stolen.eid is None
        assert told[0] == told[1]
        opened = thief.protocol.open(session.sid, thief.secret())
        with pytest.raises(SessionLost) as caught:
            await thief._outcome(("opened", opened.sid))
        assert (caught.value.message, caught.value.details) == told[0]
        with contextlib.suppress(ErrataError):
            async with Peer(app, query=f"session_id=mux.{session.sid}") as plain:
                answer = await plain.receive()
                assert answer is not None and answer["data"]["code"] == "SESSION_ERROR"
        assert (await owner.ask(session, "step")).t == 1


async def test_a_closed_session_stays_closed() -> None:
    async with joined(application()) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        reply = await trainer.ask(session, "close")
        assert reply.type == "closed"
        again = trainer.protocol.adopt(session.sid, session.key, last=1, last_seq=0)
        with pytest.raises(SessionClosed):
            await trainer._outcome(("opened", again.sid))


@pytest.mark.parametrize("attached", [True, False])
async def test_a_session_ends_with_its_current_episode(attached: bool) -> None:
    app = application()
    errata = app.state.errata
    async with joined(app) as trainer:
        session, other = await trainer.open(), await trainer.open()
        reset = await trainer.ask(session, "reset")
        await trainer.ask(other, "reset")
        if not attached:
            await trainer.cut()
        assert await errata.episodes.deletion.delete(reset.eid, None) == 1
        assert errata.multiplexer.driver.protocol.session(session.sid) is None
        if not attached:
            await trainer.join()
        await until(lambda: session.sid in trainer.ends)  # without a request of its client
        assert isinstance(trainer.ends.pop(session.sid), SessionClosed) and not trainer.ends
        trainer.protocol.adopt(session.sid, session.key, last=1, last_seq=0)
        with pytest.raises(SessionClosed):
            await trainer._outcome(("opened", session.sid))
        assert (await trainer.ask(other, "step")).t == 1


async def test_a_plain_session_ends_no_multiplexed_one_that_has_its_id_as_sid() -> None:
    app = application()
    errata = app.state.errata
    async with joined(app) as trainer:
        plain = await errata.sessions.open(resumable=True)
        session = trainer.protocol.open(plain.sid, trainer.secret())
        await trainer._outcome(("opened", session.sid))
        await errata.runtime.live_sessions.end(plain.sid)
        assert (await trainer.ask(session, "reset")).t == 0 and not trainer.ends


async def test_a_group_is_closed_whole_and_no_other() -> None:
    async with joined(application()) as trainer:
        group = trainer.secret()
        mine = [await trainer.open(group) for _ in range(3)]
        other = await trainer.open(trainer.secret())
        for session in (*mine, other):
            await trainer.ask(session, "reset")
        answer = await trainer.read("close_group", None, {"group": group})
        assert (answer.type, json.loads(answer.payload)) == ("group_closed", {"closed": 3})
        assert all(isinstance(trainer.ends[s.sid], SessionClosed) for s in mine)
        assert (await trainer.ask(other, "step")).t == 1
        assert json.loads((await trainer.read("close_group", None, {"group": group})).payload) == {"closed": 0}


async def test_production_mode_carries_sessions_and_shows_no_past() -> None:
    async with joined(application(mode="production")) as trainer:
        session = await trainer.open()
        reset = await trainer.ask(session, "reset")
        await trainer.ask(session, "step")
        with pytest.raises(NotSupported):
            await trainer.read("state", session, {"t": 0})
        with pytest.raises(NotSupported):
            await trainer.fork(session, 0)
        injected = {"injected_state": {"episode_id": reset.eid, "t": 0}}
        assert n_of(await trainer.ask(session, "reset", injected)) == 0  # the environment ignores it
        await trainer.cut()
        await trainer.join()
        assert (await trainer.ask(session, "step")).t == 1


async def test_detached_sessions_make_room_before_any_is_refused() -> None:
    app = application(places=2)
    async with joined(app) as trainer:
        first, second = await trainer.open(), await trainer.open()
        for session in (first, second):
            await trainer.ask(session, "reset")
            await trainer.ask(session, "step", {"n": 3})
        await trainer.cut()
        async with joined(app, seed=1) as other:
            third = await other.open()
            await other.ask(third, "reset")
            await trainer.join()
            await trainer.ask(second, "step")  # was kept
            waiting = trainer.ask_later(first, "step")
            await trainer.refused.wait()
            assert trainer.refusals[0].code == "CAPACITY_REACHED" and trainer.refusals[0].details["retry_after"] > 0
            await other.ask(third, "close")
            await asyncio.sleep(0.05)
            await trainer.tick()
            assert n_of(await waiting) == 4


async def test_a_detached_session_falls_asleep_and_wakes_where_it_was() -> None:
    app = application(simulated(Settings(detach_ttl_s=0.05)))
    async with joined(app) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        await trainer.ask(session, "step", {"n": 7})
        await trainer.cut()
        sessions = app.state.errata.sessions
        for _ in range(1000):
            if not sessions.table.live:
                break
            await asyncio.sleep(0.01)
        assert sessions.capacity.used == 0 and not sessions.table.live
        await trainer.join()
        assert n_of(await trainer.ask(session, "step", {"n": 1})) == 8


class _FailsToWake(DiceEnvironment):
    broken = False

    def __init__(self) -> None:
        if self.broken:
            raise OSError("the task server is gone")
        super().__init__()


async def test_a_request_whose_session_cannot_be_woken_is_refused_and_runs_once_when_it_can_be() -> None:
    environment = type("FailsToWake", (_FailsToWake,), {"broken": False})
    app = _with(environment)
    journal = app.state.errata.runtime.store.journal
    async with joined(app) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        await trainer.ask(session, "step", {"n": 7})
        await trainer.cut()
        await _asleep(app)
        environment.broken = True  # type: ignore[attr-defined]
        await trainer.join()
        later = trainer.ask_later(session, "step", {"n": 1})
        await asyncio.wait_for(trainer.refused.wait(), 60)
        (refusal,) = trainer.refusals
        assert refusal.code == "OVERLOADED" and "the task server is gone" in refusal.message
        assert [row.id for row in journal.replies(journal_sid(session.sid), 1, 9)] == [1, 2]
        environment.broken = False  # type: ignore[attr-defined]
        await trainer.tick()
        assert ((await later).t, n_of(await later)) == (2, 8)
        await trainer.cut()
        await _asleep(app)
        await trainer.join()
        assert n_of(await trainer.ask(session, "step", {"n": 1})) == 9


@pytest.mark.parametrize(("environment", "n"), [(DiceEnvironment, 8), (UndeclaredEnvironment, 9)])
async def test_a_defect_of_the_server_is_refused_where_the_step_can_be_taken_back(
    environment: type[Environment[Any, Any, Any]], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = _with(environment)
    run = Execution.run

    def fails_afterwards(*given: Any) -> Any:
        yield from run(*given)
        raise KeyError("a defect")

    async with joined(app) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        await trainer.ask(session, "step", {"n": 7})
        with monkeypatch.context() as broken:
            broken.setattr(Execution, "run", fails_afterwards)
            later = trainer.ask_later(session, "step", {"n": 1})
            if environment is UndeclaredEnvironment:
                with pytest.raises(EnvironmentFailed, match="a defect"):
                    await later
            else:
                await asyncio.wait_for(trainer.refused.wait(), 60)
                assert [error.code for error in trainer.refusals] == ["OVERLOADED"]
        if environment is DiceEnvironment:
            await trainer.tick()
            assert n_of(await later) == n
        else:
            assert n_of(await trainer.ask(session, "step", {"n": 1})) == n


class _SeededFirst(DiceEnvironment):
    """Its reset seeds its generator before it looks for its task."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CountObservation:
        self._dice = random.Random(seed)
        return super().reset(seed, episode_id, **kwargs)


async def test_a_reset_that_failed_is_run_again_with_the_seed_that_the_server_drew() -> None:
    app = _with(_SeededFirst)
    async with joined(app) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        with pytest.raises(EnvironmentFailed, match="no such task"):
            await trainer.ask(session, "reset", {"do": "raise"})
        step = await trainer.ask(session, "step", {"n": 1})
        _, failed = app.state.errata.runtime.store.journal.recorded(step.eid, 0)
        assert {"do", "seed", "episode_id"} <= json.loads(failed.request).keys()
        assert failed.request_sha == hashlib.sha256(b'{"do": "raise"}').digest()
        await trainer.cut()
        await _asleep(app)
        await trainer.join()
        assert n_of(await trainer.ask(session, "step", {"n": 1})) == 1002


def test_a_time_that_has_passed_is_waited_for_on_the_loop_of_the_server_too() -> None:
    """Uvloop answers such a call with a handle that does not know its time."""

    async def leave_at_once() -> None:
        driver = application(simulated(Settings(detach_ttl_s=0.0))).state.errata.multiplexer.driver
        driver.move_to(asyncio.get_running_loop())
        driver.protocol.next_timer = lambda: driver.now() - 1.0
        driver.perform([])
        driver.perform([])

    loop = uvloop.new_event_loop()
    loop.run_until_complete(leave_at_once())
    loop.close()


async def test_sessions_of_a_server_that_is_gone_go_on_at_the_next_one(tmp_path: Path) -> None:
    def runtime() -> Runtime:
        return Runtime(Settings(data_dir=tmp_path, sandbox="fake"))

    first = runtime()
    trainer = Trainer(application(first), chance=random.Random(0))
    await trainer.join()
    session = await trainer.open()
    never_stepped = await trainer.open()
    await trainer.ask(session, "reset")
    await trainer.ask(session, "step", {"n": 2})
    later = [trainer.ask_later(session, "step", {"n": 1}) for _ in range(5)]
    await trainer.cut()
    await first.close()
    second = runtime()
    trainer._app = application(second)
    try:
        await trainer.join()
        assert [n_of(await reply) for reply in later] == [3, 4, 5, 6, 7]
        assert n_of(await trainer.ask(session, "step", {"n": 1})) == 8
        assert (await trainer.ask(never_stepped, "reset")).t == 0
        await trainer.cut()
    finally:
        await second.close()


@pytest.mark.parametrize("failure", [JournalUnavailable("too many open files", retry_after=1.0), OSError(24, "EMFILE")])
async def test_a_failed_read_of_what_was_missed_is_repeated(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(reads, "READ_AGAIN_S", 0.01)
    app = application()
    store = app.state.errata.runtime.store
    failures: Counter[str] = Counter()

    def failing_twice(name: str) -> None:
        real = getattr(store, name)

        async def read(*where: Any) -> Any:
            failures[name] += 1
            if failures[name] <= 2:
                raise failure
            return await real(*where)

        monkeypatch.setattr(store, name, read)

    async with joined(app) as trainer:
        session = await trainer.open()
        reset = await trainer.ask(session, "reset")
        later = [trainer.ask_later(session, "step", {"n": 1}) for _ in range(6)]
        await asyncio.sleep(0)
        await trainer.cut()
        await until(lambda: app.state.errata.multiplexer.driver.protocol.session(session.sid).last_done == 7)
        await app.state.errata.runtime.rewards.post(reset.eid, 1, 0.5, "judge", "a", None)
        failing_twice("replies")
        failing_twice("pushes")
        await trainer.join()
        assert [n_of(await reply) for reply in later] == list(range(1, 7))
        assert n_of(await trainer.ask(session, "step", {"n": 1})) == 7
        await until(lambda: len(trainer.pushed) == 1)
        assert failures["replies"] >= 3 and failures["pushes"] == 3


async def test_a_read_that_goes_on_failing_ends_with_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "READ_AGAIN_S", 0.01)
    app = application()
    driver = app.state.errata.multiplexer.driver
    asked: list[int] = []

    async def read(sid: str, first: int, last: int) -> Any:
        asked.append(first)
        raise JournalUnavailable("too many open files", retry_after=1.0)

    async with joined(app) as trainer:
        session = await trainer.open()
        for _ in range(3):
            await trainer.ask(session, "step" if session.t is not None else "reset")
        monkeypatch.setattr(app.state.errata.runtime.store, "replies", read)
        assert trainer._peer is not None
        trainer._peer.send(json.dumps({"sid": session.sid, "id": 1, "type": "reset", "data": {}}))  # a repeat
        await until(lambda: len(asked) > 2)
        await trainer.cut()
        await until(lambda: not driver._tasks)


async def test_late_rewards_are_pushed_once_in_order_and_again_after_a_cut() -> None:
    app = application()
    async with joined(app) as trainer:
        session = await trainer.open()
        reset = await trainer.ask(session, "reset")
        await trainer.ask(session, "step")
        rewards = app.state.errata.runtime.rewards
        for n in range(3):
            await rewards.post(reset.eid, 1, n / 2, "judge", f"a{n}", None)
        await trainer.ask(session, "step")
        assert [(p["value"], p["reward_id"]) for p in trainer.pushed] == [(0.0, "a0"), (0.5, "a1"), (1.0, "a2")]
        await trainer.cut()
        await rewards.post(reset.eid, 0, -1.0, "judge", "b", None)
        await trainer.join()
        await trainer.ask(session, "step")
        assert [p["reward_id"] for p in trainer.pushed] == ["a0", "a1", "a2", "b"]
        listed = json.loads((await trainer.read("rewards", session)).payload)
        assert [r["reward_id"] for r in listed] == ["a0", "a1", "a2", "b"]
        other = await trainer.open()
        listed = json.loads((await trainer.read("rewards", other, {"eid": reset.eid})).payload)
        assert [r["reward_id"] for r in listed] == ["a0", "a1", "a2", "b"], (
            "as on the HTTP door: whose episode it is decides"
        )
        with pytest.raises(UnknownEpisode):
            await trainer.read("rewards", other, {"eid": "ep_nobody"})


async def test_a_server_that_stops_answers_what_runs_and_sends_its_clients_to_the_next(tmp_path: Path) -> None:
    def runtime() -> Runtime:
        return Runtime(Settings(data_dir=tmp_path, sandbox="fake"))

    first = runtime()
    async with joined(application(first)) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        later = [trainer.ask_later(session, "step", {"n": 1}) for _ in range(10)]
        await asyncio.sleep(0.01)
        await first.shutdown.drain(10.0)
        assert [n_of(await reply) for reply in later] == list(range(1, 11))
        assert trainer.sent_away and trainer.sent_away[0] > 0
        waiting = trainer.ask_later(session, "step", {"n": 1})
        await trainer.cut()
        await first.close()
        second = runtime()
        trainer._app = application(second)
        await trainer.join()
        assert n_of(await waiting) == 11
        await trainer.cut()
        await second.close()


async def test_a_server_that_stops_waits_no_longer_than_it_was_told() -> None:
    app = application()
    async with joined(app) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        hanging = trainer.ask_later(session, "step", {"do": "hang"})
        await asyncio.sleep(0.05)
        await app.state.errata.runtime.shutdown.drain(0.2)
        assert not hanging.done()  # the step goes on and on
        hanging.cancel()


async def test_a_client_that_reads_nothing_fills_no_memory_and_misses_nothing() -> None:
    """Large replies wait in the journal, and other sockets are served meanwhile."""

    class Large(CountEnvironment):
        async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
            done = await super().step_async(action)
            return CountObservation(n=done.n, text="x" * 1_000_000)

    app = create_fastapi_app(
        Large, CountAction, CountObservation, max_concurrent_envs=8, runtime=simulated(Settings(journal_wait_s=0.3))
    )
    async with joined(app) as trainer, joined(app, seed=1) as other:
        sessions = [await trainer.open() for _ in range(4)]
        for session in sessions:
            await trainer.ask(session, "reset")
        peer = trainer._peer
        assert peer is not None
        full, deaf = asyncio.Event(), asyncio.Event()

        async def unread(message: dict[str, Any]) -> None:
            full.set()
            await deaf.wait()
            await peer.got.put(message)

        websocket = _socket_of(app, 0)
        websocket._send = unread
        later = [trainer.ask_later(session, "step", {"n": 1}) for _ in range(12) for session in sessions]
        await full.wait()
        neighbour = await other.open()
        await other.ask(neighbour, "reset")
        for _ in range(3):
            await other.ask(neighbour, "step")
        held = max(c.outbox.buffered for c in app.state.errata.multiplexer.connections)
        assert 4_000_000 < held < 6_000_000, "48 replies of 1 MB were made"
        deaf.set()
        assert [n_of(await reply) for reply in later] == [n for n in range(1, 13) for _ in sessions]


def _socket_of(app: FastAPI, index: int) -> Any:
    """Return the server's side of a connection, in the order of connecting."""
    connections = app.state.errata.multiplexer.connections
    return sorted(connections, key=lambda c: min((s.sid for s in c.sessions.values()), default="~"))[
        index
    ].handle._websocket


@pytest.mark.parametrize("any_thread", [False, True])
async def test_a_step_leaves_nothing_to_the_garbage_collector(any_thread: bool) -> None:
    """A cycle for each step is garbage by the million: looking for it took a fifth of a busy server's time."""

    class Plain(CountEnvironment):
        ANY_THREAD = any_thread

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
            return CountObservation(n=0)

        def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
            return CountObservation(n=action.n)

    if any_thread:
        for name in ("reset_async", "step_async"):
            setattr(Plain, name, getattr(Environment, name))
        Plain.snapshot = None  # type: ignore[assignment]
    app = create_fastapi_app(
        Plain, CountAction, CountObservation, max_concurrent_envs=8, runtime=simulated(Settings(journal_wait_s=0.3))
    )
    async with joined(app) as trainer:
        session = await trainer.open()
        await trainer.ask(session, "reset")
        for _ in range(5):
            await trainer.ask(session, "step", {"n": 1})
        gc.collect()
        gc.freeze()  # what tests before this one left is none of it
        try:
            with no_collections():
                for _ in range(50):
                    await trainer.ask(session, "step", {"n": 1})
                trainer.events.clear()
                garbage = _garbage()
        finally:
            gc.unfreeze()
        ours = [o for o in garbage if type(o).__module__.startswith("errata_server")]
        assert ours == [], f"{len(garbage)} objects, {len(ours)} of the server"


def _garbage() -> list[object]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize(
    ("frame", "code"),
    [("[]", "INVALID_JSON"), (" [ ] ", "INVALID_JSON"), ('{"type":"resume","data":[]}', "INVALID_ENVELOPE")],
)
async def test_d1_what_asks_for_nothing_is_answered_with_one_error(frame: str, code: str) -> None:
    async with Peer(application(), subprotocols=("openenv.mux.v1",)) as peer:
        told = await peer.ask(frame)
        assert told is not None and (told["sid"], told["type"], told["data"]["code"]) == (None, "error", code)
        answered = await peer.ask('{"q":1,"type":"capabilities"}')
        assert answered is not None and answered["type"] == "capabilities"
