"""`DnsSource`: the members of a fleet are the addresses of a name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from errata_client import Endpoint, Fleet
from errata_client.fleet import dns_source
from errata_client.fleet.dns_source import DnsSource
from errata_protocol.errors import InvalidRequest, NotSupported
from errata_protocol.fleet import FleetMember, FleetMembers

A, B, C = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"


class Service:
    """A name with addresses, and what answers at each."""

    def __init__(self) -> None:
        self.shards: dict[str, str] = {}
        self.silent: set[str] = set()
        self.asked: list[str] = []
        self.source = DnsSource("dns://errata.pods:8000", {"Authorization": "Bearer x"}, self.resolve)
        self.source._server.ask = self.ask  # type: ignore[method-assign]

    async def resolve(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("errata.pods", 8000)
        if not self.shards:
            raise OSError("Name or service not known")
        return sorted(self.shards)

    async def ask(self, url: str, query: Any = None) -> FleetMembers:
        self.asked.append(url)
        address = url.removeprefix("http://").removesuffix(":8000").strip("[]")
        if address in self.silent:
            raise ConnectionError("refused")
        others = [FleetMember(shard=C, url="http://elsewhere", state="up")]
        return FleetMembers.of([FleetMember(shard=self.shards[address], state="up"), *others])


async def test_each_address_is_asked_who_it_is() -> None:
    service = Service()
    service.shards = {"10.0.0.1": A, "10.0.0.2": B}
    found = await Fleet(service.source).endpoints()
    assert found == [Endpoint(A, "http://10.0.0.1:8000", "up"), Endpoint(B, "http://10.0.0.2:8000", "up")]
    assert sorted(service.asked) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


async def test_a_member_that_does_not_answer_is_down_and_comes_back_at_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dns_source, "LOOK_S", 0.0)
    service = Service()
    service.shards = {"10.0.0.1": A, "10.0.0.2": B}
    watching = Fleet(service.source).watch()
    assert [one.state for one in await anext(watching)] == ["up", "up"]
    service.silent.add("10.0.0.2")
    assert [one.state for one in await anext(watching)] == ["up", "down"]
    following = asyncio.ensure_future(anext(watching))
    await asyncio.sleep(0)
    service.shards = {"10.0.0.1": A, "10.0.0.7": B, "fd00::1": C}
    found = await following
    assert [(one.shard, one.url, one.state) for one in found][:2] == [
        (A, "http://10.0.0.1:8000", "up"),
        (B, "http://10.0.0.7:8000", "up"),
    ]


async def test_a_member_whose_address_is_gone_is_down() -> None:
    service = Service()
    service.shards = {"10.0.0.1": A, "10.0.0.2": B}
    before, _ = await service.source.read(None, 0.0)
    del service.shards["10.0.0.1"]
    version, found = await service.source.read(before, 30.0)
    assert version != before and [(one.shard, one.state) for one in found] == [(A, "down"), (B, "up")]


async def test_a_name_without_members_is_no_fleet() -> None:
    service = Service()
    with pytest.raises(ConnectionError, match="no address"):
        await service.source.read(None, 0.0)
    service.shards = {"10.0.0.1": A}
    service.silent = {"10.0.0.1"}
    with pytest.raises(ConnectionError, match="refused"):
        await service.source.read(None, 0.0)

    async def vanilla(url: str, query: Any = None) -> FleetMembers:
        raise NotSupported("no /fleet")

    service.source._server.ask = vanilla  # type: ignore[method-assign]
    with pytest.raises(NotSupported):
        await service.source.read(None, 0.0)


async def test_names_are_resolved_and_addresses_of_ipv6_are_urls() -> None:
    assert await dns_source.resolve("127.0.0.1", 80) == ["127.0.0.1"]
    assert DnsSource("dns+https://pods:443/maze", None)._url_at("fd00::1") == "https://[fd00::1]:443/maze"


@pytest.mark.parametrize("address", ["dns://host", "dns://:80", "dns://a@host:80", "dns://host:80?x=1", "dns://host:x"])
def test_an_address_that_is_no_name_with_a_port_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="dns://HOST:PORT"):
        Fleet.of(address)
