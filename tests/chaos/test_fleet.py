"""``errata serve --workers``: real processes behind one address, of which some are killed, stopped and forgotten.

One fleet serves most tests of this file: its start costs seconds. What needs no process is in
``tests/server/test_fleet_*.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openenv.core.generic_client import GenericEnvClient
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_plain
from websockets.typing import Subprotocol

from errata_client import Backoff, Connection, Endpoint, EnvPool, ErrataClient
from errata_client.fleet import members
from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import CapacityReached, JournalUnavailable, ServiceError, StateOutOfRange, UnknownEpisode
from errata_protocol.labels import Labels
from errata_protocol.shards import shard_of
from errata_server.process import ServerProcess
from errata_server.runtime.shard_dirs import name_of, shards
from tests.server.worker_processes import children_of, worker_of

from .storm import Unaware

TARGET = "tests.server.environments:CountEnvironment"
WORKERS = 3
GIVE_UP_S = 120.0
STEPS = 25
KILLS = 5


class Fleet:
    """A server with several workers.

    Args:
        server: The process that was started, which is the supervisor.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.url = server.url
        self.ws = server.url.replace("http", "ws") + "/ws"

    @property
    def probes(self) -> str:
        """URL of the health port."""
        found = re.search(r"probes are answered on port (\d+)", "".join(self.server.log))
        assert found is not None, self.server.log
        return f"http://127.0.0.1:{found[1]}"

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run, in the order of their starts."""
        return children_of(self.server.process.pid)

    def get(self, path: str, **given: Any) -> Any:
        answer = httpx.get(f"{self.url}{path}", timeout=GIVE_UP_S, **given)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def episodes(self, **given: Any) -> list[dict[str, Any]]:
        """Return all episodes, newest first, in pages of two."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = self.get("/episodes", params={"limit": 2, **given, **({"cursor": cursor} if cursor else {})})
            found += page["episodes"]
            if (cursor := page["next"]) is None:
                return found

    def wait_for_all(self) -> None:
        until(lambda: len(self.pids) == WORKERS and len(self.scraped()) == WORKERS)

    def wait_for_other(self, pid: int) -> None:
        until(lambda: pid not in self.pids and len(self.pids) == WORKERS)

    def all_up(self) -> bool:
        """Return whether all workers are given connections."""
        return {member["state"] for member in self.get("/fleet")["members"]} == {"up"}

    def relayed(self) -> float:
        """Return how many frames the workers have passed on to each other."""
        text = httpx.get(f"{self.url}/metrics", timeout=GIVE_UP_S).text
        return sum(float(count) for count in re.findall(r"errata_relayed_frames_total\{.*\} (\S+)", text))

    def scraped(self) -> set[str]:
        text = httpx.get(f"{self.url}/metrics", timeout=GIVE_UP_S).text
        return set(re.findall(r'errata_ready\{worker="(\d)"\} 1', text))


def until(holds: Any) -> None:
    end = time.monotonic() + GIVE_UP_S
    while not holds():
        if time.monotonic() >= end:
            pytest.fail("it did not come about")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def fleet(data_dir: Path) -> Iterator[Fleet]:
    # Without a seed the supervisor would start twice, to choose one.
    env = {"PYTHONHASHSEED": "7", "ERRATA_HEALTH_PORT": "0"}
    with ServerProcess(TARGET, data_dir, "--workers", str(WORKERS), "--no-fsync", env=env, start_s=120) as server:
        yield Fleet(server)
        log = "".join(server.log)
    assert server.process.returncode == 0, log


async def played(
    client: ErrataClient[Any, Any, Any], steps: int, pause_s: float = 0.0, begun: asyncio.Barrier | None = None
) -> str:
    """Play an episode whose observations count the steps, and return its eid."""
    await client.reset()
    if begun is not None:
        await begun.wait()
    for n in range(1, steps + 1):
        result = await client.step({"n": 1})
        assert result.observation["n"] == n and client.t == n, "a step acted twice, or not at all"
        await asyncio.sleep(pause_s)
    return str(client.eid)


async def played_plain(url: str, count: int, steps: int) -> list[str]:
    """Play episodes on plain sockets, one after the other, and return their eids."""
    return [await played(ErrataClient[Any, Any, Any](url, mux=False), steps) for _ in range(count)]


