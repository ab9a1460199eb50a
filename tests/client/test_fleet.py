"""`Fleet`: the members of a server, from a member, from a file, and from servers that mean harm."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from loopback import served

from errata_client import Endpoint, Fleet
from errata_client.connections.dialing import Dial
from errata_client.connections.placing import Places
from errata_client.fleet import file_source, members, server_source, source
from errata_client.fleet import fleet as fleets
from errata_protocol.errors import ErrataError, InvalidRequest, NotSupported
from errata_protocol.fleet import MAX_LIST, FleetMember, State
from errata_server.runtime.members import MemberWatch
from tests.machine_speed import SLOWDOWN
from tests.server.hostile_servers import hostile_server

NAMES = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")

HOSTILE = ("closes", "silent", "garbage", "drips-body", "endless-body", "huge-length", "bomb", "redirect", "no-content")


class Server:
    """A server that tells two members, of which the second changes.

    Args:
        url: Address of the second member; None for that of the server.
    """

    def __init__(self, url: str | None = None) -> None:
        self.second = FleetMember(shard=NAMES[1], url=url, state="up")
        self.waits: list[float] = []
        self.watch = MemberWatch(lambda: [FleetMember(shard=NAMES[0], state="up"), self.second])
        self.app = FastAPI()

        @self.app.get("/fleet")
        async def get_fleet(after: str | None = None, wait: float = 0.0) -> Any:
            self.waits.append(wait)
            return (await self.watch.after(after, wait)).model_dump()

        @self.app.post("/state/{state}")
        async def set_state(state: State) -> None:
            self.second = self.second.model_copy(update={"state": state})
            self.watch.look()


async def test_members_of_one_address_are_reached_by_name() -> None:
    with served(Server().app) as url:
        async with Fleet.of(f"{url}/") as fleet:
            found = await fleet.endpoints()
    assert found == [Endpoint(name, url, "up") for name in NAMES]
    assert found[1].ws_url == f"{url.replace('http', 'ws')}/ws?shard={NAMES[1]}"
    assert Endpoint(None, url, "up").ws_url == f"{url.replace('http', 'ws')}/ws"


async def test_a_change_is_watched_with_one_request_that_waits() -> None:
    server = Server()
    with served(server.app) as url:
        async with Fleet.of(url) as fleet, httpx.AsyncClient() as http:
            watching = fleet.watch()
            assert [one.state for one in await anext(watching)] == ["up", "up"]
            following = asyncio.ensure_future(anext(watching))
            assert (await http.post(f"{url}/state/lost")).status_code == 200
            assert [one.state for one in await following] == ["up", "lost"]
    assert server.waits == [0.0, 30.0]


async def test_another_member_is_asked_where_the_first_does_not_answer() -> None:
    second = Server()
    with served(second.app) as others_url:
        with served(Server(others_url).app) as url:
            fleet = Fleet.of(url)
            assert (await fleet.endpoints())[1] == Endpoint(NAMES[1], others_url, "up")
        assert [one.url for one in await fleet.endpoints()] == [others_url, others_url]
        await fleet.aclose()
    with pytest.raises(ConnectionError, match="/fleet failed"):
        await fleet.endpoints()


async def test_a_watch_goes_on_while_no_member_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "AGAIN_S", 0.0)
    answers: list[Any] = [("1", []), ConnectionError("away"), ("1", []), ConnectionError("away"), ("2", ["changed"])]

    class Scripted:
        async def read(self, after: str | None, wait_s: float) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def aclose(self) -> None: ...

    watching = Fleet(Scripted()).watch()
    assert [await anext(watching), await anext(watching)] == [[], ["changed"]]


async def test_a_server_without_the_route_tells_no_members() -> None:
    with served(FastAPI()) as url:
        async with Fleet.of(url) as fleet:
            with pytest.raises(NotSupported, match="no /fleet"):
                await fleet.endpoints()


async def test_what_a_server_answers_instead_is_an_error_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_source, "ANSWER_S", 0.5 * SLOWDOWN)
    monkeypatch.setattr(server_source, "MAX_BYTES", 64 * 1024)

    async def asked(url: str) -> object:
        async with Fleet.of(url) as fleet:
            try:
                return await fleet.endpoints()
            except (ErrataError, ConnectionError) as error:
                return error

    with hostile_server() as url:
        found = await asyncio.gather(*(asked(url + name) for name in HOSTILE))
    assert [name for name, one in zip(HOSTILE, found, strict=True) if not isinstance(one, Exception)] == []


async def test_a_file_has_the_members_and_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "LOOK_S", 0.0)
    path = tmp_path / "the fleet.json"
    listed = [{"shard": name, "url": f"http://host-{name}/", "state": "up"} for name in NAMES]
    path.write_text(json.dumps({"members": listed}))
    watching = Fleet.of(f"file://{tmp_path}/the%20fleet.json").watch()
    assert await anext(watching) == [Endpoint(name, f"http://host-{name}", "up") for name in NAMES]
    following = asyncio.ensure_future(anext(watching))
    draft = tmp_path / "draft"
    draft.write_text(json.dumps({"members": [listed[0], {**listed[1], "state": "lost"}]}))
    draft.replace(path)
    assert [one.state for one in await following] == ["up", "lost"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"members": []}', '{"members": [{"state": "up"}]}', '{"members": [{"url": "x", "state": "up"}]}'],
    ids=["empty", "array", "no-members", "none", "no-url", "no-address"],
)
async def test_a_file_that_is_no_list_of_members_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "fleet.json").write_text(text)
    with pytest.raises(InvalidRequest, match="no list of members"):
        await Fleet.of(f"file://{tmp_path}/fleet.json").endpoints()


async def test_a_file_is_bounded_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text(" " * (MAX_LIST + 1))
    with pytest.raises(InvalidRequest, match=f"longer than {MAX_LIST} bytes"):
        await Fleet.of(f"file://{tmp_path}/fleet.json").endpoints()
    for none in (tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(ConnectionError):
            await Fleet.of(f"file://{none}").endpoints()


def test_further_sources_are_found_by_their_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    point = SimpleNamespace(load=lambda: lambda address, headers: made.append((address, headers)))
    monkeypatch.setattr(source, "entry_points", lambda group, name: [point] if name == "ray" else [])
    Fleet.of("ray:actor", headers={"a": "b"})
    assert made == [("ray:actor", {"a": "b"})]
    for address in ("gopher:host", "nothing", "file://host/path", "file:"):
        with pytest.raises(InvalidRequest):
            Fleet.of(address)


async def test_sessions_are_placed_at_all_members_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    url, names = "http://host:8000", ["a" * 12, "b" * 12, "c" * 12, "d" * 12]
    found = [
        Endpoint(names[0], url, "up"),
        Endpoint(names[1], url, "down"),
        Endpoint(names[2], "http://other:8000", "up"),
        Endpoint(names[3], url, "draining"),
        Endpoint(None, url, "up"),
    ]
    reads: list[None] = []

    class Scripted:
        async def read(self, after: str | None, wait_s: float) -> Any:
            reads.append(None)
            await asyncio.sleep(0)
            return "1", found

        async def aclose(self) -> None: ...

    places = Places(Dial("ws://host:8000/ws"))
    places.members._fleet = Fleet(Scripted())
    chosen = [
        dial for dial in await asyncio.gather(*(places.place(f"group {n}") for n in range(100))) if dial is not None
    ]
    assert {dial.url for dial in chosen} == {
        f"ws://host:8000/ws?shard={names[0]}",
        f"ws://other:8000/ws?shard={names[2]}",
    }
    assert len(reads) == 1, "members are read once for all that open together"
    assert await places.place("group 7") == chosen[7] and places.are_apart
    places.avoid(names[2])
    assert {(await places.place(f"group {n}") or chosen[0]).shard for n in range(100)} == {names[0]}
    monkeypatch.setattr(members, "FRESH_S", -1.0)
    places.members._until = float("-inf")
    found[:] = found[1:2]
    assert await places.place("group 7") is None and len(reads) == 2
