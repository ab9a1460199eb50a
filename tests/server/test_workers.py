"""Worker processes: budgets, errors, cancellation, and fairness by principal and session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from errata_protocol.errors import InvalidRequest, ServiceError
from errata_server.concurrency.slots import Slots
from errata_server.workers import Budget, BudgetExceeded, WorkerFailed, WorkerPool

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


async def test_a_cancelled_call_ends_its_process_and_frees_its_place(pool: WorkerPool) -> None:
    first = await pool.call("it", functions.process)
    calls = [asyncio.create_task(pool.call("it", functions.sleep, 3600.0)) for _ in range(4)]
    await asyncio.sleep(0.1)
    for call in calls:
        call.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*calls, return_exceptions=True))
    assert await pool.call("it", functions.process) != first


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
