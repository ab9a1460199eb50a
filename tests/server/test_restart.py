"""What a client finds after the server's process ended, one way or the other (PROTOCOL A3, E1).

Three processes of one server with environments of every recovery class follow each other: the first is stopped by
SIGTERM, the second killed. What needs no process is on a simulated machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient, Ticket
from errata_protocol.errors import ErrataError, InvalidRequest, JournalUnavailable
from errata_protocol.payload import digest
from errata_server.process import ServerProcess
from errata_server.serve.server import Bind, build
from errata_server.settings import Settings
from errata_server.simulation import SimulatedMachine

from .booted import Booted, boot
from .environments import CountEnvironment
from .local_server import LocalServer

COUNT = "tests.server.environments:CountEnvironment"
TARGETS = (
    COUNT,
    "tests.server.environments:PinnedEnvironment",
    "tests.server.repeatable:DiceEnvironment",
    "tests.server.repeatable:ToolEnvironment",
)
GO_ON = ("CountEnvironment", "DiceEnvironment")
"""One restores a snapshot, the other runs its requests again."""

LOST = "PinnedEnvironment"


Which = tuple[str, bool]
"""An environment, and whether its client is on a multiplexed socket."""

SESSIONS: list[Which] = [(environment, mux) for environment in (*GO_ON, LOST) for mux in (True, False)]


class Restarts:
    """What clients of the first two processes were told, and the address of the third."""

    def __init__(self) -> None:
        self.url = ""
        self.status: int | None = None
        self.log = self.quiet_log = ""
        self.eids: dict[Which, str] = {}
        self.sids: dict[Which, str] = {}
        self.tickets: dict[Which, Ticket] = {}
        self.counts: dict[Which, int] = {}
        self.payloads: dict[Which, bytes] = {}
        self.plain_eid = ""
        self.tools_sid = ""
        self.notes: list[int] = []

    def call(self, n: int) -> dict[str, Any]:
        """Call the tool of the session that has one, at the door of MCP."""
        params = {"name": "note", "arguments": {"n": n}, "session_id": self.tools_sid}
        asked = {"jsonrpc": "2.0", "id": n, "method": "tools/call", "params": params}
        return dict(httpx.post(f"{self.url}/ToolEnvironment/mcp", json=asked).json())

    def note(self, n: int) -> list[int]:
        return list(self.call(n)["result"]["data"]["notes"])

    def client(self, which: Which) -> ErrataClient[Any, Any, Any]:
        environment, mux = which
        return ErrataClient(f"{self.url}/{environment}", mux=mux, durable=True)

    def again(self, which: Which) -> ErrataClient[Any, Any, Any]:
        """Return a client that continues a session of the first process, as another process's client does."""
        url = f"{self.url}/{which[0]}"
        return (
            ErrataClient.resume(url, self.tickets[which])
            if which[1]
            else ErrataClient(url, session_id=self.sids[which])
        )

    async def begin(self, server: ServerProcess) -> None:
        self.url = server.url
        clients = {which: self.client(which) for which in SESSIONS}
        for which, client in clients.items():
            await client.reset(seed=7)
            await client.step({"n": 3})
            if which[1]:
                self.tickets[which] = client.ticket()
            self.sids[which] = self.tickets[which]["sid"] if which[1] else str(client.session_id)
            self.eids[which] = str(client.eid)
            self.payloads[which] = httpx.get(f"{self.url}/episodes/{client.eid}/states/1").content
        plain = ErrataClient[Any, Any, Any](f"{self.url}/CountEnvironment", mux=False)
        await plain.reset()
        await plain.step({"n": 5})
        self.plain_eid = str(plain.eid)
        created = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
        answer = httpx.post(f"{self.url}/ToolEnvironment/mcp", json=created).json()
        self.tools_sid = answer["result"]["session_id"]
        self.notes = self.note(5)  # an episode that begins with a call has no t=0
        self.status = server.stop()
        self.log = "".join(server.log)
        for client in (*clients.values(), plain):
            await client.close()

    async def go_on(self, server: ServerProcess) -> None:
        self.url = server.url
        clients = {which: self.again(which) for which in SESSIONS if which[0] in GO_ON}
        for which, client in clients.items():
            self.counts[which] = (await client.step({"n": 1})).observation["n"]
            if which[1]:
                self.tickets[which] = client.ticket()
        assert self.call(-1).get("error") is not None
        self.notes = self.note(6)
        server.kill()
        for client in clients.values():
            await client.close()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def restarts(data_dir: Path) -> Iterator[Restarts]:
    told = Restarts()
    seed = {"PYTHONHASHSEED": "7"}  # or each process would start twice, to choose one
    with ServerProcess(TARGETS[0], data_dir, *TARGETS[1:], "--log-level", "debug", env=seed) as server:
        asyncio.run(told.begin(server))
    with ServerProcess(TARGETS[0], data_dir, *TARGETS[1:], env=seed) as server:
        asyncio.run(told.go_on(server))
        told.quiet_log = "".join(server.log)
    with ServerProcess(TARGETS[0], data_dir, *TARGETS[1:], env=seed) as server:
        told.url = server.url
        yield told


