"""A data directory with a name: how it gets one, and what clients do at another one's server (PROTOCOL F5)."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from errata_client import ErrataClient
from errata_client.fleet import members
from errata_protocol.errors import JournalUnavailable, Misdirected, SessionLost
from errata_protocol.fleet import FleetMember
from errata_protocol.names import SHARD
from errata_protocol.shards import named, shard_of
from errata_server.app import create_fastapi_app
from errata_server.cli import commands
from errata_server.ids import Ids, name_of
from errata_server.log import redact
from errata_server.runtime import shard_name
from errata_server.runtime.data_lock import lock
from errata_server.runtime.members import MemberWatch
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings
from tests.machine_speed import SLOWDOWN

from .conftest import connect, until
from .environments import CountAction, CountEnvironment, CountObservation
from .local_server import LocalServer, serving

TARGET = "tests.server.environments:CountEnvironment"


def command(*arguments: str) -> Any:
    return CliRunner().invoke(commands.cli, ["journal", *arguments])


# -- the name ------------------------------------------------------------------------------------------------------


def test_the_command_draws_a_name_once(tmp_path: Path) -> None:
    first, again = command("shard", str(tmp_path / "new")), command("shard", str(tmp_path / "new"))
    other = command("shard", str(tmp_path / "other"))
    assert first.exit_code == 0 and first.stdout == again.stdout != other.stdout
    assert SHARD.matches(first.stdout.strip()) and shard_name.shard_name(tmp_path / "new") == first.stdout.strip()
    assert not (tmp_path / "new" / "shard.new").exists()


def test_the_command_takes_the_directory_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_DATA_DIR", str(tmp_path / "volume"))
    assert command("shard").stdout.strip() == shard_name.shard_name(tmp_path / "volume")


def test_a_directory_gets_no_name_while_its_server_runs(tmp_path: Path) -> None:
    held = lock(tmp_path)
    refused = CliRunner().invoke(commands.cli, ["journal", "shard", str(tmp_path)])
    assert refused.exit_code != 0 and shard_name.shard_name(tmp_path) is None
    os.close(held)
    name = command("shard", str(tmp_path)).stdout
    held = lock(tmp_path)
    assert command("shard", str(tmp_path)).stdout == name, "one that has a name says it beside its server"
    os.close(held)


@pytest.mark.parametrize("text", ["", "x", "ABCDEFGHIJKL\n", "../../../etc\n", "\xff" * 12])
def test_a_server_does_not_start_with_what_is_no_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "shard").write_text(text)
    with pytest.raises(JournalUnavailable, match="which is not 12 lowercase letters and digits"):
        Runtime(Settings(data_dir=tmp_path))
    os.close(lock(tmp_path))


def test_a_repaired_copy_has_the_name(tmp_path: Path) -> None:
    with TestClient(application(tmp_path / "mine")) as client, connect(client) as socket:
        eid = socket.ask("reset")["eid"]
    done = command("salvage", "--data-dir", str(tmp_path / "mine"), "--output", str(tmp_path / "copy"))
    assert done.exit_code == 0 and shard_name.shard_name(tmp_path / "copy") == shard_of(eid) is not None


def test_ids_have_the_name_and_are_as_random_as_before() -> None:
    ids = Ids()
    assert shard_of(ids.session()) is shard_of(ids.episode()) is None
    assert (len(ids.session()), len(ids.episode())) == (36, 27)
    ids.shard = "k3v9x0q7m2ab"
    assert shard_of(ids.session()) == shard_of(ids.episode()) == "k3v9x0q7m2ab"
    assert (len(ids.session()), len(ids.episode()), len(ids.uuid())) == (36 + 16, 27 + 16, 36)


def test_logs_have_the_hash_of_the_whole_id() -> None:
    ids = Ids()
    ids.shard = "k3v9x0q7m2ab"
    for id in (ids.session(), ids.episode()):
        assert redact(f"session {id} ended") == f"session #{name_of(id)} ended"


# -- clients at the server of another directory ---------------------------------------------------------------------


class Entry:
    """One address, behind which the one or the other application stands.

    Args:
        app: The first one.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope.get("path", ""))
        await self.app(scope, receive, send)


def application(data_dir: Path) -> FastAPI:
    data_dir.mkdir()
    shard_name.draw(data_dir)
    names: dict[str, Any] = {"env_name": "CountEnvironment", "max_concurrent_envs": 8, "data_dir": data_dir}
    return create_fastapi_app(CountEnvironment, CountAction, CountObservation, **names)


