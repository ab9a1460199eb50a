"""What a socket's reader reads ahead of the request that runs."""

from __future__ import annotations

import asyncio

import pytest

from errata_server.concurrency.queues import Arrivals, Gate, Inbox


async def test_items_come_out_in_order_and_none_is_the_end() -> None:
    inbox = Inbox[int](2, 100)

    async def fill() -> None:
        for number in range(100):
            await inbox.put(number, 1)
        inbox.end()

    filling = asyncio.create_task(fill())
    taken = []
    while (item := await inbox.take()) is not None:
        taken.append(item)
    await filling
    assert taken == list(range(100))


async def test_who_puts_waits_for_room_and_the_end_does_not() -> None:
    inbox = Inbox[int](2, 100)
    await inbox.put(1, 1)
    await inbox.put(2, 1)
    third = asyncio.create_task(inbox.put(3, 1))
    await asyncio.sleep(0)
    assert not third.done()
    assert await inbox.take() == 1
    await third
    inbox.end()
    assert [await inbox.take() for _ in range(3)] == [2, 3, None]


async def test_large_items_are_not_read_ahead_together_and_one_alone_passes() -> None:
    inbox = Inbox[int](10, 100)
    await inbox.put(1, 1000)
    second = asyncio.create_task(inbox.put(2, 1))
    await asyncio.sleep(0)
    assert not second.done()
    assert await inbox.take() == 1
    await second
    await inbox.put(3, 99)
    assert [await inbox.take() for _ in range(2)] == [2, 3]


async def test_a_cancelled_wait_loses_nothing() -> None:
    inbox = Inbox[int](1, 100)
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    taking.cancel()
    await inbox.put(1, 1)  # before the cancelled task ran
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await inbox.take() == 1


async def test_arrivals_come_out_in_order_to_one_who_waits_or_comes_later() -> None:
    arrivals = Arrivals[int](asyncio.get_running_loop())
    taking = asyncio.create_task(arrivals.get())
    await asyncio.sleep(0)
    assert arrivals.empty() and not taking.done()
    for number in range(3):
        arrivals.put_nowait(number)
    assert await taking == 0
    assert [await arrivals.get(), arrivals.empty(), await arrivals.get(), arrivals.empty()] == [1, False, 2, True]
    taking = asyncio.create_task(arrivals.get())
    await asyncio.sleep(0)
    taking.cancel()
    arrivals.put_nowait(3)  # before the cancelled task ran
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await arrivals.get() == 3


async def test_each_of_two_who_take_gets_what_arrives_also_if_one_gives_up() -> None:
    arrivals = Arrivals[int](asyncio.get_running_loop())
    taking = [asyncio.create_task(arrivals.get()) for _ in range(3)]
    await asyncio.sleep(0)
    taking[0].cancel()
    await asyncio.wait(taking[:1])
    arrivals.put_nowait(1)
    taking[1].cancel()  # it was woken and did not run
    arrivals.put_nowait(2)
    with pytest.raises(asyncio.CancelledError):
        await taking[1]
    assert await asyncio.wait_for(taking[2], 60) == 1
    assert await arrivals.get() == 2 and arrivals.empty()


async def test_a_gate_lets_all_through_who_wait_for_it_and_one_who_gave_up_spoils_nothing() -> None:
    gate = Gate(asyncio.get_running_loop())
    assert gate.is_set()
    await gate.wait()
    gate.clear()
    gate.clear()
    waiting = [asyncio.create_task(gate.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert not gate.is_set() and not any(task.done() for task in waiting[1:])
    gate.set()
    gate.set()
    await asyncio.gather(*waiting[1:])
    assert gate.is_set() and waiting[0].cancelled()
