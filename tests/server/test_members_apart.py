"""Clients of servers with addresses of their own that a file lists: from any member, and from the list's address."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openenv.core.generic_client import GenericEnvClient

from errata_client import Connection, EnvPool, ErrataClient
from errata_client.fleet import members
from errata_protocol.errors import InvalidRequest, Misdirected, SessionLost, UnknownEpisode
from errata_protocol.shards import shard_of
from errata_server.runtime import listed_members
from errata_server.runtime.shard_dirs import name_of
from errata_server.settings import Settings

from .local_server import LocalServer

TARGET = "tests.server.environments:CountEnvironment"
SESSIONS = 48
"""One of three members has none of these by chance once in 94 million runs."""

GIVE_UP_S = 60.0


class Apart:
    """Members of one fleet.

    Args:
        path: The file that lists them.
        urls: Their addresses, by shard.
    """

    def __init__(self, path: Path, urls: dict[str, str]) -> None:
        self.path = path
        self.urls = urls
        self.address = f"file://{path}"
        self.url = next(iter(urls.values()))
        self.states = dict.fromkeys(urls, "up")
        self.write()

    def write(self) -> None:
        listed = [{"shard": shard, "url": url, "state": self.states[shard]} for shard, url in self.urls.items()]
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({"members": listed}))
        draft.replace(self.path)

    def wait_for_list(self) -> None:
        """Wait until the first member has the list as it is now."""
        listed, end = json.loads(self.path.read_text())["members"], time.monotonic() + GIVE_UP_S
        while httpx.get(f"{self.url}/fleet").json()["members"] != listed:
            if time.monotonic() >= end:
                pytest.fail("the server does not read its list")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    monkeypatch.setattr(listed_members, "LOOK_S", 0.02)
    monkeypatch.setattr(members, "FRESH_S", 0.1)
    path = tmp_path / "fleet.json"
    with ExitStack() as running:
        urls = {}
        for name in ("first", "second", "third"):
            shard = name_of(tmp_path / name)
            server = LocalServer(TARGET, tmp_path / name, Settings(members=f"file://{path}", fsync=False))
            urls[shard] = running.enter_context(server).url
        made = Apart(path, urls)
        made.wait_for_list()
        yield made


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def shards_of(pool: EnvPool) -> list[str]:
    return [str(shard_of(str(client.eid))) for client in pool.clients]


async def test_episodes_tickets_and_stock_sockets_are_found_from_any_member(fleet: Apart) -> None:
    one, other = list(fleet.urls.values())[:2]
    async with Connection(one) as connection, ErrataClient[Any, Any, Any](connection=connection) as client:
        await client.reset()
        await client.step({"n": 2})
        eid, ticket = str(client.eid), client.ticket()
        async with ErrataClient[Any, Any, Any](other) as reader:
            assert (await reader._http().episode(eid)).deliveries == 2
            assert (await reader._http().state_at(eid, 1)).payload
            assert await reader._http().rewards(eid) == []
    async with ErrataClient[Any, Any, Any].resume(other, ticket) as resumed:
        assert (await resumed.step({"n": 3})).observation["n"] == 5
        lease = resumed._mux._lease
        assert lease is not None and lease.connection.member == shard_of(eid)
    plain: ErrataClient[Any, Any, Any] = ErrataClient(one, mux=False, durable=True)
    await plain.reset()
    sid = str(plain.session_id)
    await plain.close()
    async with ErrataClient[Any, Any, Any](other, session_id=sid, mux=False) as attached:
        assert (await attached.step({"n": 4})).observation["n"] == 4


async def test_the_list_is_an_address_too(fleet: Apart) -> None:
    async with EnvPool(fleet.address, SESSIONS) as pool:
        await pool.reset_batch()
        assert set(shards_of(pool)) == set(fleet.urls)
        eid = str(pool.clients[0].eid)
        assert (await pool.clients[1]._http().state_at(eid, 0)).payload
        ticket = pool.clients[0].ticket()
    async with ErrataClient[Any, Any, Any].resume(fleet.address, ticket) as resumed:
        assert (await resumed.step({"n": 3})).observation["n"] == 3


async def test_a_member_that_cannot_be_reached_gets_no_sessions(fleet: Apart, nowhere: str) -> None:
    dead = list(fleet.urls)[1]
    fleet.urls[dead] = nowhere
    fleet.write()
    fleet.wait_for_list()
    async with EnvPool(fleet.url, SESSIONS) as pool:
        await pool.reset_batch()
        assert set(shards_of(pool)) == set(fleet.urls) - {dead}


async def test_a_session_waits_for_a_member_that_is_down_and_ends_with_one_that_is_lost(
    fleet: Apart, nowhere: str
) -> None:
    moved = list(fleet.urls)[1]
    url = fleet.urls[moved]
    async with Connection(url) as connection, ErrataClient[Any, Any, Any](connection=connection) as client:
        await client.reset()
        ticket, eid = client.ticket(), str(client.eid)
    fleet.urls[moved], fleet.states[moved] = nowhere, "down"
    fleet.write()
    fleet.wait_for_list()
    resumed = ErrataClient[Any, Any, Any].resume(fleet.url, ticket)
    reading = asyncio.ensure_future(resumed._http().state_at(eid, 0))
    stepping = asyncio.ensure_future(resumed.step({"n": 3}))
    await asyncio.sleep(0.5)
    assert not stepping.done() and not reading.done()
    fleet.urls[moved], fleet.states[moved] = url, "up"
    fleet.write()
    assert (await stepping).observation["n"] == 3 and (await reading).payload
    await resumed.close()
    fleet.states[moved] = "lost"
    fleet.write()
    fleet.wait_for_list()
    for asked in (
        ErrataClient[Any, Any, Any].resume(fleet.url, ticket).step({"n": 3}),
        ErrataClient[Any, Any, Any].resume(fleet.address, ticket).step({"n": 3}),
        ErrataClient[Any, Any, Any](fleet.url)._http().state_at(eid, 0),
    ):
        with pytest.raises((SessionLost, UnknownEpisode)):
            await asked


async def test_a_url_that_the_list_does_not_have_is_not_asked(fleet: Apart) -> None:
    """A token is sent to members only, whatever an error says."""
    asked: list[str] = []
    async with ErrataClient[Any, Any, Any](fleet.url) as client:
        http = client._http()
        http._timeout_s = 0.0

        async def ask(base: str) -> None:
            asked.append(base)
            raise Misdirected("unlistedabcd", "http://elsewhere")

        with pytest.raises(Misdirected):
            await http._routed(ask, "unlistedabcd")
    assert asked == [fleet.url]


def test_a_connection_is_to_one_server(fleet: Apart) -> None:
    with pytest.raises(InvalidRequest, match="address of a list"):
        Connection(fleet.address)


def test_stock_clients_play_at_one_member(fleet: Apart) -> None:
    with GenericEnvClient(base_url=fleet.url).sync() as client:
        client.reset()
        assert client.step({"n": 2}).observation["n"] == 2