async def test_a_multiplexed_session_waits_for_its_server(tmp_path: Path) -> None:
    """Its server stops, another one gets the address, then its own comes back."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    for directory in (mine, other):
        directory.mkdir()
        shard_name.draw(directory)
    with LocalServer(TARGET, mine) as server:
        port = int(server.url.rpartition(":")[2])
        client: ErrataClient[Any, Any, Any] = ErrataClient(server.url, mux=True, message_timeout_s=60)
        await client.connect()
        await client.reset()
        await client.step({"n": 2})
        eid, sid = client.eid, client.ticket()["sid"]
        assert shard_of(sid) == shard_of(eid or "") == shard_name.shard_name(mine)
    with LocalServer(TARGET, other, port=port):
        step = asyncio.ensure_future(client.step({"n": 3}))
        await until(lambda: client.stats.refused["MISDIRECTED"] > 1)
        assert not step.done()
    with LocalServer(TARGET, mine, port=port):
        assert (await step).observation["n"] == 5 and client.eid == eid and client.t == 2
        await client.close()


async def test_a_multiplexed_session_outlives_the_deadline_of_its_caller(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for directory in (mine, other):
        directory.mkdir()
        shard_name.draw(directory)
    with LocalServer(TARGET, mine) as server:
        port = int(server.url.rpartition(":")[2])
        client: ErrataClient[Any, Any, Any] = ErrataClient(server.url, mux=True, message_timeout_s=60)
        await client.connect()
        await client.reset()
        await client.step({"n": 2})
        client.ticket()
    with LocalServer(TARGET, other, port=port):
        step = asyncio.ensure_future(client.step({"n": 100}))
        await until(lambda: client.stats.refused["MISDIRECTED"] > 0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
    with LocalServer(TARGET, mine, port=port):
        await client.reattach()
        assert (await client.step({"n": 3})).observation["n"] == 5
        await client.close()


async def test_a_plain_socket_and_http_wait_for_their_server(tmp_path: Path) -> None:
    mine, other = application(tmp_path / "mine"), application(tmp_path / "other")
    entry = Entry(mine)
    with serving(entry) as url:
        first: ErrataClient[Any, Any, Any] = ErrataClient(url, mux=False, durable=True)
        await first.connect()
        await first.reset()
        await first.step({"n": 2})
        sid, eid = first.session_id or "", first.eid or ""
        assert shard_of(sid) == shard_of(eid) == shard_name.shard_name(tmp_path / "mine")
        await first.close()
        entry.app, entry.asked = other, []
        second: ErrataClient[Any, Any, Any] = ErrataClient(url, session_id=sid, mux=False, connect_timeout_s=60)
        attach, read = asyncio.ensure_future(second.connect()), asyncio.ensure_future(first._http().state_at(eid, 1))
        await until(lambda: min(entry.asked.count("/ws"), entry.asked.count(f"/episodes/{eid}/states/1")) > 1)
        assert not attach.done() and not read.done()
        entry.app = mine
        assert json.loads((await read).payload)["observation"]["n"] == 2
        await attach
        assert (await second.step({"n": 3})).observation["n"] == 5
        await second.close()


async def test_a_plain_socket_and_http_raise_at_their_deadline_and_keep_the_session(tmp_path: Path) -> None:
    mine, other = application(tmp_path / "mine"), application(tmp_path / "other")
    entry = Entry(mine)
    with serving(entry) as url:
        first: ErrataClient[Any, Any, Any] = ErrataClient(url, mux=False, durable=True)
        await first.connect()
        await first.reset()
        await first.close()
        http, eid = first._http(), first.eid or ""
        await http.state_at(eid, 0)
        entry.app = other
        first._connect_timeout, http._timeout_s = 2 * SLOWDOWN, 0.0
        for ask in (first.connect(), http.state_at(eid, 0)):
            with pytest.raises(Misdirected) as raised:
                await ask
            assert raised.value.details["shard"] == shard_name.shard_name(tmp_path / "mine")
        entry.app, first._connect_timeout = mine, 60
        assert (await first.step({"n": 3})).observation["n"] == 3 and first.session_id is not None
        await first.close()


async def test_what_waits_for_a_member_that_is_down_ends_at_once_when_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "FRESH_S", 0.0)
    mine, other = application(tmp_path / "mine"), application(tmp_path / "other")
    member = FleetMember(shard=shard_name.shard_name(tmp_path / "mine"), state="down")
    other.state.errata.runtime.members = MemberWatch(lambda: [member])
    entry = Entry(mine)
    with serving(entry) as url:
        mux: ErrataClient[Any, Any, Any] = ErrataClient(url, message_timeout_s=3600)
        first: ErrataClient[Any, Any, Any] = ErrataClient(url, mux=False, durable=True)
        for client in (mux, first):
            await client.reset()
        sid, eid = first.session_id, first.eid or ""
        await first.close()
        http = first._http()
        second: ErrataClient[Any, Any, Any] = ErrataClient(url, session_id=sid, mux=False, connect_timeout_s=3600)
        entry.app, http._timeout_s = other, 3600.0
        mux._mux._lease.connection._ws.transport.abort()  # type: ignore[union-attr]
        waiting = [asyncio.ensure_future(one) for one in (mux.step({"n": 1}), second.connect(), http.state_at(eid, 0))]
        await until(lambda: mux.stats.refused["MISDIRECTED"] > 1 and entry.asked.count("/fleet") > 3)
        assert not any(one.done() for one in waiting)
        member.state = "lost"
        for one in waiting:
            with pytest.raises(SessionLost, match=f"its member {member.shard}"):
                await one
        with pytest.raises(SessionLost):
            await mux.step({"n": 1})
        await http.aclose()


async def test_an_episode_of_another_directory_is_asked_for_over_http(tmp_path: Path) -> None:
    """The socket of a session does not reach it, and an HTTP request can be routed by its path."""
    entry = Entry(application(tmp_path / "mine"))
    elsewhere = f"ep_{named('k3v9x0q7m2ab', 'y0rsiJrIWNUoEqRMxH0cEIVn')}"
    with serving(entry) as url:
        async with ErrataClient(url) as client:
            await client.reset()
            sent = client.stats.requests
            for path, ask in (
                ("fork", client.fork(0, eid=elsewhere)),
                ("states/0", client.state_at(0, elsewhere)),
                ("rewards", client.rewards(elsewhere)),
            ):
                asking = asyncio.ensure_future(ask)
                wanted = f"/episodes/{elsewhere}/{path}"
                await until(lambda wanted=wanted: wanted in entry.asked)  # type: ignore[misc]
                asking.cancel()
                await asyncio.wait([asking])
                assert asking.cancelled()
            assert client.stats.requests == sent and not client.stats.refused
            child = await client.fork(0)
            assert shard_of(child.ticket()["sid"]) == shard_name.shard_name(tmp_path / "mine")
            assert (await child.step({"n": 4})).observation["n"] == 4
            await child.close()
