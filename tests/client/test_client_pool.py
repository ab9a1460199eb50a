"""`EnvPool`: batches, failures of one environment, and servers of either kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mux_peer import MuxPeer, peered, peered_in_a_thread, until

from errata_client import BatchFailed, Connection, EnvPool, ErrataClient
from errata_protocol.errors import ErrataError, FrameTooLarge, InvalidRequest, LocalProtocolError, SessionLost
from tests.machine_speed import SLOWDOWN


@pytest.fixture
async def peer() -> AsyncIterator[MuxPeer]:
    """A multiplexed server."""
    async with peered() as peer:
        yield peer


def acts(n: int, text: str = "a") -> list[dict[str, Any]]:
    return [{"text": text} for _ in range(n)]


async def test_a_batch_leaves_in_few_frames_and_comes_back_in_order(peer: MuxPeer) -> None:
    async with Connection(peer.url) as connection, EnvPool(peer.url, 300, connection=connection) as pool:
        assert len(pool) == 300 and len(peer.rows) == 300
        await pool.reset_batch()
        before = connection.stats.frames_sent
        results = await pool.step_batch([{"text": str(n)} for n in range(300)])
        assert [result.observation["text"] for result in results] == [str(n) for n in range(300)]
        assert connection.stats.frames_sent - before <= 3
        assert (pool.stats.resets, pool.stats.steps, pool.stats.failed, pool.stats.in_flight) == (300, 300, 0, 0)
        assert pool.session_stats.replies == 600 and {client.t for client in pool.clients} == {1}
    assert {row.status for row in peer.rows.values()} == {"closed"}


async def test_arguments_go_to_their_environments(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 4) as pool:
        await pool.reset_batch({"text": "same"})
        await pool.reset_batch([{"text": "x"}, {"text": "y"}], indices=[2, 0])
        results = await pool.step_batch({3: {"text": "three"}, 1: {"text": "one"}})
        assert [result.observation["text"] for result in results] == ["three", "one"]
        said = [(await client.state_at(0)).payload for client in pool.clients]
        assert [b'"y"' in said[0], b'"same"' in said[1], b'"x"' in said[2], b'"same"' in said[3]] == [True] * 4
        for wrong in (pool.step_batch(acts(3)), pool.step_batch(acts(1), indices=[4]), pool.step_batch({9: {}})):
            with pytest.raises(InvalidRequest):
                await wrong
        with pytest.raises(InvalidRequest, match="indices"):
            await pool.step_batch({1: {}}, indices=[1])
    with pytest.raises(InvalidRequest, match="at least 1"):
        EnvPool(peer.url, 0)


async def test_one_environment_that_fails_fails_no_other(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 3) as pool:
        await pool.reset_batch()
        peer.broken = [ErrataError("asked to fail")]
        results = await pool.step_batch([{"text": "a"}, object(), {"text": "b"}], return_exceptions=True)
        assert isinstance(results[0], ErrataError) and isinstance(results[1], InvalidRequest)
        assert results[2].observation["count"] == 1
        peer.broken = [ErrataError("again")]
        with pytest.raises(BatchFailed, match="1 of 3") as caught:
            await pool.step_batch(acts(3))
        assert caught.value.details["failed"] == [0] and caught.value.results[2].observation["count"] == 2
        assert pool.stats.failed == 3 and pool.stats.in_flight == 0


async def test_a_lost_session_is_told_by_its_batch_and_begun_anew_by_the_reset_after(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 3) as pool:
        await pool.reset_batch()
        del peer.rows[peer.sids[1]]
        peer.lose_memory()
        results = await pool.step_batch(acts(3), return_exceptions=True)
        assert [type(result) for result in results].count(SessionLost) == 1
        assert all(result.observation["count"] == 0 for result in await pool.reset_batch())


async def test_what_takes_too_long_is_asked_back_and_the_session_goes_on(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 2) as pool:
        await pool.reset_batch()
        peer.hold()
        results = await pool.step_batch(acts(2), return_exceptions=True, timeout_s=0.1 * SLOWDOWN)
        assert [type(result) for result in results] == [TimeoutError] * 2
        await peer.arrived.acquire()
        await peer.arrived.acquire()
        peer.release()
        results = await pool.step_batch(acts(2, "b"))
        assert [result.observation for result in results] == [{"count": 2, "text": "b"}] * 2
        peer.hold()
        batch = asyncio.create_task(pool.step_batch(acts(2)))
        await peer.arrived.acquire()
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        assert pool.stats.in_flight == 0 and pool.session_stats.abandoned == 4


async def test_results_are_taken_as_they_come(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 3) as pool:
        await pool.reset_batch()
        peer.hold()
        slow = asyncio.ensure_future(pool.clients[1].step({"text": "slow"}))
        await peer.arrived.acquire()
        order = []
        async for index, result in pool.as_completed({0: {"text": "a"}, 2: {"text": "c"}}, timeout_s=0.1 * SLOWDOWN):
            order.append((index, type(result).__name__))
        assert order == [(0, "TimeoutError"), (2, "TimeoutError")]
        peer.release()
        await slow
        seen = {index: result.observation["text"] async for index, result in pool.as_completed(acts(3, "z"))}
        assert seen == {0: "z", 1: "z", 2: "z"}
        async for _ in pool.as_completed(acts(3)):
            break
        assert pool.stats.in_flight <= 2, "what nobody waits for any more is dropped when the iterator is closed"


async def test_a_pool_survives_cuts_in_the_middle_of_batches(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 64) as pool:
        await pool.reset_batch()
        for n in range(1, 8):
            batch = asyncio.create_task(pool.step_batch(acts(64, str(n))))
            await asyncio.sleep(0)
            peer.lose_memory() if n % 2 else peer.cut()
            assert {result.observation["count"] for result in await batch} == {n}
        assert all(peer.steps(sid) == ["reset", *"1234567"] for sid in peer.sids)


async def test_a_pool_whose_opening_is_cancelled_leaves_no_session_open(peer: MuxPeer) -> None:
    peer.capacity = 1
    pool = EnvPool(peer.url, 2)
    connecting = asyncio.create_task(pool.connect())
    await until(lambda: pool.session_stats.refused["CAPACITY_REACHED"] > 0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert [row.status for row in peer.rows.values()] == ["closed"] and not peer._sockets


async def test_a_vanilla_server_is_stepped_over_a_socket_each(stock_url: str) -> None:
    async with EnvPool(stock_url, 4) as pool:
        await pool.reset_batch()
        results = await pool.step_batch([{"text": str(n)} for n in range(4)])
        assert [result.observation["text"] for result in results] == ["0", "1", "2", "3"]
        results = await pool.step_batch([{"text": "fail"}, {"text": "b"}], indices=[0, 1], return_exceptions=True)
        assert isinstance(results[0], RuntimeError) and results[1].observation["count"] == 2
        seen = {index: result.observation["count"] async for index, result in pool.as_completed(acts(4))}
        assert seen == {0: 2, 1: 3, 2: 2, 3: 2}


def test_the_blocking_form_has_the_same_methods() -> None:
    with peered_in_a_thread() as peer, EnvPool(peer.url, 5).sync() as pool:
        pool.reset_batch()
        assert [result.observation["count"] for result in pool.step_batch(acts(5))] == [1] * 5
        assert {index: result.observation["count"] for index, result in pool.as_completed(acts(5))} == dict.fromkeys(
            range(5), 2
        )
        for _ in pool.as_completed(acts(5)):
            break
        assert len(peer._sockets) == 1 and len(pool) == 5 and pool.stats.steps >= 11
        with pool.clients[0].fork(1) as fork:
            assert fork.t == 0
        assert pool.session_stats.requests >= 20


async def test_large_actions_of_many_environments_share_a_socket(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 5) as pool:
        await pool.reset_batch()
        results = await pool.step_batch(acts(5, "x" * 6_000_000))
        assert [len(result.observation["text"]) for result in results] == [6_000_000] * 5
        assert not pool.session_stats.refused


async def test_an_action_over_the_servers_bound_is_told_once_and_leaves_the_session_as_it_was(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 2) as pool:
        await pool.reset_batch()
        results = await pool.step_batch([{"text": "x" * 17_000_000}, {"text": "a"}], return_exceptions=True)
        assert isinstance(results[0], FrameTooLarge) and results[1].observation["count"] == 1
        for _ in range(3):
            assert all(not isinstance(result, Exception) for result in await pool.step_batch(acts(2)))
        assert [client.t for client in pool.clients] == [3, 4]


async def test_a_closed_pool_refuses_batches_and_opens_no_session(peer: MuxPeer) -> None:
    async with EnvPool(peer.url, 2) as pool:
        await pool.reset_batch()
    for batch in (pool.step_batch(acts(2)), pool.reset_batch(), pool.reset_batch(return_exceptions=True)):
        with pytest.raises(LocalProtocolError, match="the pool is closed"):
            await batch
    with pytest.raises(LocalProtocolError, match="the pool is closed"):
        async for _ in pool.as_completed(acts(2)):
            pass
    assert len(peer.rows) == 2 and pool.stats.in_flight == 0
    async with pool:
        assert [result.observation["count"] for result in await pool.reset_batch()] == [0, 0]
    assert len(peer.rows) == 4 and {row.status for row in peer.rows.values()} == {"closed"}


async def test_a_closed_client_says_so_and_a_reset_opens_another_session(peer: MuxPeer) -> None:
    client = ErrataClient(peer.url)
    await client.reset()
    await client.step({"text": "a"})
    await client.close()
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match=r"this client was closed at t=1 of .* reset\(\) opens another"):
            await client.step({"text": "b"})
    assert (await client.reset()).observation["count"] == 0
    assert (await client.step({"text": "b"})).observation["count"] == 1
    await client.close()
    assert [row.status for row in peer.rows.values()] == ["closed"] * 2


async def test_a_deadline_that_is_no_number_is_refused_before_anything_is_sent(peer: MuxPeer) -> None:
    nan = float("nan")
    async with EnvPool(peer.url, 2) as pool:
        await pool.reset_batch()
        for batch in (pool.step_batch(acts(2), timeout_s=nan), pool.reset_batch(timeout_s=nan)):
            with pytest.raises(ValueError, match="timeout_s is not a number"):
                await batch
        with pytest.raises(ValueError, match="timeout_s is not a number"):
            async for _ in pool.as_completed(acts(2), timeout_s=nan):
                pass
        assert pool.stats.in_flight == 0 and {client.t for client in pool.clients} == {0}
    for name in ("message_timeout_s", "connect_timeout_s"):
        with pytest.raises(ValueError, match=f"{name} is not a number"):
            ErrataClient(peer.url, **{name: nan})
