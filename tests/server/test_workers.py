"""Worker processes: budgets, errors, cancellation, and fairness by principal and session."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from errata_protocol.errors import InvalidRequest, ServiceError, StateOutOfRange
from errata_server.concurrency.slots import Slots
from errata_server.workers import Budget, BudgetExceeded, WorkerFailed, WorkerPool
from errata_server.workers import pool as pool_module
from errata_server.workers.pool import _Call

from . import worker_functions as functions

SMALL = Budget(cpu_s=1.0, memory_bytes=512 * 1024**2, answer_bytes=64 * 1024)


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


async def test_a_function_runs_in_a_process_of_its_own_that_serves_the_next_call_too(pool: WorkerPool) -> None:
    assert await pool.call("a text", functions.length, "x" * 5_000_000) == 5_000_000
    first = await pool.call("it", functions.process)
    assert first not in (os.getpid(), 0)
    assert await pool.call("it", functions.process) == first


@pytest.mark.parametrize(
    ("function", "arguments", "limit"),
    [
        (functions.compute_for_ever, (), "time"),
        (functions.take_memory, (2048,), "memory"),
        (functions.nest, (100_000,), "depth"),
        (functions.crash, (), "depth"),
        (functions.many_bytes, (100_000,), "size"),
    ],
)
async def test_what_exceeds_its_budget_is_the_callers_error_and_the_next_call_runs(
    pool: WorkerPool, function: object, arguments: tuple[int, ...], limit: str
) -> None:
    with pytest.raises(BudgetExceeded, match=r"^the log is too large: .*; make it smaller$") as raised:
        await pool.call("the log", function, *arguments, budget=SMALL)  # type: ignore[arg-type]
    assert isinstance(raised.value, InvalidRequest) and raised.value.details == {"limit": limit}
    assert await pool.call("a text", functions.length, "abc", budget=SMALL) == 3


async def test_a_budget_is_of_one_call_and_not_of_the_process(pool: WorkerPool) -> None:
    used = Budget(cpu_s=0.2)
    assert [await pool.call("it", functions.length, "x", budget=used) for _ in range(50)] == [1] * 50


async def test_the_functions_own_exception_is_raised_with_where_it_came_from(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="no such thing") as raised:
        await pool.call("it", functions.refuse, "no such thing")
    assert "worker_functions.py" in raised.value.__notes__[0]


async def test_a_process_that_is_killed_is_the_machines_fault(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed) as raised:
        await pool.call("it", functions.be_killed)
    assert isinstance(raised.value, ServiceError)


async def test_a_process_that_died_while_idle_is_replaced_unseen(pool: WorkerPool) -> None:
    os.kill(await pool.call("it", functions.process), 9)
    assert await pool.call("a text", functions.length, "abc") == 3


async def test_a_cancelled_call_ends_its_process_and_frees_its_place(pool: WorkerPool, tmp_path: Path) -> None:
    first = await pool.call("it", functions.process)
    calls = [
        asyncio.create_task(pool.call("it", functions.sleep_after_touching, str(tmp_path / f"{n}"))) for n in range(4)
    ]
    while len(list(tmp_path.iterdir())) < 2:  # noqa: ASYNC110 - what other processes make; all that run at a time
        await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*calls, return_exceptions=True))
    assert await pool.call("it", functions.process) != first


async def test_a_call_that_is_cancelled_while_its_process_starts_ends_it(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _Call(pool, "it", functions.compute_for_ever, (), SMALL)
    start, started = pool_module._Worker, []

    def cancelled_while_starting() -> object:
        started.append(start())
        call.end()
        return started[0]

    monkeypatch.setattr(pool_module, "_Worker", cancelled_while_starting)
    with pytest.raises(WorkerFailed):
        await asyncio.to_thread(call.run)
    assert started[0]._process.poll() == -signal.SIGKILL


async def test_a_large_exception_exceeds_the_budget_and_its_function_is_called_once(
    pool: WorkerPool, tmp_path: Path
) -> None:
    await pool.call("it", functions.process)  # an idle process is not taken for one that ended meanwhile
    called = tmp_path / "called"
    with pytest.raises(BudgetExceeded) as raised:
        await pool.call("the log", functions.refuse_at_length, 200_000, str(called), budget=SMALL)
    assert raised.value.details == {"limit": "size"} and called.read_text() == "called\n"


async def test_a_result_is_pickled_once(pool: WorkerPool) -> None:
    counted = await pool.call("it", functions.counting_pickles)
    assert counted.pickles == 1


async def test_an_exception_keeps_its_class_and_attributes_or_else_its_text(pool: WorkerPool) -> None:
    with pytest.raises(StateOutOfRange) as known:
        await pool.call("it", functions.refuse_state)
    assert known.value.details == {"eid": "e", "t": 9, "deliveries": 5}
    for refuse in (functions.refuse_unpicklable, functions.refuse_unmakeable):
        with pytest.raises(RuntimeError, match=r"^\w+: why") as other:
            await pool.call("it", refuse)
        assert "worker_functions.py" in other.value.__notes__[0]


async def test_what_cannot_be_pickled_is_the_functions_error(pool: WorkerPool) -> None:
    with pytest.raises(Exception, match="pickle"):
        await pool.call("it", functions.a_lambda)


def test_no_call_waits_for_the_end_of_an_idle_process(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []
    kill = pool_module._Worker.kill

    def watched(worker: pool_module._Worker) -> int:
        locked.append(pool._lock.locked())
        return kill(worker)

    monkeypatch.setattr(pool_module._Worker, "kill", watched)
    worker, _ = pool.take()
    pool.give_back(worker)
    worker.used_bytes = pool_module._LARGEST_BYTES
    other, is_new = pool.take()
    assert is_new and locked == [False]
    pool.give_back(other)


async def test_a_worker_is_nicer_than_the_server(pool: WorkerPool) -> None:
    assert await pool.call("it", functions.niceness) == min(19, os.nice(0) + 5)


async def test_one_principals_queue_delays_another_by_one_call() -> None:
    slots, order = Slots(1), []

    async def use(principal: str, session: str) -> None:
        async with slots.take(nullcontext, (principal, session)):
            order.append((principal, session))
            await asyncio.sleep(0)

    async with slots.take(nullcontext):
        users = [asyncio.create_task(use("greedy", f"s{n % 4}")) for n in range(40)]
        await asyncio.sleep(0)
        users += [asyncio.create_task(use("modest", "m")), asyncio.create_task(use("greedy", "late"))]
        await asyncio.sleep(0)
        assert slots.waiting == 42
    await asyncio.gather(*users)
    assert ("modest", "m") in order[:2]
    assert ("greedy", "late") in order[:7], "after one call of each of its principal's sessions"
