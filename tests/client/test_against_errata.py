"""`ErrataClient` against the real server: the two halves of PROTOCOL A, C and G meet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from loopback import served
from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from websockets.exceptions import ConnectionClosed

from errata_client import Connection, EnvPool, ErrataClient, Reward
from errata_protocol.environment import Snapshot
from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    InvalidRequest,
    NoReset,
    NotAttached,
    SessionUnknown,
    StateOutOfRange,
    UnknownEpisode,
)
from errata_protocol.payload import digest
from errata_server.app import create_app
from errata_server.runtime.registry import RUNTIMES
from errata_server.serve.uvicorn_protocols import BoundedHttp, DetachableSocket
from errata_server.settings import Settings

DEADLY = 999
"""An amount at which the environment kills its server: only for servers in a process of their own."""

LONG = 998
"""An amount at which an observation of more than 1 MiB is returned."""


class AddAction(Action):
    """What to add."""

    amount: int


class SumObservation(Observation):
    """The sum so far."""

    total: int = 0
    note: str = ""


class AddingEnvironment(Environment):
    """Adds up; can be saved and continued."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self.total = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> SumObservation:
        """Start from nothing."""
        self._state, self.total = State(episode_id=episode_id, step_count=0), 0
        return SumObservation(note="é\u2028")

    def step(self, action: AddAction, timeout_s: float | None = None, **kwargs: Any) -> SumObservation:
        """Add."""
        if action.amount < 0:
            raise ValueError("only forward")
        if action.amount == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        self._state.step_count += 1
        self.total += action.amount
        note = "x" * 1024**2 if action.amount == LONG else ""
        return SumObservation(total=self.total, note=note, reward=float(action.amount))

    @property
    def state(self) -> State:
        """The state."""
        return self._state

    async def snapshot(self) -> Snapshot:
        """Save."""
        return Snapshot(json.dumps([self.total, self._state.step_count]).encode())

    async def restore(self, snapshot: Snapshot) -> None:
        """Continue."""
        self.total, steps = json.loads(snapshot.state)
        self._state = State(step_count=steps)


def errata_app(data_dir: Path | None = None) -> Any:
    """Return a real Errata application around the adding environment."""
    runtime = RUNTIMES.shared(Settings(data_dir=data_dir, sandbox="fake"))
    return create_app(
        AddingEnvironment, AddAction, SumObservation, env_name="adding", max_concurrent_envs=32, runtime=runtime
    )


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """Base URL of a real Errata server that keeps its journal in memory."""
    with served(errata_app()) as url:
        yield url