def shard_names(data_dir: Path) -> list[str]:
    return [(directory / "shard").read_text().strip() for directory in shards(data_dir, WORKERS)]


async def stormed(url: str, strike: Callable[[], Awaitable[None]], *, plain: int) -> list[str]:
    """Let clients that know no fleet, those that do, and some on plain sockets step meanwhile; return their eids."""
    connections = [*(Unaware(url) for _ in range(3)), *(Connection(url) for _ in range(2))]
    clients = [ErrataClient[Any, Any, Any](connection=connections[n // 2]) for n in range(10)]
    clients += [ErrataClient[Any, Any, Any](url, mux=False, durable=True) for _ in range(plain)]
    begun = asyncio.Barrier(len(clients) + 1)
    playing = asyncio.gather(*(played(client, STEPS, 0.05, begun) for client in clients))
    await begun.wait()  # a first connection that is reset is an error to its client
    await strike()
    eids = await playing
    for client in clients:
        state = await client.state()
        assert (state["step_count"] if isinstance(state, dict) else state.step_count) == STEPS
        await client.close()
    for connection in connections:
        await connection.aclose()
    return eids


@pytest.mark.storm
def test_every_step_acts_once_though_workers_are_killed(fleet: Fleet, data_dir: Path) -> None:
    async def strike() -> None:
        chosen = random.Random(7)
        for _ in range(KILLS):
            victim = chosen.choice(fleet.pids)
            os.kill(victim, signal.SIGKILL)
            await asyncio.to_thread(fleet.wait_for_other, victim)

    eids = asyncio.run(stormed(fleet.url, strike, plain=4))
    fleet.wait_for_all()
    found = {one["eid"]: one["deliveries"] for one in fleet.episodes()}
    assert found == dict.fromkeys(eids, STEPS + 1), "no episode is missing, and none was begun twice"
    named = {re.fullmatch(r"ep_sh-([a-z0-9]{12})-.+", eid)[1] for eid in eids}  # type: ignore[index]
    assert named <= set(shard_names(data_dir)) and len(named) > 1


@pytest.mark.storm
async def test_a_client_comes_back_to_the_worker_of_its_sessions(fleet: Fleet) -> None:
    """So none of its frames is passed on from one worker to another, however often its socket is lost."""
    fleet.wait_for_all()
    relayed = fleet.relayed()
    connection = Connection(fleet.url, backoff=Backoff(most_s=0.1))
    clients = [ErrataClient[Any, Any, Any](connection=connection) for _ in range(4)]
    for client in clients:
        await client.reset()
    for n in range(1, 7):
        assert connection._ws is not None
        connection._ws.transport.abort()
        for client in clients:
            assert (await client.step({"n": 1})).observation["n"] == n
    assert connection.stats.connects == 7
    assert fleet.relayed() == relayed
    assert len({shard_of(str(client.eid)) for client in clients}) == 1
    unaware = Unaware(fleet.url, backoff=Backoff(most_s=0.1))
    resumed = [ErrataClient[Any, Any, Any].resume(fleet.url, client.ticket(), connection=unaware) for client in clients]
    for client in resumed:  # some of its sockets arrive elsewhere, so that frames passed on are seen to be counted
        assert (await client.step({"n": 1})).observation["n"] == 7
    while fleet.relayed() == relayed:
        assert unaware._ws is not None
        unaware._ws.transport.abort()
        await resumed[0].step({"n": 1})
    await connection.aclose()
    await unaware.aclose()


@asynccontextmanager
async def pool_at_all_workers(fleet: Fleet) -> AsyncIterator[EnvPool]:
    """Open 24 sessions, some at each worker; session n has made one step, with ``{"n": n}``."""
    fleet.wait_for_all()
    async with EnvPool(fleet.url, 24) as pool:
        await pool.reset_batch()
        await pool.step_batch([{"n": n} for n in range(24)])
        assert len({shard_of(str(client.eid)) for client in pool.clients}) == WORKERS
        yield pool


@pytest.mark.storm
@pytest.mark.parametrize("mux", [True, False], ids=["mux", "plain"])
async def test_every_session_reads_the_episodes_of_all_workers(fleet: Fleet, mux: bool) -> None:
    async with pool_at_all_workers(fleet) as pool:
        eids = [str(client.eid) for client in pool.clients]
        reader = ErrataClient[Any, Any, Any](fleet.url, mux=mux)
        await reader.reset()
        for client, eid in zip(pool.clients, eids, strict=True):
            own = await client.state_at(1)
            found = await reader.state_at(1, eid)
            assert (found.payload, found.digest, found.kind, found.source) == (
                own.payload,
                own.digest,
                "step",
                "server",
            )
            with pytest.raises(StateOutOfRange):
                await reader.state_at(2, eid)
            with pytest.raises(UnknownEpisode):
                await reader.state_at(0, eid[:-1] + ("a" if eid[-1] != "a" else "b"))
        await reader.close()


def place(eid: str, t: int) -> dict[str, Any]:
    return {"episode_id": eid, "t": t}


@pytest.mark.storm
@pytest.mark.parametrize("mux", [True, False], ids=["mux", "plain"])
async def test_every_session_goes_on_from_the_episodes_of_all_workers(fleet: Fleet, mux: bool) -> None:
    async with pool_at_all_workers(fleet) as pool:
        client = ErrataClient[Any, Any, Any](fleet.url, mux=mux)
        for n, parent in enumerate(pool.clients):
            began = await client.reset(injected_state=place(str(parent.eid), 1))
            assert (began.observation["n"], client.t) == (n, 0)
            assert (await client.step({"n": 5})).observation["n"] == n + 5
            assert (await client.state_at(0)).payload == (await parent.state_at(1)).payload
            assert (await parent.step({"n": 1})).observation["n"] == n + 1, "the parent goes on by itself"
        await client.close()


async def when_it_answers(call: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat what a worker that is starting again is needed for: on a plain socket that is its caller's."""
    async with asyncio.timeout(GIVE_UP_S):
        while True:
            try:
                return await call()
            except JournalUnavailable:
                await asyncio.sleep(0.1)


@pytest.mark.chaos
@pytest.mark.parametrize("mux", [True, False], ids=["mux", "plain"])
async def test_a_fork_of_an_episode_whose_worker_is_killed_waits_for_it(tmp_path: Path, mux: bool) -> None:
    """Once as the fork is made, and once as the parent's requests are to be run again for it."""
    target, options = "tests.server.repeatable:DiceEnvironment", ("--workers", str(WORKERS), "--no-fsync")
    with ServerProcess(target, tmp_path, *options, start_s=120) as server:
        Fleet(server).wait_for_all()
        async with EnvPool(server.url, 24) as pool:
            await pool.reset_batch()
            seen = [await pool.step_batch([{"n": n} for n in range(24)]) for _ in range(2)]
            at = {str(shard_of(str(client.eid))): n for n, client in enumerate(pool.clients)}
            assert len(at) == WORKERS
            client = ErrataClient[Any, Any, Any](server.url, mux=mux, durable=True)
            await client.reset()
            for directory, shard in zip(shards(tmp_path, WORKERS), shard_names(tmp_path), strict=True):
                parent = pool.clients[at[shard]]
                where = place(str(parent.eid), 1)
                os.kill(await asyncio.to_thread(worker_of, directory), signal.SIGKILL)
                began = await when_it_answers(lambda where=where: client.reset(injected_state=where))
                assert began.observation == seen[0][at[shard]].observation
                os.kill(await asyncio.to_thread(worker_of, directory), signal.SIGKILL)
                action = {"n": at[shard]}
                step = await when_it_answers(lambda action=action: client.step(action))
                assert (step.observation, client.t) == (seen[1][at[shard]].observation, 1), "it acts once"
                assert (await client.state_at(0)).payload == (await parent.state_at(1)).payload
            await client.close()


@pytest.mark.storm
async def test_new_sessions_are_placed_and_groups_stay_together(fleet: Fleet) -> None:
    """The sessions of one event loop are at all workers, over one connection to each, and no frame is passed on."""
    fleet.wait_for_all()
    relayed = fleet.relayed()
    async with EnvPool(fleet.url, 24) as pool, EnvPool(fleet.url, 8, labels=Labels(group="prompt-7")) as group:
        for one in (pool, group):
            await one.reset_batch()
            assert [result.observation["n"] for result in await one.step_batch([{"n": 1}] * len(one))] == [1] * len(one)
        assert len({shard_of(str(client.eid)) for client in pool.clients}) == WORKERS
        connections = {client._mux._lease.connection for one in (pool, group) for client in one.clients}
        assert len(connections) == WORKERS
        fork = await group.clients[0].fork(1)
        assert len({shard_of(str(client.eid)) for client in (*group.clients, fork)}) == 1
        assert (await fork.step({"n": 1})).observation["n"] == 2
    assert fleet.relayed() == relayed
    assert not any(connection.is_open for connection in connections)


@pytest.mark.storm
async def test_a_session_is_found_again_by_its_ticket_whoever_is_asked(fleet: Fleet) -> None:
    """Sids name no shard: tickets go on over one socket, which arrives anywhere, though their workers differ."""
    connections = [Connection(fleet.url) for _ in range(6)]
    clients = [ErrataClient[Any, Any, Any](connection=connection) for connection in connections]
    for client in clients:
        await played(client, 2)
    tickets = [client.ticket() for client in clients]
    for connection in connections:
        await connection.aclose()
    again = Connection(fleet.url)
    for ticket in tickets:
        client = ErrataClient[Any, Any, Any].resume(fleet.url, ticket, connection=again)
        assert (await client.step({"n": 1})).observation["n"] == 3
        await client.close()
    await again.aclose()


def plain(socket: Any, **frame: Any) -> dict[str, Any]:
    socket.send(json.dumps(frame))
    return dict(json.loads(socket.recv(timeout=GIVE_UP_S)))


@pytest.mark.storm
async def test_a_stock_socket_attaches_by_its_id_at_the_owner(fleet: Fleet) -> None:
    clients = [ErrataClient[Any, Any, Any](fleet.url, mux=False, durable=True) for _ in range(6)]
    for client in clients:
        await played(client, 1)
    sids = [str(client.session_id) for client in clients]
    for client in clients:
        await client.close()
    for sid in sids:
        with await asyncio.to_thread(connect_plain, f"{fleet.ws}?session_id={sid}") as socket:
            answer = await asyncio.to_thread(plain, socket, type="step", data={"n": 1})
            assert answer["data"]["observation"]["n"] == 2


@pytest.mark.storm
def test_a_kept_connection_reads_the_episodes_of_all_workers(fleet: Fleet) -> None:
    eids = asyncio.run(played_plain(fleet.url, 6, 2))
    with httpx.Client(base_url=fleet.url, timeout=GIVE_UP_S) as kept:
        for eid in eids:
            assert kept.get(f"/episodes/{eid}").json()["eid"] == eid
            assert kept.get(f"/episodes/{eid}/states/2").json()["observation"]["n"] == 2
            made = kept.post(f"/episodes/{eid}/rewards", json={"t": 1, "value": 0.5, "source": "s", "reward_id": eid})
            assert made.status_code == 200 and made.json()["value"] == 0.5
            assert len(kept.get(f"/episodes/{eid}/rewards").json()) == 1
        assert kept.get("/episodes/ep_AAAAAAAAAAAAAAAAAAAAAAAA").status_code == 404
        deleted = kept.post("/episodes/delete", json={"eids": [*eids, "ep_none"]}).json()
        assert sorted(deleted["deleted"]) == sorted(eids) and deleted["unknown"] == ["ep_none"]
        assert kept.get(f"/episodes/{eids[0]}").status_code == 404
        assert kept.post("/episodes/delete", json={"eids": 5}).status_code in (400, 422)


@pytest.mark.storm
def test_lists_sums_and_metrics_are_of_all_workers(fleet: Fleet, data_dir: Path) -> None:
    fleet.wait_for_all()
    asyncio.run(played_plain(fleet.url, 12, 1))
    found = fleet.episodes()
    assert [one["created"] for one in found] == sorted((one["created"] for one in found), reverse=True)
    assert len({one["eid"] for one in found}) == len(found) > 10
    sums = fleet.get("/episodes/aggregates")["buckets"]
    assert sum(bucket["episodes"] for bucket in sums) == len(found)
    assert sum(bucket["deliveries"] for bucket in sums) == sum(one["deliveries"] for one in found)
    assert fleet.get("/ready") == {"status": "ready", "reasons": []}
    wrong = httpx.get(f"{fleet.url}/episodes?limit=0")
    assert wrong.status_code in (400, 422) and "limit" in wrong.text
    listed = subprocess.run(
        [
            sys.executable,
            "-m",
            "errata_server.cli",
            "episodes",
            "--data-dir",
            str(data_dir),
            "--json",
            "--limit",
            "500",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {eid for one in found if (eid := one["eid"]) not in listed.stdout} == set()


@pytest.mark.storm
async def test_a_group_is_closed_wherever_its_sessions_are(fleet: Fleet) -> None:
    group = "g" * 22
    connections = [Connection(fleet.url, group=group) for _ in range(6)]
    clients = [ErrataClient[Any, Any, Any](connection=connection) for connection in connections]
    for client in clients:
        await played(client, 1)
    assert await connections[0].close_group(group) == 6
    for connection in connections:
        await connection.aclose()


@pytest.mark.storm
async def test_the_events_of_all_workers_are_one_stream_that_goes_on_from_its_cursor(fleet: Fleet) -> None:
    async def followed(eids: set[str], cursor: str | None) -> tuple[list[str], str]:
        """Read events until those of all these episodes have come; return what came first and the last id."""
        words, newest, left = [], "", set(eids)
        headers = {"Last-Event-ID": cursor} if cursor is not None else {}
        async with (
            asyncio.timeout(GIVE_UP_S),
            httpx.AsyncClient(timeout=GIVE_UP_S) as http,
            http.stream("GET", f"{fleet.url}/episodes/events", headers=headers) as answer,
        ):
            listening.set()
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    words.append(value)
                elif name == "id":
                    newest = value
                elif name == "data" and words[-1] == "episode":
                    left.discard(json.loads(value)["eid"])
                elif not line and newest and not left:
                    return words, newest
        raise EOFError

    async def played_at_all() -> set[str]:
        """Play episodes until each worker has one."""
        eids: set[str] = set()
        while len({shard_of(eid) for eid in eids}) < WORKERS:
            client = ErrataClient[Any, Any, Any](fleet.url, mux=False)
            eids.add(await played(client, 1))
            await client.close()
        return eids

    listening = asyncio.Event()
    nothing, cursor = await followed(set(), None)
    assert nothing == ["list"] * WORKERS, "each worker says that the stream begins"
    first = await played_at_all()
    seen, cursor = await followed(first, cursor)
    assert "list" not in seen, "nothing was missed while no stream was open"
    listening.clear()
    following = asyncio.create_task(followed({"never"}, cursor))
    await listening.wait()
    os.kill(fleet.pids[-1], signal.SIGKILL)
    with pytest.raises((EOFError, httpx.HTTPError)):  # the second where the client's own worker was killed
        await following
    fleet.wait_for_all()
    again, _ = await followed(set(), cursor)
    assert "list" in again, "the worker that was killed has other cursors now"


@pytest.mark.storm
def test_connects_do_not_hang_while_a_worker_is_stopped(fleet: Fleet) -> None:
    fleet.wait_for_all()
    stopped = fleet.pids[-1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        for _ in range(40):  # the first of them while nobody knows that it is stopped
            with connect_plain(fleet.ws, open_timeout=GIVE_UP_S) as socket:
                assert plain(socket, type="reset", data={})["type"] == "observation"
            assert httpx.get(f"{fleet.probes}/health", timeout=GIVE_UP_S).status_code == 200
    finally:
        os.kill(stopped, signal.SIGCONT)


def holders(server: int, port: int) -> dict[int, set[int]]:
    """Return which processes of the machine have a descriptor of each connection of a server.

    Args:
        server: Process id of the server.
        port: Port of the server.

    Returns:
        Process ids, by the inode of the server's end of the connection.
    """
    rows = [row.split() for row in Path(f"/proc/{server}/net/tcp").read_text().splitlines()[1:]]
    established = [row for row in rows if row[3] == "01" and int(row[1].rpartition(":")[2], 16) == port]
    found: dict[int, set[int]] = {int(row[9]): set() for row in established}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):  # it was closed
                    named = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
                    if named is not None and int(named[1]) in found:
                        found[int(named[1])].add(int(process.name))
    return found


@pytest.mark.chaos
async def test_connections_are_spread_evenly_and_each_is_one_workers(tmp_path: Path) -> None:
    """Only who has a descriptor of a socket can read or write a byte of it. The clients know no workers."""
    workers, connects, at_once = 4, 400, 40
    with ServerProcess(TARGET, tmp_path, "--workers", str(workers), "--no-fsync", start_s=120) as server:
        fleet, port = Fleet(server), int(server.url.rpartition(":")[2])
        clients = [GenericEnvClient(base_url=server.url, connect_timeout_s=GIVE_UP_S) for _ in range(connects)]
        for at in range(0, connects, at_once):
            await asyncio.to_thread(until, fleet.all_up)  # a worker that gets no turn gets no connections either
            await asyncio.gather(*(client.connect() for client in clients[at : at + at_once]))

        def handed_over() -> bool:
            found = holders(server.process.pid, port)
            return len(found) == connects and all(len(pids) == 1 for pids in found.values())

        await asyncio.to_thread(until, handed_over)
        owners = holders(server.process.pid, port)
        counted = Counter(pid for pids in owners.values() for pid in pids)
        assert counted.keys() == set(fleet.pids)
        assert max(counted.values()) - min(counted.values()) <= connects / workers / 10, counted
        for result in await asyncio.gather(*(client.reset() for client in clients)):
            assert result.observation["n"] == 0
        assert holders(server.process.pid, port) == owners, "no other process gets a connection that was handed over"
        await asyncio.gather(*(client.close() for client in clients))


@pytest.mark.chaos
def test_a_login_of_the_viewer_holds_at_all_workers_until_it_ends(tmp_path: Path) -> None:
    env = {"PYTHONHASHSEED": "7", "ERRATA_TOKEN": "token-of-ann"}
    with ServerProcess(TARGET, tmp_path, "--workers", "2", "--no-fsync", env=env, start_s=120) as server:
        fleet = Fleet(server)
        own = {"Origin": fleet.url}

        def looked(times: int = 24) -> set[int]:
            """Return the statuses of requests with the cookie, each over a connection of its own, to any worker."""
            return {httpx.get(f"{fleet.url}/episodes", cookies=cookies, timeout=60).status_code for _ in range(times)}

        token = {"Authorization": "Bearer token-of-ann", **own}
        cookies = dict(httpx.post(f"{fleet.url}/viewer/login", headers=token, timeout=60).cookies)
        assert looked() == {200}
        killed = fleet.pids[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in fleet.pids and len(fleet.pids) == 2)
        until(lambda: looked(1) == {200})
        assert httpx.post(f"{fleet.url}/viewer/logout", cookies=cookies, headers=own, timeout=60).status_code == 200
        assert looked() == {401}


@pytest.mark.chaos
def test_a_second_server_does_not_take_the_directory(fleet: Fleet, data_dir: Path) -> None:
    for options in (("--workers", "2"), ()):
        with pytest.raises(ServiceError, match="is in use by"):
            ServerProcess(TARGET, data_dir, *options)


@pytest.mark.chaos
def test_workers_die_with_their_supervisor(tmp_path: Path) -> None:
    server = ServerProcess(TARGET, tmp_path, "--workers", "2", "--no-fsync", start_s=120)
    pids = Fleet(server).pids
    assert len(pids) == 2
    server.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.chaos
def test_a_directory_is_served_by_one_process_then_by_several_and_by_one_again(tmp_path: Path) -> None:
    with ServerProcess(TARGET, tmp_path, "--no-fsync") as one:
        old = asyncio.run(played_plain(one.url, 2, 1))
    with ServerProcess(TARGET, tmp_path, "--workers", "2", "--no-fsync", start_s=120) as several:
        fleet = Fleet(several)
        assert {episode["eid"] for episode in fleet.episodes()} == set(old)
        new = asyncio.run(played_plain(several.url, 8, 1))
        assert {episode["eid"] for episode in fleet.episodes()} == {*old, *new}
        assert fleet.get(f"/episodes/{old[0]}")["eid"] == old[0]
    with ServerProcess(TARGET, tmp_path, "--no-fsync") as again:
        own = {episode["eid"] for episode in Fleet(again).episodes()}
        assert own == {*old, *(eid for eid in new if name_of_first(tmp_path) in eid)}
        assert f"{tmp_path}/shards/1" in "".join(again.log), "what is not served is named"


def name_of_first(directory: Path) -> str:
    return (directory / "shard").read_text().strip()


@pytest.mark.chaos
async def test_an_environment_with_one_instance_has_one_in_all_workers(tmp_path: Path) -> None:
    """Its sessions are at the first worker, by whichever way they are opened."""

    async def opened(mux: bool | None) -> ErrataClient[Any, Any, Any]:
        """Open a session, once the one before has been closed by the server."""
        while True:
            client = ErrataClient[Any, Any, Any](server.url, mux=mux)
            try:
                await client.reset()
                return client
            except CapacityReached:
                await client.close()
                await asyncio.sleep(0.05)

    async def shard_of_one(mux: bool | None) -> str | None:
        client = await opened(mux)
        with pytest.raises(CapacityReached):
            async with ErrataClient[Any, Any, Any](server.url, mux=False) as second:
                await second.reset()
        await client.close()
        return shard_of(str(client.eid))

    def attached(url: str) -> bool:
        with connect_plain(url, open_timeout=GIVE_UP_S) as socket:
            return plain(socket, type="reset", data={})["type"] == "observation"

    options = ("--workers", str(WORKERS), "--max-sessions", "1", "--no-fsync")
    with ServerProcess(TARGET, tmp_path, *options, start_s=120) as server:
        await asyncio.to_thread(Fleet(server).wait_for_all)
        first, *others = shard_names(tmp_path)
        found = [await shard_of_one(mux) for mux in (False, None) for _ in range(6)]
        for shard in others:
            await asyncio.to_thread(until, partial(attached, Endpoint(shard, server.url, "up").ws_url))
        assert set(found) == {first}
        listed = await asyncio.to_thread(Fleet(server).episodes)
        assert Counter(shard_of(one["eid"]) for one in listed) == {first: len(found) + len(others)}


def errata(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "errata_server.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.chaos
async def test_a_worker_that_is_drained_lets_its_sessions_end_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "FRESH_S", 0.0)  # or sessions are opened at it as long as what is known is that old

    def drain(shard: str) -> subprocess.Popen[str]:
        return errata("fleet", "drain", shard, "--data-dir", str(tmp_path), "--json")

    def refused(shard: str) -> str:
        _, complaint = drain(shard).communicate(timeout=GIVE_UP_S)
        return complaint

    def states() -> dict[str, str]:
        return {one["shard"]: one["state"] for one in Fleet(server).get("/fleet")["members"]}

    async def opened() -> set[str | None]:
        """Open sessions in every way that a client has, and return the shards that they are at."""
        connection = Connection(server.url)
        async with EnvPool(server.url, 12) as pool:
            await pool.reset_batch()
            clients = [ErrataClient[Any, Any, Any](connection=connection)]
            clients += [ErrataClient[Any, Any, Any](server.url, mux=False) for _ in range(8)]
            for client in clients:
                await client.reset()
            found = {shard_of(str(client.eid)) for client in (*pool.clients, *clients)}
            for client in clients:
                await client.close()
        await connection.aclose()
        return found

    with ServerProcess(TARGET, tmp_path, "--workers", str(WORKERS), "--no-fsync", start_s=120) as server:
        await asyncio.to_thread(Fleet(server).wait_for_all)
        async with EnvPool(server.url, 24) as pool:
            await pool.reset_batch()
            shards = {str(shard_of(str(client.eid))) for client in pool.clients}
            assert shards == set(shard_names(tmp_path))
            chosen = shard_names(tmp_path)[0]  # the first one is no exception, and has the data directory itself
            own = [client for client in pool.clients if shard_of(str(client.eid)) == chosen]
            draining = await asyncio.to_thread(drain, chosen)
            first = json.loads(await asyncio.to_thread(draining.stdout.readline))  # type: ignore[union-attr]
            assert (first["state"], first["sessions_left"]) == ("draining", len(own))
            assert states() == {shard: "draining" if shard == chosen else "up" for shard in shards}
            assert "drains already" in await asyncio.to_thread(refused, chosen)
            unknown = await asyncio.to_thread(refused, "nobody")
            assert all(shard in unknown for shard in shards), unknown
            assert await opened() <= shards - {chosen}
            results = await pool.step_batch([{"n": 1}] * len(pool.clients))
            assert [result.observation["n"] for result in results] == [1] * len(pool.clients), "its sessions go on"
            fork = await own[0].fork(1)
            assert shard_of(str(fork.eid)) == chosen and (await fork.step({"n": 1})).observation["n"] == 2
            for client in (fork, *own):
                await client.close()
            output, _ = await asyncio.to_thread(draining.communicate, None, GIVE_UP_S)
            last = json.loads(output.splitlines()[-1])
            assert (last["state"], last["drained"], last["directory"]) == ("down", True, str(tmp_path))
            assert draining.returncode == 0 and len(Fleet(server).pids) == WORKERS - 1
            assert states() == {shard: "down" if shard == chosen else "up" for shard in shards}
            assert "has been drained already" in await asyncio.to_thread(refused, chosen)
            assert await opened() <= shards - {chosen}
            eid = str(own[0].eid)
            answer = await asyncio.to_thread(httpx.get, f"{server.url}/episodes/{eid}")
            assert (answer.status_code, answer.json()["shard"]) == (421, chosen)
            assert eid not in {one["eid"] for one in Fleet(server).episodes()}
            assert Fleet(server).get("/ready") == {"status": "ready", "reasons": []}
            read = await asyncio.to_thread(errata("replay", eid, "1", "--data-dir", str(tmp_path)).communicate)
            assert "observation" in read[0], ("its episodes are read from its directory", read)
        second, third = sorted(shards - {chosen})
        ended = await asyncio.to_thread(drain(second).communicate, None, GIVE_UP_S)
        assert json.loads(ended[0].splitlines()[-1])["drained"]
        assert "last shard that takes new sessions" in await asyncio.to_thread(refused, third)
        assert await opened() == {third}
    assert server.process.returncode == 0
    with ServerProcess(TARGET, tmp_path, "--workers", str(WORKERS), "--no-fsync", start_s=120) as again:
        assert Fleet(again).get(f"/episodes/{eid}")["deliveries"] == 2, "the next start serves it again"


@pytest.mark.chaos
def test_an_environment_that_cannot_be_served_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(ServiceError) as refused:
        ServerProcess("tests.server.environments:NoSuch", tmp_path, "--workers", "3", start_s=120)
    lines = [line for line in str(refused.value).splitlines() if "NoSuch" in line]
    assert len(lines) == 1, str(refused.value)


@pytest.mark.chaos
@pytest.mark.parametrize("option", ["--max-sessions", "--max-sessions-per-principal"])
def test_a_limit_of_sessions_is_that_of_the_whole_server(tmp_path: Path, option: str) -> None:
    limit, opens = 40, 100
    options, one, other = ("--workers", "4", option, str(limit), "--no-fsync"), "o" * 32, "t" * 32
    env = {"ERRATA_TOKEN": f"{one},{other}"}

    def opened(token: str) -> ClientConnection:
        """Ask for a session on a multiplexed socket, which stays open where the session is refused."""
        bearer = {"Authorization": f"Bearer {token}"}
        made = connect_plain(
            url, open_timeout=GIVE_UP_S, additional_headers=bearer, subprotocols=[Subprotocol(PROTOCOL_NAME)]
        )
        sid, key = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        opening = {"sid": sid, "type": "open", "data": {"key": key}}
        made.send(json.dumps([opening, {"sid": sid, "id": 1, "type": "reset", "data": {}}]))
        return made

    def outcome(socket: ClientConnection) -> str:
        while True:
            got = json.loads(socket.recv(timeout=GIVE_UP_S))
            for message in got if isinstance(got, list) else [got]:
                if message["type"] in ("observation", "error"):
                    return str(message["data"].get("code", "opened"))

    with ServerProcess(TARGET, tmp_path, *options, env=env, start_s=120) as server:
        url = Fleet(server).ws
        sockets = [opened(one) for _ in range(opens)]
        counted = Counter(outcome(socket) for socket in sockets)
        assert limit <= counted["opened"] <= limit + 3 and counted.keys() == {"opened", "CAPACITY_REACHED"}, counted
        if option == "--max-sessions-per-principal":
            sockets.append(opened(other))
            assert outcome(sockets[-1]) == "opened"
        for socket in sockets:
            socket.close()


@pytest.mark.chaos
def test_two_copies_of_a_directory_are_refused(tmp_path: Path) -> None:
    first, second = shards(tmp_path, 2)
    second.mkdir(parents=True)
    (second / "shard").write_text(name_of(first))
    with pytest.raises(ServiceError, match="is a copy of"):
        ServerProcess(TARGET, tmp_path, "--workers", "2", start_s=120)
