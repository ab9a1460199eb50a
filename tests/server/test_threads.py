"""Where blocking code of environments runs, and what a call that hangs for ever costs the others: nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openenv.core.env_server.types import ConcurrencyConfig

from errata_client import ErrataClient
from errata_protocol.environment import Snapshot
from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    ErrataError,
    Overloaded,
    SessionLost,
    StepTimeout,
)
from errata_server.app import create_fastapi_app
from errata_server.concurrency.calls import CallAbandoned, ThreadGone
from errata_server.concurrency.os_threads import FREE_RUNNING, SPARE_LOOKS, TICK_S, OsThreads
from errata_server.concurrency.threads import Threads
from errata_server.process import ServerProcess
from errata_server.runtime.runtime import Runtime
from errata_server.sessions.decoding import Decoder
from errata_server.sessions.session import Request, Session
from errata_server.sessions.sessions import Sessions
from errata_server.settings import Settings
from errata_server.simulation import simulated
from errata_server.simulation.threads import SimulatedThreads
from tests.machine_speed import SLOWDOWN

from .conftest import connect, until
from .environments import CountAction, CountEnvironment, CountObservation, PinnedEnvironment
from .repeatable import DiceEnvironment

Opened = tuple[Sessions, Runtime]


class ThreadedEnvironment(PinnedEnvironment):
    """Names the thread of each of its calls; hangs when told to, until `let_go`."""

    let_go = threading.Event()
    calls: list[tuple[int, str, int]] = []  # noqa: RUF012 - (instance, call, thread)

    def __init__(self) -> None:
        super().__init__()
        self._note("init")

    def _note(self, call: str) -> None:
        self.calls.append((id(self), call, threading.get_ident()))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CountObservation:
        self._note("reset")
        return super().reset(seed, episode_id, **kwargs)

    def step(self, action: CountAction, timeout_s: float | None = None, **kwargs: Any) -> CountObservation:
        self._note("step")
        if action.do == "hang":
            self.let_go.wait()
        if action.do == "exit":
            raise SystemExit(3)
        return super().step(action)

    @property
    def state(self) -> Any:
        self._note("state")
        return super().state

    def close(self) -> None:
        self._note("close")
        super().close()


class SavedEnvironment(ThreadedEnvironment):
    """The same, recoverable."""

    def snapshot(self) -> Snapshot:
        return Snapshot(json.dumps(self._db.execute("select n from c").fetchall()).encode())

    def restore(self, snapshot: Snapshot) -> None:
        self._db.executemany("insert into c values (?)", json.loads(snapshot.state))


class SingleEnvironment(ThreadedEnvironment):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


class RatedEnvironment(DiceEnvironment):
    """Recovered by re-execution; rates its steps at the end of an episode."""

    def compute_step_rewards(self) -> list[float]:
        return [1.0] * self._state.step_count


class UnrecoverableRatedEnvironment(RatedEnvironment):
    DETERMINISTIC = False


class BrokenEnvironment(DiceEnvironment):
    """Its factory fails when told to."""

    broken = False

    def __init__(self) -> None:
        if self.broken:
            raise OSError("the task server is gone")
        super().__init__()


class SavedRatedEnvironment(SavedEnvironment):
    def compute_step_rewards(self) -> list[float]:
        return []

    def step(self, action: CountAction, timeout_s: float | None = None, **kwargs: Any) -> CountObservation:
        return super().step(action).model_copy(update={"done": action.do == "done"})


class FreeEnvironment(CountEnvironment):
    """Sync, does not care for threads, not recoverable."""

    ANY_THREAD = True
    reset_async = PinnedEnvironment.reset_async
    step_async = PinnedEnvironment.step_async
    snapshot = None  # type: ignore[assignment]
    let_go = threading.Event()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        return CountObservation(n=0)

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        if action.do == "hang":
            self.let_go.wait()
        self._n += action.n
        return CountObservation(n=self._n, reward=1.0)


class StubbornEnvironment(CountEnvironment):
    """Async; its step ignores that it is cancelled."""

    let_go = asyncio.Event()

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        if action.do == "exit":
            raise SystemExit(3)
        while action.do == "hang" and not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue
        return await super().step_async(CountAction(n=action.n))


@pytest.fixture(autouse=True)
def nothing_hangs_on() -> Any:
    for cls in (ThreadedEnvironment, FreeEnvironment):
        cls.let_go.clear()
    ThreadedEnvironment.calls.clear()
    yield
    for cls in (ThreadedEnvironment, FreeEnvironment):
        cls.let_go.set()


@asynccontextmanager
async def sessions_of(factory: Any, threads: Threads | None = None, **settings: Any) -> AsyncIterator[Opened]:
    runtime = Runtime(Settings(**settings), threads=threads)
    concurrency = ConcurrencyConfig(max_concurrent_envs=1000)
    sessions = Sessions(runtime, factory, "threads", concurrency, decoder=Decoder(CountAction))
    runtime.live_sessions.add(sessions)
    try:
        yield sessions, runtime
    finally:
        await sessions.close_all(grace_s=1.0)
        await runtime.close()


async def reset(sessions: Sessions, session: Session) -> None:
    await sessions.admit(session, Request("reset", b"{}"))


async def step(sessions: Sessions, session: Session, do: str = "", n: int = 1, timeout_s: float | None = None) -> int:
    action = CountAction(n=n, do=do)
    request = Request("step", action.model_dump_json().encode(), action=action, timeout_s=timeout_s)
    reply = await sessions.admit(session, request)
    return int(json.loads(reply.payload)["observation"]["n"])


async def opened(sessions: Sessions, count: int) -> list[Session]:
    made = [await sessions.open() for _ in range(count)]
    for session in made:
        await reset(sessions, session)
    return made


# -- one thread for all calls of an environment ---------------------------------------------------------------------


@pytest.mark.parametrize("cap", [64, 3])
async def test_all_calls_of_a_pinned_environment_are_made_on_one_thread_also_beyond_the_cap(cap: int) -> None:
    async with sessions_of(ThreadedEnvironment, max_threads=cap) as (sessions, runtime):
        made = await opened(sessions, 10)
        for total in (1, 2):
            assert await asyncio.gather(*(step(sessions, s) for s in made)) == [total] * 10
            await asyncio.gather(*(sessions.state(s) for s in made))
        assert runtime.threads.counts.pinned == min(cap, 10)
        for session in made:
            await sessions.lifetime.close(session)
        assert runtime.threads.counts.pinned == 0
    threads_of: dict[int, set[int]] = {}
    for instance, _, thread in ThreadedEnvironment.calls:
        threads_of.setdefault(instance, set()).add(thread)
    assert len(threads_of) == 10 and all(len(threads) == 1 for threads in threads_of.values())
    assert {call for _, call, _ in ThreadedEnvironment.calls} == {"init", "reset", "step", "state", "close"}
    shared = [sum(1 for t in threads_of.values() if t == {thread}) for thread in set().union(*threads_of.values())]
    assert max(shared) == (1 if cap == 64 else 4)  # ten environments on three threads: the least loaded first


async def test_a_shared_thread_that_is_left_is_the_next_to_be_lent() -> None:
    threads = SimulatedThreads(cap=2)
    places = [threads.pinned() for _ in range(6)]
    assert len(threads.started) == 2
    for place in places[::2]:  # three of one thread
        place.release()
        place.release()
    assert threads.counts.pinned == 1
    threads.pinned()
    assert len(threads.started) == 3


async def test_the_free_pool_takes_no_more_threads_than_calls_that_do_not_block_need() -> None:
    threads = OsThreads()
    places = [threads.free() for _ in range(500)]
    found = await asyncio.gather(*(place.run(threading.get_ident, 10) for place in places))
    assert len(set(found)) <= 40 and threads.counts.free <= 40
    threads.close()


async def test_a_moment_without_work_taken_or_with_cpu_to_spare_brings_in_no_threads_that_contend() -> None:
    threads = OsThreads()
    pool, over = threads._pool, threading.Event()
    pool._watched = True  # these looks are all
    waiting = [asyncio.create_task(threads.free().run(over.wait, 30)) for _ in range(100)]
    await asyncio.sleep(2 * TICK_S)
    with pool._lock:
        pool._look(False, stalled=True)  # its first call runs long, as one does that waits for the interpreter
        assert (len(pool._active), pool._limit) == (1, 1)
    (first,) = pool._active
    first.busy_since = None
    with pool._lock:
        for _ in range(SPARE_LOOKS - 1):
            pool._look(True, stalled=False)
        assert len(pool._active) == 1
        pool._look(True, stalled=False)  # so often it means that calls block, each shortly
        assert len(pool._active) == FREE_RUNNING
    over.set()
    await asyncio.gather(*waiting)
    threads.close()


async def test_threads_that_are_too_many_rest_while_work_waits() -> None:
    threads = OsThreads()
    pool, ends = threads._pool, threading.Semaphore(0)
    pool._watched, pool._limit = True, FREE_RUNNING  # these looks are all
    waiting = [asyncio.create_task(threads.free().run(ends.acquire, 30)) for _ in range(3 * FREE_RUNNING)]
    await until(lambda: len(pool._active) == FREE_RUNNING)
    with pool._lock:
        for _ in range(FREE_RUNNING):
            pool._look(False, stalled=False)
        assert (len(pool._active), pool._limit) == (FREE_RUNNING, 1), "what is at work does not hold the limit up"
    ends.release(FREE_RUNNING - 1)
    await until(lambda: len(pool._active) == 1)
    assert len(pool._waiting) == 2 * FREE_RUNNING
    ends.release(2 * FREE_RUNNING + 1)
    await asyncio.gather(*waiting)
    threads.close()


async def test_environments_that_block_on_the_free_pool_do_so_side_by_side() -> None:
    threads = OsThreads()
    all_here = threading.Barrier(300)  # passes only if 300 calls run at once
    await asyncio.gather(*(threads.free().run(lambda: all_here.wait(60), 60) for _ in range(300)))
    threads.close()


async def test_an_asynchronous_environment_needs_no_thread_of_its_own() -> None:
    threads = SimulatedThreads()
    async with sessions_of(CountEnvironment, threads) as (sessions, _):
        made = await opened(sessions, 20)
        assert await asyncio.gather(*(step(sessions, s) for s in made)) == [1] * 20
        assert threads.started == []


async def test_a_factory_function_tells_by_its_instance_that_any_thread_will_do() -> None:
    threads = SimulatedThreads()
    async with sessions_of(lambda: FreeEnvironment(), threads) as (sessions, _):
        (session,) = await opened(sessions, 1)
        assert await step(sessions, session) == 1
        assert threads.counts.pinned == 0


async def test_a_burst_of_results_wakes_the_loop_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = OsThreads()
    loop = asyncio.get_running_loop()
    woken = 0
    wake = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal woken
        woken += 1
        return wake(*args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    places = [threads.free() for _ in range(400)]
    calls = [asyncio.ensure_future(place.run(lambda: None, 10)) for place in places]
    await asyncio.sleep(0)  # all are submitted
    ended = threading.Event()
    threads.executor.submit(ended.set)
    ended.wait(60)  # the loop does not run meanwhile
    await asyncio.gather(*calls)
    assert woken < 100
    threads.close()


# -- calls that hang ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", [ThreadedEnvironment, FreeEnvironment])
async def test_64_steps_that_hang_for_ever_delay_no_other_session(factory: Any) -> None:
    async with sessions_of(factory, step_timeout_s=5.0 * SLOWDOWN) as (sessions, runtime):
        made = await opened(sessions, 80)
        hanging = [asyncio.create_task(step(sessions, s, "hang")) for s in made[:64]]
        rounds: Counter[int] = Counter()  # of the other 16, by how many of the 64 still hung at its end
        while any(not task.done() for task in hanging):
            await asyncio.gather(*(step(sessions, s) for s in made[64:]))
            rounds[sum(not task.done() for task in hanging)] += 1
        assert rounds[64] >= 8  # who waits for one that hangs waits for its deadline, and has no such round
        assert {type(task.exception()) for task in hanging} == {StepTimeout}
        assert runtime.threads.counts.written_off == 64
        (reason,) = runtime.readiness.reasons()
        assert reason.startswith("64 calls")
        for session in made[:64]:
            with pytest.raises(SessionLost, match="t=0 of episode"):
                await step(sessions, session)
        assert len(await opened(sessions, 64)) == 64
        factory.let_go.set()
        await until(lambda: runtime.threads.counts.written_off == 0)
        assert runtime.readiness.reasons() == [] and runtime.threads.counts.written_off_total == 64
    assert sum(1 for _, call, _ in ThreadedEnvironment.calls if call == "close") in (0, 80)  # never of a hung one


def test_ready_says_that_calls_hang() -> None:
    settings = Settings(step_timeout_s=0.1, max_written_off=0)
    app = create_fastapi_app(ThreadedEnvironment, CountAction, CountObservation, settings=settings)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        assert client.get("/ready").json() == {"status": "ready", "reasons": []}
        assert socket.ask("step", {"do": "hang"})["data"]["code"] == "TIMEOUT"
        said = client.get("/ready")
        assert said.status_code == 503 and "1 calls of environments hang" in said.json()["reasons"][0]
        assert socket.ask("state")["data"]["code"] == "SESSION_LOST"


async def test_a_session_with_snapshots_recovers_from_a_step_that_hangs() -> None:
    async with sessions_of(SavedEnvironment, step_timeout_s=0.2 * SLOWDOWN) as (sessions, runtime):
        (session,) = await opened(sessions, 1)
        assert await step(sessions, session, n=5) == 5
        with pytest.raises(StepTimeout, match=rf"ran longer than the server's {0.2 * SLOWDOWN:g} s"):
            await step(sessions, session, "hang", n=100)
        assert await step(sessions, session, n=1) == 6
        assert (session.t, runtime.threads.counts.written_off) == (2, 1)


@pytest.mark.parametrize("factory", [ThreadedEnvironment, SavedEnvironment])
@pytest.mark.parametrize("single", [False, True])
@simulated
async def test_who_shared_a_thread_that_was_written_off_is_recovered_or_lost(factory: Any, single: bool) -> None:
    threads = SimulatedThreads(cap=1)
    if single:
        threads = SimulatedThreads(cap=8)
        factory = type("Single", (factory,), {"REQUIRES_SINGLE_THREAD_EXECUTOR": True})
    async with sessions_of(factory, threads, step_timeout_s=0.05) as (sessions, _):
        one, queued, idle = await opened(sessions, 3)
        assert len(threads.started) == 1
        assert [await step(sessions, s, n=7) for s in (one, queued, idle)] == [7, 7, 7]
        threads.hang_next()
        results = await asyncio.gather(step(sessions, one, n=100), step(sessions, queued, n=1), return_exceptions=True)
        results.append((await asyncio.gather(step(sessions, idle, n=2), return_exceptions=True))[0])
        assert isinstance(results[0], StepTimeout)
        if issubclass(factory, SavedEnvironment):
            assert results[1:] == [8, 9]  # once each, as if nothing had been
            assert await step(sessions, one) == 8
        else:
            assert [type(r) for r in results[1:]] == [SessionLost, SessionLost]
        fresh = await sessions.open()
        await reset(sessions, fresh)
        assert await step(sessions, fresh) == 1
        assert len(threads.started) >= 2 and threads.counts.written_off == 1


@simulated
async def test_a_request_that_lost_its_thread_and_finds_no_new_instance_is_refused_and_not_recorded() -> None:
    threads = SimulatedThreads(cap=1)
    factory = type("Broken", (BrokenEnvironment,), {"broken": False})
    async with sessions_of(factory, threads, step_timeout_s=0.05) as (sessions, runtime):
        one, queued = await opened(sessions, 2)
        threads.hang_next()
        factory.broken = True  # type: ignore[attr-defined]
        results = await asyncio.gather(step(sessions, one), step(sessions, queued), return_exceptions=True)
        assert [type(r) for r in results] == [StepTimeout, Overloaded]
        assert queued.eid is not None
        assert [row.t for row in await runtime.store.recorded(queued.eid, 0)] == [0]
        factory.broken = False  # type: ignore[attr-defined]
        assert await step(sessions, queued, n=2) == 2


async def test_a_new_environment_is_not_put_on_a_thread_that_is_stuck() -> None:
    threads = SimulatedThreads(cap=2)
    stuck, other = threads.pinned(), threads.pinned()
    threads.hang_next()
    hanging = asyncio.ensure_future(stuck.run(lambda: None, 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(5):  # the stuck thread would be the least loaded one
        assert await threads.pinned().run(lambda: 1, 60) == 1
    assert await other.run(lambda: 2, 60) == 2
    threads.release()
    assert await hanging is None


@simulated
async def test_a_call_that_got_no_thread_in_time_has_not_run_and_its_session_lives() -> None:
    threads = SimulatedThreads(cap=1)
    one, two = threads.pinned(), threads.pinned()
    threads.hang_next()
    hanging = asyncio.ensure_future(one.run(lambda: "late", 60))
    await asyncio.sleep(0)
    ran: list[int] = []
    with pytest.raises(CallAbandoned) as caught:
        await two.run(lambda: ran.append(1), 0.01)
    assert not caught.value.ran and not two.gone
    threads.release()
    assert await hanging == "late"
    assert await two.run(lambda: "next", 60) == "next" and ran == []


@pytest.mark.parametrize("factory", [RatedEnvironment, UnrecoverableRatedEnvironment, SavedRatedEnvironment])
@simulated
async def test_a_step_whose_rewards_get_no_thread_in_time_is_taken_back_and_one_that_did_not_run_is_not(
    factory: Any,
) -> None:
    threads = SimulatedThreads(cap=1)
    async with sessions_of(factory, threads) as (sessions, _):
        session, other = await opened(sessions, 2)
        host = session.host
        threads.hang_next()
        waiting = asyncio.ensure_future(step(sessions, other))
        await until(lambda: other.lock.busy)
        with pytest.raises(StepTimeout, match=r"step got no thread"):
            await step(sessions, session, n=5, timeout_s=0.05)
        threads.release()
        assert await waiting == 1
        assert session.host is host and await step(sessions, session) == 1

        threads.hang_next(after=1)  # its step runs, then the other session's hangs, and its rewards wait behind that
        ended = asyncio.ensure_future(step(sessions, session, "done", n=5, timeout_s=0.05))
        waiting = asyncio.ensure_future(step(sessions, other))
        with pytest.raises(StepTimeout, match=r"compute_step_rewards got no thread"):
            await ended
        threads.release()
        assert await waiting == 2
        if factory is UnrecoverableRatedEnvironment:
            with pytest.raises(SessionLost):
                await step(sessions, session)
            return
        assert (session.t, await step(sessions, session)) == (1, 2)
        await sessions.lifetime.sleep(session)
        assert await step(sessions, session) == 3


async def test_where_every_thread_hangs_a_new_environment_is_refused_in_time() -> None:
    threads = SimulatedThreads(cap=1)
    for _ in range(2):
        threads.hang_next()
        with pytest.raises(CallAbandoned):
            await threads.pinned().run(lambda: None, 0.01)
    with pytest.raises(CapacityReached, match="2 calls hang"):
        threads.pinned()
    threads.release()
    assert await threads.pinned().run(lambda: 1, 60) == 1


async def test_a_written_off_thread_takes_no_further_call() -> None:
    threads = OsThreads()
    place, gate = threads.pinned(), threading.Event()
    with pytest.raises(CallAbandoned):
        await place.run(gate.wait, 0.05)
    with pytest.raises(ThreadGone):
        await place.run(lambda: None, 1)
    gate.set()
    await until(lambda: threads.counts.written_off == 0)
    threads.close()


async def test_a_state_that_is_asked_behind_a_hanging_step_is_answered_at_its_deadline() -> None:
    async with sessions_of(ThreadedEnvironment, step_timeout_s=0.2 * SLOWDOWN) as (sessions, _):
        (session,) = await opened(sessions, 1)
        hanging = asyncio.create_task(step(sessions, session, "hang"))
        await until(lambda: session.lock.busy)
        async with asyncio.timeout(60):
            with pytest.raises(SessionLost):
                await sessions.state(session)
            with pytest.raises(StepTimeout):
                await hanging


async def test_an_asynchronous_step_that_ignores_its_cancellation_is_given_up_and_counted() -> None:
    StubbornEnvironment.let_go = asyncio.Event()
    async with sessions_of(StubbornEnvironment, step_timeout_s=0.1 * SLOWDOWN) as (sessions, runtime):
        (session,) = await opened(sessions, 1)
        async with asyncio.timeout(60):
            with pytest.raises(StepTimeout):
                await step(sessions, session, "hang", n=100)
            assert runtime.threads.counts.written_off == 1
            assert await step(sessions, session, n=2) == 2  # restored
            StubbornEnvironment.let_go.set()
            await until(lambda: runtime.threads.counts.written_off == 0)


@pytest.mark.parametrize("factory", [ThreadedEnvironment, StubbornEnvironment])
async def test_an_environment_that_exits_does_not_end_the_server(factory: Any) -> None:
    async with sessions_of(factory) as (sessions, _):
        (session,) = await opened(sessions, 1)
        with pytest.raises(EnvironmentFailed, match="SystemExit: 3"):
            await step(sessions, session, "exit")
        assert await step(sessions, session) == 1


async def test_the_loops_default_executor_is_the_pool_also_without_a_lifespan() -> None:
    async with sessions_of(CountEnvironment) as (sessions, _):
        await sessions.open()
        name = await asyncio.to_thread(lambda: threading.current_thread().name)
        assert name == "errata-free"


async def test_a_cancelled_call_of_the_executor_is_counted_while_it_hangs() -> None:
    threads = OsThreads()
    gate, begun = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    hanging = loop.run_in_executor(threads.executor, lambda: (begun.set(), gate.wait()))
    await until(begun.is_set)
    hanging.cancel()
    await until(lambda: threads.counts.written_off == 1)
    gate.set()
    await until(lambda: threads.counts.written_off == 0)
    threads.close()


async def test_a_server_full_of_hanging_steps_stops_at_once(tmp_path: Path) -> None:
    """Before the deadline, pinned ones; no close is waited for."""
    target = "tests.server.test_threads:ThreadedEnvironment"
    with ServerProcess(target, tmp_path, "--step-timeout", "1") as server:
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(_hang(server.url))
        assert server.stop(timeout_s=60) == 0


async def test_a_step_that_ignores_its_cancellation_does_not_keep_a_server_from_stopping(tmp_path: Path) -> None:
    with ServerProcess("tests.server.test_threads:StubbornEnvironment", tmp_path, "--step-timeout", "1") as server:
        await _hang(server.url)
        assert server.stop(timeout_s=60) == 0
    assert any("ignore their cancellation" in line for line in server.log)


async def _hang(url: str) -> None:
    async with ErrataClient(url) as client:
        await client.reset()
        with pytest.raises(ErrataError) as caught:
            await client.step({"do": "hang"})
        assert caught.value.code == "TIMEOUT"