async def test_a_reply_that_is_too_long_is_not_asked_for_again(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be as long the next time."""
    async with ErrataClient(server_url, durable=True, max_message_size_mb=1.0) as client:
        await client.reset()

        async def again() -> None:
            raise AssertionError("another socket was opened")

        monkeypatch.setattr(client, "open_socket", again)
        with pytest.raises(ConnectionClosed, match="1009"):
            await client.step({"amount": LONG})
        monkeypatch.undo()
        await client.reattach()
        assert client.t == 1


async def test_state_at_gives_the_bytes_of_every_delivery(server_url: str) -> None:
    async with ErrataClient(server_url) as client:
        capabilities = await client.capabilities()
        assert capabilities is not None
        assert capabilities.environment == "adding"
        await client.reset()
        for amount in range(1, 20):
            await client.step({"amount": amount})
        received = await client.history()
        assert [s.t for s in received] == list(range(20))
        for state in received:
            replayed = await client.state_at(state.t)
            assert (replayed.payload, replayed.digest, replayed.kind) == (state.payload, state.digest, state.kind)
            assert replayed.digest == digest(replayed.payload)
            assert (replayed.source, state.source) == ("server", "history")
        assert (await client.state())["step_count"] == 19
        eid = client.eid
    fetched = await ErrataClient(server_url).history(eid)
    assert [s.payload for s in fetched] == [s.payload for s in received]
    assert {s.source for s in fetched} == {"server"}


async def test_errors_of_the_server_keep_their_types(server_url: str) -> None:
    async with ErrataClient(server_url) as client:
        with pytest.raises(NoReset):
            await client.state_at(0)
        await client.reset()
        with pytest.raises(EnvironmentFailed, match="only forward"):
            await client.step({"amount": -1})
        with pytest.raises(InvalidRequest):
            await client.step({"nonsense": 1})
        assert client.t == 0
        with pytest.raises(StateOutOfRange) as caught:
            await client.state_at(7)
        assert caught.value.details["deliveries"] == 1
        for request in (client.state_at(0, "nobody"), client.history("nobody"), client.fork(0, eid="nobody")):
            with pytest.raises(UnknownEpisode):
                await request
        with pytest.raises(StateOutOfRange):
            await client.fork(3)
        assert (await client.step({"amount": 5})).reward == 5.0
    with pytest.raises(SessionUnknown):
        await ErrataClient(server_url, session_id="nobody").connect()


async def test_a_fork_goes_its_own_way(server_url: str) -> None:
    client = ErrataClient(server_url, action_cls=AddAction, observation_cls=SumObservation)
    async with client:
        await client.reset()
        for amount in (1, 2, 100):
            await client.step(AddAction(amount=amount))
        child = await client.fork(2)
        result = await child.step(AddAction(amount=3))
        assert (result.observation.total, child.t) == (6, 1)
        assert (await client.step(AddAction(amount=1))).observation.total == 104
        grandchild = await child.fork(1)
        assert (await grandchild.step(AddAction(amount=4))).observation.total == 10
        totals = [json.loads(s.payload)["observation"]["total"] for s in await grandchild.history()]
        assert totals == [0, 1, 3, 6, 10]
        stranger = await ErrataClient(server_url).history(grandchild.eid)
        assert [s.payload for s in stranger] == [s.payload for s in await grandchild.history()]


async def test_an_episode_of_another_session_is_forked_also_by_a_client_without_plain_sockets(server_url: str) -> None:
    async with ErrataClient(server_url) as other:
        await other.reset()
        await other.step({"amount": 2})
        eid = other.eid
    async with ErrataClient(server_url, mux=True) as client:
        await client.reset()
        child = await client.fork(1, eid=eid)
        assert child.t == 0 and child.eid not in (None, eid, client.eid)
        assert (await child.step({"amount": 3})).observation["total"] == 5
        assert (await client.step({"amount": 1})).observation["total"] == 1


async def test_a_durable_session_is_left_and_found_again(server_url: str) -> None:
    async with ErrataClient(server_url, durable=True) as client:
        await client.reset()
        await client.step({"amount": 2})
    async with ErrataClient(server_url, session_id=client.session_id) as other:
        assert (other.eid, other.t) == (client.eid, 1)
        assert (await other.step({"amount": 3})).observation["total"] == 5
        await other.reattach()
        assert (await other.step({"amount": 4})).observation["total"] == 9
        assert [s.t for s in await other.history()] == [0, 1, 2, 3]
        await other.end_session()
        with pytest.raises(SessionUnknown):
            await other.reattach()


async def test_the_journal_outlives_the_server(tmp_path: Path) -> None:
    with served(errata_app(tmp_path)) as url:
        port = int(url.rpartition(":")[2])
        client = ErrataClient(url, durable=True)
        await client.reset()
        await client.step({"amount": 2})
        before = await client.history()
        await client.disconnect()
    with served(errata_app(tmp_path), port):
        await client.reattach()
        assert client.t == 1
        assert (await client.state_at(1)).payload == before[1].payload
        assert (await client.step({"amount": 3})).observation["total"] == 5
        child = await client.fork(1)
        assert (await child.step({"amount": 10})).observation["total"] == 12
        await client.close()


def _server_process(listener: socket.socket, data_dir: Path) -> subprocess.Popen[bytes]:
    """Start a server on a socket that listens already: clients wait in its backlog until the process is up."""
    code = (
        "import socket, sys, uvicorn; from pathlib import Path; from test_against_errata import errata_app;"
        "uvicorn.Server(uvicorn.Config(errata_app(Path(sys.argv[2])), log_level='warning'))"
        ".run(sockets=[socket.socket(fileno=int(sys.argv[1]))])"
    )
    fd = listener.fileno()
    return subprocess.Popen(
        [sys.executable, "-c", code, str(fd), str(data_dir)], pass_fds=[fd], cwd=Path(__file__).parent
    )


async def test_after_kill_9_the_client_sees_that_the_step_did_not_act(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _server_process(listener, tmp_path)
        try:
            client = ErrataClient(url, durable=True, connect_timeout_s=60.0, message_timeout_s=60.0)
            await client.reset()
            await client.step({"amount": 2})
            before = await client.state_at(1)
            client._message_timeout = 1.0  # nobody starts the server again in this time
            with pytest.raises((OSError, ConnectionClosed)):
                await client.step({"amount": DEADLY})
            assert await asyncio.to_thread(server.wait, 30) == -signal.SIGKILL
            client._message_timeout = 60.0
            server = _server_process(listener, tmp_path)
            await client.reattach()
            assert client.t == 1
            assert await client.state_at(1) == before
            assert (await client.step({"amount": 3})).observation["total"] == 5
            assert [s.t for s in await client.history()] == [0, 1, 2]
            await client.close()
        finally:
            server.kill()
            server.wait()


async def test_a_pool_on_one_socket_does_not_notice_kill_9_and_each_step_acts_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = _server_process(listener, tmp_path)
        try:
            async with EnvPool(url, 16, connect_timeout_s=60.0, message_timeout_s=90.0) as pool:
                await pool.reset_batch()
                for n in range(1, 7):
                    batch = asyncio.create_task(pool.step_batch([{"amount": 1}] * 16))
                    if n in (2, 4):
                        await asyncio.sleep(0)  # the batch is handed over
                        server.kill()
                        server.wait()
                        server = _server_process(listener, tmp_path)
                    assert {result.observation["total"] for result in await batch} == {n}
                assert {client.t for client in pool.clients} == {6}
                assert pool.session_stats.resumes >= 32
                child = await pool.clients[0].fork(3)
                assert (await child.step({"amount": 5})).observation["total"] == 8
        finally:
            server.kill()
            server.wait()


async def test_a_ticket_continues_a_session_and_its_late_rewards_are_pushed(server_url: str) -> None:
    rewards: list[Reward] = []
    client = ErrataClient(server_url)
    await client.reset()
    await client.step({"amount": 2})
    async with ErrataClient.resume(server_url, client.ticket(), websocket_ping_interval_s=5.0) as other:
        assert (other.eid, other.t) == (client.eid, 1)
        other.on_reward(rewards.append)
        with pytest.raises(NotAttached):
            await client.step({"amount": 1})
        post = {"t": 1, "value": 0.5, "source": "judge", "reward_id": "r1"}
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{server_url}/episodes/{client.eid}/rewards", json=post)).is_success
        assert (await other.step({"amount": 3})).observation["total"] == 5
        assert [(reward.t, reward.value, reward.source) for reward in rewards] == [(1, 0.5, "judge")]
        assert [reward.reward_id for reward in await other.rewards()] == ["r1"]
        await other.end_session()
    await client.close()


def test_the_blocking_form_replays_and_forks(server_url: str) -> None:
    with ErrataClient(server_url).sync() as client:
        client.reset()
        client.step({"amount": 1})
        client.step({"amount": 1})
        child = client.fork(1)
        assert child.step({"amount": 5}).observation["total"] == 6
        assert child.state_at(0).payload == client.state_at(1).payload
        assert len(child.history()) == 3


# -- typed clients ----------------------------------------------------------------------------------------------------


class AddEnv(EnvClient[AddAction, SumObservation, State]):
    """A client as an environment's author writes it for stock OpenEnv."""

    def _step_payload(self, action: AddAction) -> dict[str, Any]:
        return {"amount": action.amount}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[SumObservation]:
        observation = SumObservation(total=payload["observation"]["total"], note="parsed")
        return StepResult(observation=observation, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


class OursFirst(ErrataClient[AddAction, SumObservation, State], AddEnv):
    """Both, in one order."""


class TheirsFirst(AddEnv, ErrataClient[AddAction, SumObservation, State]):  # type: ignore[misc]
    """And in the other."""


@pytest.mark.parametrize("cls", [OursFirst, TheirsFirst])
@pytest.mark.parametrize("mux", [True, False])
async def test_an_environments_own_client_and_ours_make_a_typed_one(
    server_url: str, cls: type[ErrataClient[AddAction, SumObservation, State]], mux: bool
) -> None:
    async with cls(server_url, mux=mux) as client:
        await client.reset()
        for amount in (1, 2):
            result = await client.step(AddAction(amount=amount))
        assert isinstance(result.observation, SumObservation)
        assert (result.observation.total, result.observation.note, result.reward) == (3, "parsed", 2.0)
        assert isinstance(await client.state(), State)
        child = await client.fork(1)
        assert type(child) is cls
        result = await child.step(AddAction(amount=10))
        assert isinstance(result.observation, SumObservation) and result.observation.total == 11
        assert json.loads((await client.state_at(2)).payload)["observation"]["total"] == 3


async def test_classes_that_are_given_come_before_an_environments_own_client(server_url: str) -> None:
    async with OursFirst(server_url, observation_cls=SumObservation) as client:
        assert (await client.reset()).observation.note == "é\u2028"


def test_a_typed_client_is_typed_in_its_blocking_form_too(server_url: str) -> None:
    with OursFirst(server_url) as client:
        client.reset()
        assert client.step(AddAction(amount=4)).observation.total == 4


# -- stock clients attach -----------------------------------------------------------------------------------------


async def test_a_stock_client_attaches_by_a_url(server_url: str) -> None:
    async with ErrataClient(server_url, durable=True) as client:
        await client.reset()
        await client.step({"amount": 5})
        url = client.attach_url
        assert url is not None and client.session_id is not None
        await client._disconnect_async()
        for total in (7, 9):
            async with GenericEnvClient(base_url=url) as stock:
                assert (await stock.step({"amount": 2})).observation["total"] == total
        async with AddEnv(base_url=url) as typed:
            assert (await typed.step(AddAction(amount=1))).observation.total == 10
        await client.reattach()
        assert client.t == 4
        child = await client.fork(1)
        assert child.attach_url is not None and child.session_id in child.attach_url
        await child._disconnect_async()
        async with GenericEnvClient(base_url=child.attach_url) as stock:
            assert (await stock.step({"amount": 2})).observation["total"] == 7
    assert ErrataClient(server_url).attach_url is None


async def test_a_stock_client_attaches_to_a_fork_made_over_http(server_url: str) -> None:
    async with ErrataClient(server_url) as client:
        await client.reset()
        await client.step({"amount": 5})
        async with httpx.AsyncClient(base_url=server_url) as http:
            body = {"t": 1, "request_id": "r1"}
            forked = (await http.post(f"/episodes/{client.eid}/fork", json=body)).json()
        async with GenericEnvClient(base_url=f"{server_url}/ws?session_id={forked['session_id']}&") as stock:
            assert (await stock.step({"amount": 2})).observation["total"] == 7


# -- one instance -----------------------------------------------------------------------------------------------------


class SingleEnvironment(AddingEnvironment):
    """One instance at a time."""

    SUPPORTS_CONCURRENT_SESSIONS = False


@pytest.fixture
def single_url() -> Iterator[str]:
    """Base URL of a server whose environment takes one session."""
    runtime = RUNTIMES.shared(Settings(sandbox="fake"))
    with served(create_app(SingleEnvironment, AddAction, SumObservation, runtime=runtime)) as url:
        yield url


@pytest.mark.parametrize("mux", [True, False])
async def test_a_second_client_of_one_instance_is_refused_at_once(single_url: str, mux: bool) -> None:
    async with ErrataClient(single_url, mux=mux) as first:
        await first.reset()
        with pytest.raises(CapacityReached, match="SUPPORTS_CONCURRENT_SESSIONS"):
            async with asyncio.timeout(60):
                async with ErrataClient(single_url, mux=mux) as second:
                    await second.reset()
        assert (await first.step({"amount": 1})).observation["total"] == 1
    async with asyncio.timeout(60):
        while True:
            try:
                async with ErrataClient(single_url, mux=mux) as third:
                    await third.reset()
                return
            except CapacityReached:  # the server has not read yet that the first one left
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("mux", [True, False])
async def test_a_fork_of_one_instance_is_refused_at_its_first_step_and_goes_on_after_its_parent(
    single_url: str, mux: bool
) -> None:
    parent = ErrataClient(single_url, mux=mux, durable=not mux)
    await parent.reset()
    await parent.step({"amount": 5})
    child = await parent.fork(1)
    async with asyncio.timeout(60):
        with pytest.raises(CapacityReached, match="close the session that has it first \\(of a fork, the parent\\)"):
            await child.step({"amount": 1})
    assert (await parent.step({"amount": 1})).observation["total"] == 6
    ticket = child.ticket() if mux else None
    session_id = child.session_id
    await parent.end_session()
    if ticket is not None:
        other = ErrataClient.resume(single_url, ticket)
    else:
        other = ErrataClient(single_url, session_id=session_id)
    assert (await other.step({"amount": 1})).observation["total"] == 6
    await other.end_session()


async def test_one_instance_goes_back_to_any_step_by_a_reset(single_url: str) -> None:
    for mux in (True, False):
        async with ErrataClient(single_url, mux=mux) as client:
            await client.reset()
            eid = client.eid
            for amount in (1, 2, 3):
                await client.step({"amount": amount})
            result = await client.reset(injected_state={"episode_id": eid, "t": 2})
            assert result.observation["total"] == 3 and client.eid != eid
            assert (await client.step({"amount": 10})).observation["total"] == 13


async def test_a_message_without_room_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.selector_events._SelectorTransport.max_size", 16 * 1024)  # so that none comes whole
    settings = Settings(sandbox="fake", max_unfinished_bytes=200_000)
    app = create_app(
        AddingEnvironment, AddAction, SumObservation, max_concurrent_envs=8, runtime=RUNTIMES.shared(settings)
    )
    held = app.state.errata.runtime.quotas.unfinished(None)
    with served(app, loop="asyncio", http=BoundedHttp, ws=DetachableSocket) as url:
        async with Connection(url) as connection, ErrataClient(connection=connection) as client:
            await client.reset()
            assert held.take(150_000), "another socket holds so much"
            waiting = asyncio.ensure_future(client.step({"amount": 5, "metadata": {"pad": "a" * 100_000}}))
            async with asyncio.timeout(60):
                while not connection.stats.overloaded:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.01)
            assert not waiting.done()
            held.give(150_000)
            assert (await waiting).observation["total"] == 5
            assert (await client.step({"amount": 1})).observation["total"] == 6
            assert connection.stats.protocol_errors == 0
