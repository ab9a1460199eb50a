"""One at a time, in order, across event loops."""

from __future__ import annotations

import asyncio
import threading

import pytest

from errata_server.concurrency.fair_lock import FairLock


async def test_requests_pass_one_at_a_time_in_order_of_arrival() -> None:
    lock, order = FairLock(), []
    inside = 0

    async def request(n: int) -> None:
        nonlocal inside
        async with lock:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            order.append(n)
            inside -= 1

    await asyncio.gather(*(request(n) for n in range(50)))
    assert order == list(range(50)) and not lock.busy


async def test_a_cancelled_wait_does_not_block_those_behind() -> None:
    lock = FairLock()
    async with lock:
        waits = [asyncio.create_task(lock.__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        waits[0].cancel()
        waits[1].cancel()
    await asyncio.wait_for(waits[2], 60)
    assert waits[0].cancelled() and waits[1].cancelled() and lock.busy
    await lock.__aexit__(None, None, None)
    assert not lock.busy


async def test_a_turn_that_comes_while_the_wait_is_cancelled_is_passed_on() -> None:
    lock = FairLock()
    await lock.__aenter__()
    first = asyncio.create_task(lock.__aenter__())
    second = asyncio.create_task(lock.__aenter__())
    await asyncio.sleep(0)
    await lock.__aexit__(None, None, None)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, 60)
    await lock.__aexit__(None, None, None)
    assert not lock.busy


def test_loops_of_several_threads_share_it() -> None:
    lock = FairLock()
    total = 0

    async def add() -> None:
        nonlocal total
        for _ in range(100):
            async with lock:
                seen = total
                await asyncio.sleep(0)
                total = seen + 1

    threads = [threading.Thread(target=asyncio.run, args=(add(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert total == 400 and not lock.busy


def test_a_waiter_whose_loop_is_gone_is_passed_over() -> None:
    lock = FairLock()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(lock.__aenter__())
    waiting = loop.create_task(lock.__aenter__())
    loop.run_until_complete(asyncio.sleep(0))
    waiting._log_destroy_pending = False  # type: ignore[attr-defined] # its loop closes under it on purpose
    loop.close()

    async def release() -> None:
        await lock.__aexit__(None, None, None)

    asyncio.run(release())
    assert not lock.busy