@pytest.mark.parametrize("which", [which for which in SESSIONS if which[0] in GO_ON])
async def test_a_given_out_session_goes_on_after_sigterm_and_after_a_kill(restarts: Restarts, which: Which) -> None:
    async with restarts.again(which) as again:
        assert (again.eid, again.t) == (restarts.eids[which], 2)
        assert (await again.step({"n": 1})).observation["n"] == 5
    assert restarts.counts[which] == 4


@pytest.mark.parametrize("mux", [True, False])
async def test_an_environment_without_recovery_is_lost(restarts: Restarts, mux: bool) -> None:
    which = (LOST, mux)
    with pytest.raises(ErrataError) as caught:
        await restarts.again(which).connect()  # no request has to find it out
    assert caught.value.code == "SESSION_LOST"
    if not mux:
        assert f"t=1 of episode {restarts.eids[which]}" in caught.value.message


async def test_a_plain_session_goes_on_by_fork(restarts: Restarts) -> None:
    async with ErrataClient[Any, Any, Any](f"{restarts.url}/CountEnvironment") as client:
        child = await client.fork(1, eid=restarts.plain_eid)
        assert (await child.step({"n": 1})).observation["n"] == 6
        await child.close()


def test_a_session_of_the_mcp_door_goes_on_with_a_failed_call_in_between(restarts: Restarts) -> None:
    assert restarts.notes == [5, 6]
    assert restarts.note(7) == [5, 6, 7]


def test_every_state_is_read_as_it_was(restarts: Restarts) -> None:
    for which, eid in restarts.eids.items():
        assert httpx.get(f"{restarts.url}/episodes/{eid}/states/1").content == restarts.payloads[which]


def test_sigterm_ends_with_status_0(restarts: Restarts) -> None:
    assert restarts.status == 0


def test_no_log_line_holds_an_id(restarts: Restarts) -> None:
    assert "uvicorn.error: Application startup complete" in restarts.log, "these are the lines for debugging"
    for id in (*restarts.eids.values(), *restarts.sids.values(), restarts.plain_eid, restarts.tools_sid):
        assert id not in restarts.log


def test_the_web_servers_own_start_is_for_debugging(restarts: Restarts) -> None:
    assert "Application startup complete" not in restarts.quiet_log


def test_a_second_server_on_the_same_data_directory_is_refused(restarts: Restarts, data_dir: Path) -> None:
    with pytest.raises(JournalUnavailable, match="in use by process"):
        LocalServer(COUNT, data_dir)


def test_a_public_bind_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="set ERRATA_TOKEN"):
        build([COUNT], Settings(data_dir=tmp_path), bind=Bind("0.0.0.0"), mode=None)


def test_every_state_of_a_long_episode_is_the_same_live_closed_and_after_a_crash(tmp_path: Path) -> None:
    """More steps than a batch of the index has rows, and than a segment has room for."""
    machine = SimulatedMachine(7, power_loss=False, index=tmp_path, batch_rows=25, segment_bytes=10_000)
    eids: list[str] = []
    live: list[httpx.Response] = []

    async def play(server: Booted) -> None:
        async with server.connect() as socket:
            eids.append((await socket.act("reset"))["eid"])
            await socket.act("step", n=77)
            eids.append((await socket.act("reset"))["eid"])
            for t in range(101):
                if t:
                    assert (await socket.act("step", n=t))["t"] == t
                live.append(await server.state(eids[1], t))
                assert live[t].headers["etag"] == f'"{digest(live[t].content)}"'
            assert [live[t].content for t in range(101)] == await states(server)
            assert (await socket.act("state"))["data"]["step_count"] == 100
            assert (await server.state(eids[0], 1)).content != live[1].content
            assert (await server.state(eids[1], 101)).json()["code"] == "T_OUT_OF_RANGE"
            assert (await server.state("ep_nobody", 0)).json()["code"] == "UNKNOWN_EPISODE"
        assert [live[t].content for t in range(101)] == await states(server)
        await server.kill()

    async def read(server: Booted) -> None:
        for t, before in enumerate(live):
            found = await server.state(eids[1], t)
            assert (found.content, found.headers["etag"]) == (before.content, before.headers["etag"])
        assert (await server.state(eids[0], 1)).status_code == 200

    async def states(server: Booted) -> list[bytes]:
        return [(await server.state(eids[1], t)).content for t in range(101)]

    boot(machine, CountEnvironment, play)
    boot(machine, CountEnvironment, read)
