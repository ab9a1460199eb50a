"""`ErrataClient` against stock OpenEnv 0.10: every method works or says why not, from the client's own record."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from echo_environment import EchoAction, EchoObservation, EchoState, stock_app
from loopback import served
from openenv.core import GenericEnvClient
from websockets.asyncio.client import connect

from errata_client import ErrataClient, SyncErrataClient
from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    InvalidRequest,
    NoReset,
    NotSupported,
    SessionLost,
    SessionUnknown,
    StateOutOfRange,
    UnknownEpisode,
)
from errata_protocol.payload import digest


async def test_a_vanilla_server_is_recognised_and_its_session_unharmed(stock_url: str) -> None:
    async with ErrataClient(stock_url) as client:
        assert await client.capabilities() is None
        assert (await client.reset()).observation["text"] == "ready"
        assert (await client.state())["step_count"] == 0


async def test_history_holds_the_bytes_the_server_sent(stock_url: str) -> None:
    texts = ["plain", "é ü \u2028 \U0001f600", 'quote " and \\ and \n', "\x00\x1f"]
    async with connect(stock_url.replace("http", "ws") + "/ws") as raw:
        await raw.send('{"type":"reset"}')
        expected = [await raw.recv()]
        for text in texts:
            await raw.send(json.dumps({"type": "step", "data": {"text": text}}))
            expected.append(await raw.recv())
    async with ErrataClient(stock_url) as client:
        await client.reset()
        for text in texts:
            result = await client.step({"text": text})
            assert result.metadata == {"said": text}
        history = await client.history()
        assert client.t == len(texts) == history[-1].t
        for t, frame in enumerate(expected):
            state = await client.state_at(t)
            assert state == history[t]
            assert b'{"type":"observation","data":' + state.payload + b"}" == str(frame).encode()
            assert (state.digest, state.source) == (digest(state.payload), "history")
            assert (state.kind, state.eid) == ("reset" if t == 0 else "step", client.eid)


async def test_state_at_says_what_it_cannot_answer(stock_url: str) -> None:
    async with ErrataClient(stock_url) as client:
        with pytest.raises(NoReset):
            await client.state_at(0)
        assert await client.history() == []
        await client.reset()
        first = client.eid
        await client.step({"text": "a"})
        for t in (2, -1):
            with pytest.raises(StateOutOfRange):
                await client.state_at(t)
        for request in (client.state_at(0, "other"), client.history("other")):
            with pytest.raises(UnknownEpisode):
                await request
        await client.reset()
        assert client.t == 0
        assert (await client.state_at(1, first)).kind == "step"
        assert len(await client.history(first)) == 2
    assert (await client.state_at(1, first)).t == 1, "what was received stays readable after close"


async def test_fork_and_reattach_name_the_way_out(stock_url: str) -> None:
    async with ErrataClient(stock_url) as client:
        await client.reset()
        with pytest.raises(NotSupported, match=r"new_session\(\)"):
            await client.fork(0)
        with pytest.raises(NotSupported, match="durable=True"):
            await client.reattach()


async def test_errors_are_typed_and_keep_upstreams_text(stock_url: str) -> None:
    async with GenericEnvClient(stock_url) as stock, ErrataClient(stock_url) as ours:
        await stock.reset()
        await ours.reset()
        for action, cls in [({"text": "fail"}, EnvironmentFailed), ({"nonsense": 1}, InvalidRequest)]:
            with pytest.raises(RuntimeError) as theirs:
                await stock.step(action)
            with pytest.raises(cls) as caught:
                await ours.step(action)
            assert str(caught.value) == str(theirs.value)
            assert f"(code: {caught.value.code})" in str(caught.value)
        assert ours.t == 0
        await ours.step({"text": "a"})
        assert (ours.t, (await ours.state_at(1)).kind) == (1, "step")
        with pytest.raises(InvalidRequest, match="no JSON form"):
            await ours.step({"text": object()})
        await ours.step({"text": "b"})


async def test_typed_clients_get_their_own_classes(stock_url: str) -> None:
    client = ErrataClient(stock_url, action_cls=EchoAction, observation_cls=EchoObservation, state_cls=EchoState)
    async with client:
        await client.reset()
        result = await client.step(EchoAction(text="a"))
        assert result.observation == EchoObservation(text="a", count=1, reward=0.5, metadata={"said": "a"})
        state = await client.state()
        assert isinstance(state, EchoState)
        assert (state.last, state.step_count) == ("a", 1)


async def test_a_given_out_session_of_a_vanilla_server_is_attached_again(stock_url: str) -> None:
    async with ErrataClient(stock_url, durable=True) as client:
        await client.reset()
        await client.step({"text": "a"})
        await client.reattach()
        result = await client.step({"text": "b"})
        assert (result.observation["count"], client.t) == (2, 2)
        assert [s.t for s in await client.history()] == [0, 1, 2]
        await client.end_session()
        with pytest.raises(SessionUnknown):
            await client.reattach()


async def test_a_lost_reply_of_a_vanilla_server_ends_the_episode(stock_url: str) -> None:
    async with ErrataClient(stock_url, durable=True) as client:
        await client.reset()
        client._message_timeout = 1e-9  # the reply cannot be read in time, whatever the machine does
        with pytest.raises(TimeoutError):
            await client.step({"text": "a"})
        client._message_timeout = 60.0
        await client._drain_pending_close_tasks()
        with pytest.raises(SessionLost, match="keeps no record"):
            await client.step({"text": "a"})
        await client.reset()
        assert (await client.step({"text": "b"})).observation["count"] == 1
        await client.end_session()


async def test_a_full_vanilla_server_is_an_error_at_connect() -> None:
    with served(stock_app(max_concurrent_envs=1)) as url:
        async with ErrataClient(url) as first:
            await first.reset()
            for durable in (False, True):
                with pytest.raises(CapacityReached) as caught:
                    await ErrataClient(url, durable=durable).connect()
                assert caught.value.details["max_sessions"] == 1


async def test_no_server_is_a_connection_error() -> None:
    with served(stock_app()) as url:
        pass
    for durable in (False, True):
        with pytest.raises(ConnectionError):
            await ErrataClient(url, durable=durable).connect()


# -- the blocking form


def test_the_blocking_form_has_every_method(stock_url: str) -> None:
    with ErrataClient(stock_url).sync() as client:
        assert isinstance(client, SyncErrataClient)
        assert client.capabilities() is None
        client.reset()
        client.step({"text": "a"})
        assert (client.t, client.session_id, client.state()["step_count"]) == (1, None, 1)
        assert client.state_at(1) == client.history()[1] == client.history(client.eid)[1]
        with pytest.raises(NotSupported):
            client.fork(0)
        sibling = client.new_session()
        assert sibling.reset().observation["text"] == "ready"
        assert (sibling.t, client.t) == (0, 1)
    client.close()


def test_a_with_block_in_sync_code_is_the_blocking_form(stock_url: str) -> None:
    with ErrataClient(stock_url) as client:
        client.reset()
        assert client.state_at(0).kind == "reset"


def test_several_threads_may_share_a_blocking_client(stock_url: str) -> None:
    with ErrataClient(stock_url).sync() as client, ThreadPoolExecutor(8) as threads:
        client.reset()
        together = threading.Barrier(8)

        def work(worker: int) -> list[str]:
            together.wait()
            return [client.step({"text": f"{worker}-{i}"}).observation["text"] for i in range(10)]

        said = list(threads.map(work, range(8)))
        assert said == [[f"{worker}-{i}" for i in range(10)] for worker in range(8)]
        assert client.t == 80
        counts = [json.loads(s.payload)["observation"]["count"] for s in client.history()]
        assert counts == list(range(81))


def test_one_client_is_not_used_in_both_ways(stock_url: str) -> None:
    blocking = ErrataClient(stock_url).sync()
    with blocking:
        blocking.reset()

        async def read() -> None:
            await blocking.async_client.state_at(0)

        with pytest.raises(RuntimeError, match="sync mode"):
            asyncio.run(read())


def test_a_client_made_in_a_loop_that_ended_goes_on_in_another(stock_url: str) -> None:
    async def made() -> ErrataClient:
        client = ErrataClient(stock_url)
        await client.connect()
        return client

    client = asyncio.run(made())

    async def used() -> int | None:
        await client.reset()
        await client.close()
        return client.t

    assert asyncio.run(used()) == 0
