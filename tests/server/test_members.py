"""``GET /fleet``: who the members of a server are, and the wait for a change (PROTOCOL F6)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr, ValidationError

from errata_protocol.fleet import FleetMember, FleetMembers, State
from errata_server.app import create_fastapi_app
from errata_server.fleet.board import STALE_S, Board
from errata_server.fleet.member import Member, Plan
from errata_server.runtime.members import MemberWatch
from errata_server.runtime.shard_name import write
from errata_server.settings import Settings

from .environments import CountAction, CountEnvironment, CountObservation

NAMES = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")


def client(data_dir: Path | None = None, **settings: Any) -> TestClient:
    return TestClient(
        create_fastapi_app(
            CountEnvironment, CountAction, CountObservation, settings=Settings(data_dir=data_dir, **settings)
        )
    )


class Members:
    """Two members, of which the second changes."""

    def __init__(self) -> None:
        self.second: State = "up"
        self.asked = 0

    def __call__(self) -> list[FleetMember]:
        self.asked += 1
        return [FleetMember(shard=NAMES[0], state="up"), FleetMember(shard=NAMES[1], state=self.second)]


def test_one_process_is_one_member(tmp_path: Path) -> None:
    write(tmp_path, NAMES[0])
    with client(tmp_path) as http:
        found = http.get("/fleet").json()
        assert found["members"] == [{"shard": NAMES[0], "url": None, "state": "up"}]
        assert http.get("/fleet", params={"after": found["version"], "wait": 0.01}).json() == found
        assert "fleet" not in http.get("/capabilities").json()["extensions"]


def test_a_directory_without_a_name_is_a_member_without_one() -> None:
    with client() as http:
        assert http.get("/fleet").json()["members"] == [{"shard": None, "url": None, "state": "up"}]


def test_members_are_told_behind_the_guard() -> None:
    with client(token=SecretStr("secret")) as http:
        assert http.get("/fleet").status_code == 401
        assert http.get("/fleet", headers={"Authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize("query", ["wait=31", "wait=-1", "wait=nan", "after=" + "a" * 65, "after=.", "after="])
def test_a_wait_and_a_version_are_bounded(query: str) -> None:
    with client() as http:
        assert http.get(f"/fleet?{query}").status_code == 422


async def test_a_request_that_waits_is_answered_at_the_change() -> None:
    members = Members()
    watch = MemberWatch(members)
    version = watch.now().version
    waiting = [asyncio.ensure_future(watch.after(version, 600.0)) for _ in range(2)]
    await asyncio.sleep(0)
    watch.look()
    assert not any(one.done() for one in waiting), "nothing has changed"
    members.second = "down"
    late = asyncio.ensure_future(watch.after(watch.now().version, 600.0))  # it has the new version already
    await asyncio.sleep(0)
    for one in waiting:
        assert [member.state for member in (await one).members] == ["up", "down"]
    assert not late.done()
    members.second = "up"
    watch.look()
    assert (await late).version == version, "the same members have the same version, in every process"


async def test_a_heartbeat_costs_nothing_while_nobody_waits() -> None:
    members = Members()
    watch = MemberWatch(members)
    watch.look()
    assert members.asked == 0


async def test_nobody_waits_for_a_version_that_is_not_there_or_for_a_server_that_stops() -> None:
    watch = MemberWatch(Members())
    now = watch.now()
    assert await watch.after("another", 600.0) == now == await watch.after(None, 600.0)
    waiting = asyncio.ensure_future(watch.after(now.version, 600.0))
    await asyncio.sleep(0)
    watch.end()
    assert await waiting == now == await watch.after(now.version, 600.0)


async def test_a_request_that_its_client_gave_up_is_forgotten() -> None:
    members = Members()
    watch = MemberWatch(members)
    waiting = asyncio.ensure_future(watch.after(watch.now().version, 600.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    asked = members.asked
    watch.look()
    assert members.asked == asked


def planned(board: Board | None, names: tuple[str, ...], logins: Path, directories: tuple[Path, ...] = ()) -> Plan:
    """Return a plan of workers that have no sockets."""
    return Plan("http://localhost", None, None, board, names, directories, (), (), (), (), logins)  # type: ignore[arg-type]


def test_a_worker_whose_event_loop_does_not_run_is_down(tmp_path: Path) -> None:
    now = [100.0]
    board = Board(2, lambda: now[0])
    member = Member(planned(board, NAMES, tmp_path), 0)
    assert [one.state for one in member.members()] == ["down", "down"], "neither has begun"
    board.beat(0, 0)
    board.beat(1, 0)
    assert [(one.shard, one.url, one.state) for one in member.members()] == [(name, None, "up") for name in NAMES]
    now[0] += STALE_S / 2
    board.beat(0, 0)
    now[0] += STALE_S / 2 + 0.01
    assert [one.state for one in member.members()] == ["up", "down"]


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "http://",
        "http://user:pw@host",
        "//host",
        "http://host/?a=b",
        "http://host#x",
        "http://[",
        "x" * 3000,
    ],
    ids=str.__len__,
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        FleetMember(url=url, state="up")


def test_a_word_that_a_later_protocol_has_is_down() -> None:
    assert FleetMember.model_validate({"state": "draining"}).state == "draining"
    assert FleetMember.model_validate({"state": "resting"}).state == "down"
    with pytest.raises(ValidationError):
        FleetMember.model_validate({"state": 5})
    with pytest.raises(ValidationError):
        FleetMembers.model_validate({"version": "v", "members": []})
