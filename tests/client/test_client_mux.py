"""`ErrataClient` on a multiplexed socket: the same methods, many sessions, accidents that nobody notices."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from mux_peer import MuxPeer, Row, peered, until
from websockets.asyncio.server import ServerConnection

from errata_client import Backoff, Connection, Endpoint, ErrataClient, Reward
from errata_client.connections import driver
from errata_protocol.capabilities import ServerLimits
from errata_protocol.errors import (
    CapacityReached,
    ErrataError,
    InvalidRequest,
    JournalUnavailable,
    LocalProtocolError,
    NotAttached,
    NotSupported,
    PreconditionFailed,
    RemoteProtocolError,
    SandboxFailed,
    SessionLost,
    StateOutOfRange,
)
from errata_protocol.mux import (
    AnswerRead,
    Effect,
    EncodedReply,
    FindSession,
    RunRequest,
    ServerProtocol,
    Stored,
)
from errata_protocol.payload import digest
from errata_protocol.shards import shard_of
from tests.machine_speed import SLOWDOWN

FAST = Backoff(first_s=0.01, most_s=0.05, give_up_s=10.0)


@pytest.fixture
async def peer() -> AsyncIterator[MuxPeer]:
    """A multiplexed server."""
    async with peered() as peer:
        yield peer


@pytest.fixture
async def connection(peer: MuxPeer) -> AsyncIterator[Connection]:
    """A connection to it that comes back quickly."""
    async with Connection(peer.url, backoff=FAST) as connection:
        yield connection


# -- the same client


async def test_a_lost_socket_is_replaced_at_the_member_that_has_the_sessions() -> None:
    async with (
        peered(member="a" * 12) as peer,
        Connection(peer.url, backoff=FAST) as connection,
        ErrataClient(connection=connection) as client,
    ):
        await client.reset()
        peer.cut()
        assert (await client.step({"text": "a"})).observation["count"] == 1
        assert peer.paths == ["/ws", "/ws?shard=aaaaaaaaaaaa"]
        assert [shard_of(sid) for sid in peer.sids] == ["a" * 12]


async def test_sessions_end_at_once_where_no_socket_reaches_their_member_and_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeMembers:
        def __init__(self, address: str, headers: Any) -> None:
            assert address == peer.url.replace("http", "ws")

        def known(self, shard: object) -> Endpoint | None:
            return None

        async def of(self, shard: object) -> Endpoint | None:
            assert shard == "a" * 12
            asked.append(None)
            return Endpoint("a" * 12, peer.url, "lost" if len(asked) > 3 else "down")

        async def aclose(self) -> None: ...

    asked: list[None] = []
    monkeypatch.setattr(driver, "Members", FakeMembers)
    async with peered(member="a" * 12) as peer, Connection(peer.url, backoff=FAST) as connection:
        client = ErrataClient[Any, Any, Any](connection=connection)
        await client.reset()
        await peer.stop()
        with pytest.raises(SessionLost, match="its member aaaaaaaaaaaa"):
            await client.step({"text": "a"})
        assert len(asked) > 3, "while it is down, the session waits"


async def test_new_sessions_name_the_member_that_has_the_socket_now() -> None:
    async with peered(member="a" * 12) as peer, Connection(peer.url, backoff=FAST) as connection:
        async with ErrataClient(connection=connection) as client:
            await client.reset()
        peer.config = replace(peer.config, shard="b" * 12)
        peer.lose_memory()
        await until(lambda: not connection.is_open)
        async with ErrataClient(connection=connection) as client:
            await client.reset()
        assert [shard_of(sid) for sid in peer.sids] == ["a" * 12, "b" * 12]


async def test_a_server_of_one_process_is_asked_as_ever(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.cut()
        await client.step({"text": "a"})
        assert peer.paths == ["/ws", "/ws"]


async def test_a_client_takes_the_multiplexed_socket_by_itself(peer: MuxPeer) -> None:
    async with ErrataClient(peer.url) as client:
        first = await client.reset()
        assert first.observation == {"count": 0, "text": ""} and client.eid is not None and client.t == 0
        step = await client.step({"text": "é\u2028"})
        assert step.observation == {"count": 1, "text": "é\u2028"} and step.reward == 1.0 and client.t == 1
        assert (await client.state())["step_count"] == 1
        state = await client.state_at(1)
        assert state.source == "server" and json.loads(state.payload)["observation"]["count"] == 1
        assert [s.t for s in await client.history()] == [0, 1]
        capabilities = await client.capabilities()
        assert capabilities is not None and capabilities.offers("mux")
        assert await client.call_tool("look") == {"count": 2} and client.t == 2
        with pytest.raises(StateOutOfRange):
            await client.state_at(9)
    (row,) = peer.rows.values()
    assert row.status == "closed" and not peer._sockets, "closing the last client ends session and socket"


async def test_clients_of_one_loop_share_a_socket_and_those_with_other_tokens_do_not(peer: MuxPeer) -> None:
    clients = [ErrataClient(peer.url) for _ in range(20)]
    await asyncio.gather(*(client.connect() for client in clients))
    assert len(peer._sockets) == 1 and len(peer.rows) == 20
    other = ErrataClient(peer.url, headers={"Authorization": "Bearer x"})
    await other.reset()
    assert len(peer._sockets) == 2 and peer.headers == [None, "Bearer x"]
    await asyncio.gather(*(client.close() for client in clients))
    assert (await other.step({"text": "a"})).observation["count"] == 1
    await other.close()


async def test_errors_keep_their_types_and_openenvs_text(peer: MuxPeer) -> None:
    async with ErrataClient(peer.url) as client:
        with pytest.raises(InvalidRequest, match="JSON"):
            await client.step({"text": float("nan")})
        await client.reset()
        peer.broken = [ErrataError("asked to fail")]
        with pytest.raises(RuntimeError, match=r"Server error: asked to fail \(code: EXECUTION_ERROR\)"):
            await client.step({"text": "a"})
        assert client.t == 0 and (await client.step({"text": "b"})).observation["count"] == 1


async def test_a_fork_goes_its_own_way_on_the_same_socket(peer: MuxPeer) -> None:
    async with ErrataClient(peer.url) as client:
        await client.reset()
        await client.step({"text": "a"})
        await client.step({"text": "b"})
        child = await client.fork(1)
        assert child.t == 0 and child.eid != client.eid
        assert (await child.step({"text": "c"})).observation["count"] == 2
        assert (await child.state_at(0)).payload == (await client.state_at(1)).payload
        assert (await client.step({"text": "d"})).observation["count"] == 3
        assert len(peer._sockets) == 1
        with pytest.raises(StateOutOfRange):
            await client.fork(99)
    assert [row.status for row in peer.rows.values()] == ["closed", "closed"]


async def test_a_large_payload_comes_in_parts_and_delays_no_other(peer: MuxPeer) -> None:
    async with ErrataClient(peer.url) as one, ErrataClient(peer.url) as other:
        await asyncio.gather(one.reset(), other.reset())
        large = asyncio.create_task(one.step({"text": "x" * 1000, "repeat": 3000}))
        assert (await other.step({"text": "a"})).observation["count"] == 1
        assert len((await large).observation["text"]) == 3_000_000
        await one.step({"text": "y" * 600_000})


async def test_requests_of_several_tasks_run_in_the_order_they_were_made(connection: Connection, peer: MuxPeer) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        replies = await asyncio.gather(*(client.step({"text": str(n)}) for n in range(50)))
        assert [reply.observation["text"] for reply in replies] == [str(n) for n in range(50)]
        assert peer.steps() == ["reset", *(str(n) for n in range(50))]


async def test_doors_that_contradict_each_other_are_refused(peer: MuxPeer, errata_url: str) -> None:
    with pytest.raises(InvalidRequest, match="ticket"):
        ErrataClient(peer.url, session_id="s", mux=True)
    with pytest.raises(InvalidRequest, match="mux=False"):
        ErrataClient(peer.url, connection=Connection(peer.url), mux=False)
    with pytest.raises(NotSupported, match="multiplexed"):
        await ErrataClient(errata_url, mux=True).connect()
    with pytest.raises(NotSupported, match=r"openenv\.mux\.v1"):
        await Connection(errata_url).connect()


# -- sockets come and go


@pytest.mark.parametrize("cuts", [{n} for n in range(1, 10)] + [{3, 4, 5}, {2, 6, 7, 9}])
async def test_wherever_the_socket_is_cut_each_step_acts_once(peer: MuxPeer, cuts: set[int]) -> None:
    peer.cut_at = cuts
    async with Connection(peer.url, backoff=FAST) as connection:
        clients = [ErrataClient(connection=connection) for _ in range(3)]

        async def episode(client: ErrataClient[Any, Any, Any]) -> list[int]:
            await client.reset()
            return [(await client.step({"text": str(n)})).observation["count"] for n in range(5)]

        counts = await asyncio.gather(*map(episode, clients))
        assert counts == [[1, 2, 3, 4, 5]] * 3
        for sid in peer.sids:
            assert peer.steps(sid) == ["reset", "0", "1", "2", "3", "4"]
        assert connection.stats.sockets_lost >= 1
        assert [len(await client.history()) for client in clients] == [6, 6, 6]


async def test_a_restart_that_loses_all_memory_is_not_noticed(peer: MuxPeer, connection: Connection) -> None:
    clients = [ErrataClient(connection=connection) for _ in range(10)]
    await asyncio.gather(*(client.reset() for client in clients))
    for n in range(1, 6):
        steps = [asyncio.create_task(client.step({"text": str(n)})) for client in clients]
        await asyncio.sleep(0)
        peer.lose_memory()
        assert {(await step).observation["count"] for step in steps} == {n}
    assert all(len(peer.steps(sid)) == 6 for sid in peer.sids)
    assert all(client.stats.resumes >= 1 for client in clients)


async def test_a_server_that_is_away_for_a_while_is_waited_for(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        await peer.stop()
        step = asyncio.create_task(client.step({"text": "a"}))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.shield(step)
        peer.come_back()
        await peer.start(peer.port)
        assert (await step).observation["count"] == 1
        assert peer.steps() == ["reset", "a"]


async def test_a_half_open_socket_is_noticed_by_its_pings(peer: MuxPeer) -> None:
    pings = {"websocket_ping_interval_s": 0.05, "websocket_ping_timeout_s": 0.1}
    async with Connection(peer.url, backoff=FAST, **pings) as connection, ErrataClient(connection=connection) as client:
        await client.reset()
        peer.go_half_open()
        async with asyncio.timeout(60):
            assert (await client.step({"text": "a"})).observation["count"] == 1
        assert connection.stats.connects == 2 and peer.steps() == ["reset", "a"]


async def test_a_server_that_does_not_come_back_ends_the_wait_and_not_the_session(peer: MuxPeer) -> None:
    backoff = Backoff(first_s=0.01, most_s=0.02, give_up_s=0.2)
    async with Connection(peer.url, backoff=backoff) as connection, ErrataClient(connection=connection) as client:
        await client.reset()
        await peer.stop()
        with pytest.raises(ConnectionError, match=r"no connection for 0\.2 s"):
            await client.step({"text": "a"})
        peer.come_back()
        await peer.start(peer.port)
        assert (await client.step({"text": "b"})).observation["count"] == 1
        assert peer.steps() == ["reset", "b"], "what its caller was told had failed is not sent behind his back"


async def test_a_server_that_accepts_sockets_and_closes_them_is_waited_for_and_given_up(
    peer: MuxPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    monkeypatch.setattr("errata_client.connections.driver.SHORT_S", 60.0)  # also on a busy machine

    async def close_at_once(socket: ServerConnection) -> None:
        received.append(len(json.loads(await socket.recv())))
        await socket.close(1013, "the server is stopping")

    backoff = Backoff(first_s=0.05, most_s=0.05, give_up_s=0.3)
    async with Connection(peer.url, backoff=backoff) as connection, ErrataClient(connection=connection) as client:
        await client.reset()
        await peer.stop()
        peer.come_back()
        serve, peer._serve = peer._serve, close_at_once  # type: ignore[method-assign] # a server behind a full proxy
        await peer.start(peer.port)
        async with asyncio.timeout(60):
            with pytest.raises(
                ConnectionError,
                match=r"no connection for 0\.3 s: the server closed \d+ sockets .*the server is stopping",
            ):
                await client.step({"text": "a"})
        assert len(set(received)) == 1, "each socket reads the capabilities once"
        await peer.stop()
        peer._serve = serve  # type: ignore[method-assign] # as above
        await peer.start(peer.port)
        assert (await client.step({"text": "b"})).observation["count"] == 1
        assert peer.steps() == ["reset", "b"]


async def test_what_cannot_be_reached_at_first_is_an_error_at_once(peer: MuxPeer) -> None:
    await peer.stop()
    async with asyncio.timeout(60):
        with pytest.raises(ConnectionError, match="Failed to connect"):
            await ErrataClient(peer.url).connect()
        with pytest.raises(ConnectionError, match="Failed to connect"):
            await ErrataClient(connection=Connection(peer.url)).connect()
    await peer.start(peer.port)


def test_waits_between_attempts_are_random_up_to_a_bound_that_doubles() -> None:
    backoff = Backoff(first_s=0.1, most_s=1.0)
    assert backoff.delay(0) == 0.0
    for failures, bound_s in ((1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (5000, 1.0)):
        longest_s = max(backoff.delay(failures) for _ in range(500))
        assert 0.8 * bound_s < longest_s <= bound_s


def test_waits_change_nothing_of_what_a_seeded_program_draws() -> None:
    before = random.getstate()
    Backoff().delay(3)
    assert random.getstate() == before


async def test_a_server_that_goes_away_is_left_when_its_replies_are_here(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.hold()
        running = asyncio.create_task(client.step({"text": "a"}))
        await peer.arrived.acquire()
        peer.go_away(0.05)
        await asyncio.sleep(0)
        later = asyncio.create_task(client.step({"text": "b"}))
        peer.release()
        assert (await running).observation["count"] == 1
        peer.come_back()
        assert (await later).observation["count"] == 2
        assert connection.stats.goaways == 1 and connection.stats.sockets_lost == 0
        assert peer.steps() == ["reset", "a", "b"]


async def test_a_frame_that_breaks_the_protocol_costs_the_socket_and_nothing_else(
    peer: MuxPeer, connection: Connection
) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.garble = [lambda frame: frame.replace(b"count", b"COUNT"), lambda frame: b"{"]
        assert (await client.step({"text": "a"})).observation == {"count": 1, "text": "a"}
        assert connection.stats.protocol_errors >= 1 and peer.steps() == ["reset", "a"]


async def test_a_server_that_keeps_breaking_the_protocol_is_given_up(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.garble = [lambda frame: b"{"] * 100
        with pytest.raises(RemoteProtocolError):
            await client.step({"text": "a"})
        peer.garble = []
        assert (await client.step({"text": "b"})).observation["text"] == "b"


async def test_connect_waits_for_a_socket_where_no_session_needed_one(
    peer: MuxPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0

    class Slow(Backoff):
        def delay(self, failures: int) -> float:
            return 0.2

    async with Connection(peer.url, backoff=Slow()) as connection:
        start = connection._start

        def count() -> None:
            nonlocal turns
            turns += 1
            assert turns < 100, "connect() never lets the event loop run"
            start()

        (socket,) = peer._sockets.values()
        await socket.send("{")
        await until(lambda: connection.stats.protocol_errors == 1)
        monkeypatch.setattr(connection, "_start", count)
        assert not connection.is_open
        await connection.connect()
        assert connection.is_open and connection.stats.connects == 2


async def test_frames_that_come_twice_are_taken_once(peer: MuxPeer, connection: Connection) -> None:
    peer.twice = True
    rewards: list[Reward] = []
    async with ErrataClient(connection=connection) as client:
        client.on_reward(rewards.append)
        await client.reset()
        for n in range(1, 5):
            assert (await client.step({"text": "a"})).observation["count"] == n
            peer.push(peer.sids[0], float(n))
        assert len(await client.rewards()) == 4
    assert [reward.value for reward in rewards] == [1.0, 2.0, 3.0, 4.0]


# -- refusals and infrastructure


async def test_refusals_are_waited_out_and_counted(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.protocol.refuse(JournalUnavailable("no space", retry_after=0.02))
        steps = [asyncio.create_task(client.step({"text": str(n)})) for n in range(5)]
        await until(lambda: client.stats.refused["JOURNAL_UNAVAILABLE"] > 0)
        peer.protocol.refuse(None)
        assert [(await step).observation["count"] for step in steps] == [1, 2, 3, 4, 5]
        assert peer.steps() == ["reset", "0", "1", "2", "3", "4"]


async def test_a_refusal_that_lasts_longer_than_the_deadline_is_what_the_caller_hears(peer: MuxPeer) -> None:
    async with ErrataClient(peer.url, message_timeout_s=0.15 * SLOWDOWN) as client:
        await client.reset()
        peer.protocol.refuse(JournalUnavailable("no space", retry_after=0.25 * SLOWDOWN))
        with pytest.raises(JournalUnavailable):
            await client.step({"text": "a"})
        peer.protocol.refuse(None)
        client._message_timeout = 60.0
        assert (await client.step({"text": "b"})).observation["count"] == 1
        assert peer.steps() == ["reset", "b"], "the refused one had no effect, then or later"


async def test_bounds_of_the_server_are_kept_to() -> None:
    limits = ServerLimits(in_flight_session=2, in_flight_socket=4, max_elements=8)
    async with peered(limits) as narrow, Connection(narrow.url, backoff=FAST) as connection:
        clients = [ErrataClient(connection=connection) for _ in range(6)]
        for client in clients:
            await client.reset()
        steps = [client.step({"text": str(n)}) for n in range(20) for client in clients]
        await asyncio.gather(*steps)
        assert all(narrow.steps(sid) == ["reset", *(str(n) for n in range(20))] for sid in narrow.sids)
        assert not any(client.stats.refused for client in clients), "none had to be refused"


async def test_a_full_server_is_asked_again_until_the_connect_timeout(peer: MuxPeer) -> None:
    peer.capacity = 1
    async with ErrataClient(peer.url) as first:
        await first.reset()
        with pytest.raises(CapacityReached):
            await ErrataClient(peer.url, connect_timeout_s=0.2 * SLOWDOWN).connect()
        patient = ErrataClient(peer.url)
        connecting = asyncio.ensure_future(patient.connect())
        await until(lambda: patient.stats.refused["CAPACITY_REACHED"] > 0)
        peer.capacity = 5
        await connecting
        await patient.close()


async def test_a_failure_that_was_rolled_back_is_tried_again_and_counted(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.broken = [SandboxFailed("gone", retry_after=0.01), SandboxFailed("gone", retry_after=0.01)]
        assert (await client.step({"text": "a"})).observation["count"] == 1
        assert client.stats.retried == {"SANDBOX_FAILED": 2} and peer.steps() == ["reset", "a"]
        peer.broken = [SandboxFailed("gone", retry_after=0.01)] * 3
        with pytest.raises(SandboxFailed):
            await client.step({"text": "b"})
        assert client.t == 1 and (await client.step({"text": "c"})).observation["count"] == 2
        peer.broken = [SandboxFailed("gone", retry_after=0.01)]
        steps = asyncio.gather(*(client.step({"text": t}) for t in "de"), return_exceptions=True)
        failed, acted = await steps
        assert isinstance(failed, SandboxFailed), "what was asked behind it has acted: it is not tried at another t"
        assert acted.observation["text"] == "e"


async def test_what_is_tried_again_can_still_be_cancelled(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.broken = [SandboxFailed("gone", retry_after=2.0)]
        step = asyncio.create_task(client.step({"text": "a"}))
        await until(lambda: client.stats.retried["SANDBOX_FAILED"] == 1)
        peer.hold()
        received = peer.frames_received
        running = asyncio.create_task(client.step({"text": "b"}))
        await peer.arrived.acquire()
        await until(lambda: peer.frames_received == received + 2)  # the first step again, behind this one
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await connection.read("capabilities")  # the server has processed all that was sent before
        peer.release()
        await running
        (row,) = peer.rows.values()
        await until(lambda: len(row.requests) == 4)
        assert json.loads(row.requests[3].reply.data)["code"] == "CANCELLED"
        assert (await client.step({"text": "c"})).observation["count"] == 2
        assert peer.steps() == ["reset", "b", "c"]


async def test_a_fork_that_is_tried_again_has_its_child(peer: MuxPeer, connection: Connection) -> None:
    fork = peer._fork

    def fail_once(row: Row, effect: RunRequest) -> EncodedReply:
        peer._fork = fork  # type: ignore[method-assign] # only the first one fails
        return EncodedReply("error", json.dumps(SandboxFailed("gone", retry_after=0.01).to_wire()).encode())

    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer._fork = fail_once  # type: ignore[method-assign] # as above
        child = await client.fork(0)
        assert client.stats.retried == {"SANDBOX_FAILED": 1}
        assert (await child.step({"text": "a"})).observation["count"] == 1
        await child.close()


async def test_what_is_tried_again_does_not_act_where_another_request_moved_the_session(
    peer: MuxPeer, connection: Connection
) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.broken = [SandboxFailed("gone", retry_after=0.2)]
        step = asyncio.create_task(client.step({"text": "a"}))
        await until(lambda: client.stats.retried["SANDBOX_FAILED"] == 1)
        await client.step({"text": "b"})
        with pytest.raises(PreconditionFailed):
            await step
        assert client.t == 1 and peer.steps() == ["reset", "b"]


async def test_a_lost_session_is_told_and_never_replaced_in_silence(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.rows.clear()
        peer.lose_memory()
        with pytest.raises(SessionLost):
            await client.step({"text": "a"})
        with pytest.raises(SessionLost):
            await client.step({"text": "a"})
        assert peer.steps() == ["reset"]
        assert (await client.reset()).observation["count"] == 0, "a reset after it was told begins on purpose"
        assert len(peer.rows) == 1 and client.t == 0


async def test_a_loss_between_calls_is_told_to_the_next_one_even_a_reset(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.rows.clear()
        peer.lose_memory()
        session = client._mux.session
        assert session is not None
        await until(lambda: session.ended is not None)
        with pytest.raises(SessionLost):
            await client.reset()
        await client.reset()


# -- deadlines and cancellation


async def test_a_deadline_costs_the_one_request(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client, ErrataClient(connection=connection) as other:
        await asyncio.gather(client.reset(), other.reset())
        peer.hold()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05 * SLOWDOWN):
                await client.step({"text": "slow"})
        behind = asyncio.create_task(client.step({"text": "next"}))
        peer.release()
        assert (await behind).observation == {"count": 2, "text": "next"}
        assert client.t == 2 and (await client.state_at(1)).kind == "step"
        assert (await other.step({"text": "a"})).observation["count"] == 1
        assert connection.stats.connects == 1 and client.stats.abandoned == 1


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["timed-out", "cancelled"])
async def test_a_close_behind_a_running_step_ends_the_session_though_nobody_waits_for_it(
    peer: MuxPeer, connection: Connection, is_cancelled: bool
) -> None:
    client = ErrataClient(connection=connection)
    await client.reset()
    peer.hold()
    step = asyncio.create_task(client.step({"text": "slow"}))
    await peer.arrived.acquire()
    step.cancel()
    received = peer.frames_received
    session = client._mux.session
    assert session is not None
    closing = asyncio.create_task(session.end(timeout_s=60.0 if is_cancelled else 0.05))
    if is_cancelled:
        await until(lambda: len(session._waiting) == 2 and peer.frames_received > received)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    else:
        await closing
    assert connection.sessions == 0
    await connection.read("capabilities")  # the server has processed all that was sent before
    peer.release()
    (row,) = peer.rows.values()
    await until(lambda: len(row.requests) == 3)
    assert row.status == "closed" and peer.steps() == ["reset", "slow"]
    await client.close()


async def test_what_had_not_started_is_taken_back(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.hold()
        running = asyncio.create_task(client.step({"text": "running"}))
        await peer.arrived.acquire()
        received = peer.frames_received
        waiting = asyncio.create_task(client.step({"text": "waiting"}))
        await until(lambda: peer.frames_received == received + 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: peer.frames_received == received + 2)
        peer.release()
        await running
        assert (await client.step({"text": "after"})).observation["count"] == 2
        assert peer.steps() == ["reset", "running", "after"]


@pytest.mark.parametrize("ending", ["cancelled", "timed-out"])
async def test_the_child_of_a_fork_that_nobody_waits_for_is_ended(
    peer: MuxPeer, connection: Connection, ending: str
) -> None:
    timeout_s = 60.0 if ending == "cancelled" else 0.1
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        client._message_timeout = timeout_s
        peer.hold()
        forking = asyncio.create_task(client.fork(0))
        await peer.arrived.acquire()
        if ending == "cancelled":
            forking.cancel()
        with pytest.raises(asyncio.CancelledError if ending == "cancelled" else TimeoutError):
            await forking
        client._message_timeout = 60.0
        peer.release()
        await until(lambda: len(peer.rows) == 2 and peer.rows[peer.sids[1]].status == "closed")
        await until(lambda: connection.sessions == 1)
        assert list(connection.machine.sessions) == peer.sids[:1], "it is not resumed with each socket"
        assert (await client.step({"text": "a"})).observation["count"] == 1


async def test_a_fork_cancelled_while_its_child_is_attached_leaves_no_session(
    peer: MuxPeer, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, found = asyncio.Event(), peer._find

    def busy(effect: FindSession) -> Stored | ErrataError:
        asked.set()
        return JournalUnavailable("busy", retry_after=0.01)

    async with ErrataClient(connection=connection) as client:
        await client.reset()
        monkeypatch.setattr(peer, "_find", busy)
        forking = asyncio.create_task(client.fork(0))
        await asked.wait()
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        monkeypatch.setattr(peer, "_find", found)
        await until(lambda: peer.rows[peer.sids[1]].status == "closed" and connection.sessions == 1)


async def test_closing_the_client_ends_the_child_of_a_cancelled_fork_too(peer: MuxPeer) -> None:
    async with ErrataClient(peer.url) as client:
        await client.reset()
        peer.hold()
        forking = asyncio.create_task(client.fork(0))
        await peer.arrived.acquire()
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        peer.release()
    assert [row.status for row in peer.rows.values()] == ["closed", "closed"]


async def test_reattach_waits_for_the_outcome_of_an_abandoned_step(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection, message_timeout_s=0.1 * SLOWDOWN) as client:
        await client.reset()
        peer.hold()
        with pytest.raises(TimeoutError, match="reattach"):
            await client.step({"text": "slow"})
        with pytest.raises(TimeoutError, match="without outcome"):
            await client.reattach()
        assert client.t == 0
        peer.release()
        assert (await client.reattach()).t == 1


async def test_a_step_cancelled_while_its_server_is_away_is_not_sent_later(
    peer: MuxPeer, connection: Connection
) -> None:
    async with ErrataClient(connection=connection) as client:
        await client.reset()
        peer.silent = True
        received = peer.frames_received
        step = asyncio.create_task(client.step({"text": "a"}))
        await until(lambda: peer.frames_received > received)
        await peer.stop()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        peer.silent = False
        peer.come_back()
        await peer.start(peer.port)
        assert (await client.step({"text": "b"})).observation["count"] == 1
        assert peer.steps() == ["reset", "b"]


# -- more than one process


async def test_a_ticket_continues_the_session_elsewhere_and_fences_the_first(peer: MuxPeer) -> None:
    async with Connection(peer.url, backoff=FAST) as one, Connection(peer.url, backoff=FAST) as two:
        first = ErrataClient(connection=one)
        with pytest.raises(NotSupported):
            first.ticket()
        await first.reset()
        await first.step({"text": "a"})
        ticket = json.loads(json.dumps(first.ticket()))
        await first.step({"text": "b"})
        second = ErrataClient.resume(peer.url, ticket, connection=two)
        await second.connect()
        assert (second.eid, second.t) == (first.eid, 2), "the reply after the ticket is delivered to who resumes"
        with pytest.raises(NotAttached, match="reattach"):
            await first.step({"text": "c"})
        assert (await second.step({"text": "d"})).observation["count"] == 3
        await first.reattach()
        assert first.t == 3 and (await first.step({"text": "e"})).observation["count"] == 4
        await second.close()
        await first.close()
        assert peer.rows[ticket["sid"]].status == "open", "who gave a ticket away leaves the session"
        third = ErrataClient.resume(peer.url, ticket)
        await third.connect()
        assert third.t == 4
        await third.end_session()
        assert peer.rows[ticket["sid"]].status == "closed"


async def test_a_session_taken_over_while_its_client_had_no_socket_is_left_to_the_other_process(peer: MuxPeer) -> None:
    async with Connection(peer.url, backoff=FAST) as one, Connection(peer.url, backoff=FAST) as two:
        first = ErrataClient(connection=one)
        await first.reset()
        ticket = first.ticket()
        first_dial = one.dial
        one.dial = replace(first_dial, ws_url="ws://127.0.0.1:1/ws")  # the first process has no network for a while
        peer.cut()
        await until(lambda: not one.is_open)
        second = ErrataClient.resume(peer.url, ticket, connection=two)
        await second.connect()
        assert (await second.step({"text": "a"})).observation["count"] == 1
        assert one.stats.connects == 1
        one.dial = first_dial
        with pytest.raises(NotAttached, match="reattach"):
            await first.step({"text": "b"})
        assert (await second.step({"text": "c"})).observation["count"] == 2
        await first.reattach()
        assert first.t == 2 and (await first.step({"text": "d"})).observation["count"] == 3
        assert peer.steps() == ["reset", "a", "c", "d"]
        await second.close()
        await first.close()


@pytest.mark.parametrize("ticket", [{}, {"version": 2}, "x", {"version": 1, "sid": "a", "key": "b", "last": 0}])
def test_what_is_no_ticket_is_refused(ticket: Any) -> None:
    with pytest.raises(InvalidRequest, match="ticket"):
        ErrataClient.resume("http://127.0.0.1:1", ticket)


async def test_a_step_running_while_another_process_takes_over_is_told(peer: MuxPeer, connection: Connection) -> None:
    async with ErrataClient(connection=connection) as client, Connection(peer.url) as other:
        await client.reset()
        ticket = client.ticket()
        peer.hold()
        step = asyncio.create_task(client.step({"text": "a"}))
        await peer.arrived.acquire()
        adopted = ErrataClient.resume(peer.url, ticket, connection=other)
        await adopted.connect()
        with pytest.raises(NotAttached):
            await step
        peer.release()
        await adopted.reattach()
        assert (await adopted.step({"text": "b"})).observation["count"] == 2


@pytest.mark.parametrize("ending", ["close", "taken over"])
async def test_a_read_that_waits_fails_when_its_session_is_closed_or_taken_over(
    peer: MuxPeer, connection: Connection, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    asked, perform = asyncio.Event(), peer._perform

    async def perform_no_state(protocol: ServerProtocol, effect: Effect) -> None:
        if isinstance(effect, AnswerRead) and effect.kind == "state":
            asked.set()  # and never answer
        else:
            await perform(protocol, effect)

    monkeypatch.setattr(peer, "_perform", perform_no_state)
    client = ErrataClient(connection=connection)
    await client.reset()
    ticket = client.ticket()
    reading = asyncio.create_task(client.state())
    await asked.wait()
    async with Connection(peer.url, backoff=FAST) as other:
        if ending == "close":
            await client.close()
        else:
            await ErrataClient.resume(peer.url, ticket, connection=other).connect()
        async with asyncio.timeout(60):
            with pytest.raises(LocalProtocolError if ending == "close" else NotAttached, match="session"):
                await reading
        assert connection.machine.reads == {} and connection._reads == {}
    await client.close()


async def test_a_group_is_ended_from_anywhere(peer: MuxPeer) -> None:
    group = "trainer-7-0123456789abcdef"
    async with Connection(peer.url, group=group) as dead, Connection(peer.url) as watcher:
        clients = [ErrataClient(connection=dead) for _ in range(3)]
        await asyncio.gather(*(client.reset() for client in clients))
        assert await watcher.close_group(group) == 3
        with pytest.raises(ErrataError, match="SESSION_CLOSED"):
            await clients[0].step({"text": "a"})


async def test_closing_a_connection_ends_its_sessions_at_once_but_for_those_to_stay(peer: MuxPeer) -> None:
    connection = Connection(peer.url)
    clients = [ErrataClient(connection=connection) for _ in range(3)]
    await asyncio.gather(*(client.reset() for client in clients))
    ticket = clients[1].ticket()
    step = asyncio.create_task(clients[0].step({"text": "a"}))
    await step
    await connection.aclose()
    assert {sid: row.status for sid, row in peer.rows.items() if row.status == "open"} == {ticket["sid"]: "open"}
    with pytest.raises(LocalProtocolError, match="closed"):
        await clients[1].step({"text": "b"})


async def test_a_connection_stays_in_its_loop(peer: MuxPeer) -> None:
    connection = Connection(peer.url)
    await connection.connect()

    def elsewhere() -> None:
        with pytest.raises(LocalProtocolError, match="another event loop"):
            asyncio.run(connection.connect())

    await asyncio.to_thread(elsewhere)
    with pytest.raises(LocalProtocolError, match="use aclose"):
        connection.close()  # it would wait for this loop, which it stops
    await connection.aclose()
    await connection.aclose()
    connection.close()


# -- late rewards


async def test_late_rewards_are_pushed_once_in_order_across_lost_sockets(peer: MuxPeer, connection: Connection) -> None:
    rewards: list[Reward] = []
    async with ErrataClient(connection=connection) as client:
        client.on_reward(rewards.append)
        await client.reset()
        (sid,) = peer.sids
        for n in range(30):
            peer.push(sid, float(n))
            if n % 7 == 3:
                peer.cut()
            await asyncio.sleep(0.002)
        await until(lambda: len(rewards) == 30)
        assert [reward.value for reward in rewards] == [float(n) for n in range(30)]
        assert await client.rewards() == rewards and client.stats.rewards == 30
        client.on_reward(None)
        with pytest.raises(ErrataError):
            await client.rewards("nobody")


async def test_a_callback_that_raises_costs_nothing_but_itself(peer: MuxPeer, connection: Connection) -> None:
    def refuse(reward: Reward) -> None:
        raise ValueError("no")

    async with ErrataClient(connection=connection) as client:
        client.on_reward(refuse)
        await client.reset()
        peer.push(peer.sids[0], 1.0)
        assert (await client.step({"text": "a"})).observation["count"] == 1
        assert client.stats.rewards == 1


# -- what cannot be read


ODD = {
    "half a pair": (b'{"observation":{"text":"\\ud83d on"},"reward":1.0,"done":false}', "\ud83d on"),
    "half a pair in a key": (b'{"observation":{"\\udfff":1,"text":"x"},"reward":1.0,"done":false}', "x"),
    "an integer beyond 64 bits": (b'{"observation":{"n":%s,"text":"x"},"reward":1.0,"done":false}' % (b"9" * 400), "x"),
    "5,000 levels": (b'{"observation":{"text":' + b"[" * 5000 + b"]" * 5000 + b'},"reward":1.0,"done":false}', None),
    "an integer of 5,000 digits": (b'{"observation":{"n":%s},"reward":1.0,"done":false}' % (b"9" * 5000), None),
    "no JSON": (b'{"observation":{"text":tru},"reward":1.0,"done":false}', None),
    "a control character": (b'{"observation":{"text":"\x01"},"reward":1.0,"done":false}', None),
    "a list": (b"[1]", None),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("as_error", [False, True], ids=["a payload", "an error"])
async def test_what_one_session_cannot_read_is_its_own_error(
    peer: MuxPeer, connection: Connection, odd: str, as_error: bool
) -> None:
    payload, text = ODD[odd]
    reply = peer._reply

    def odd_reply(row: Row, effect: RunRequest) -> EncodedReply:
        made = reply(row, effect)
        if b'"odd"' not in effect.data:
            return made
        if as_error:
            return EncodedReply("error", b'{"code":"EXECUTION_ERROR","message":"odd","details":%s}' % payload)
        return EncodedReply(made.type, payload, made.eid, made.t, digest(payload), made.kind)

    peer._reply = odd_reply  # type: ignore[method-assign]
    clients = [ErrataClient(connection=connection) for _ in range(4)]
    await asyncio.gather(*(client.reset() for client in clients))
    asked = [clients[0].step({"text": "odd"}), *(client.step({"text": "hello"}) for client in clients[1:])]
    found, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert [result.observation["text"] for result in others] == ["hello"] * 3  # type: ignore[union-attr]
    if as_error or text is None:
        assert isinstance(found, ErrataError), found
    again = await asyncio.gather(*(client.step({"text": "again"}) for client in clients))
    assert [result.observation["text"] for result in again] == ["again"] * 4
    assert connection.stats.protocol_errors == 0 and connection.stats.connects == 1
    if text is not None and not as_error:
        assert found.observation["text"] == text  # type: ignore[union-attr]
    await asyncio.gather(*(client.close() for client in clients))
