"""``errata serve --members``: the members of a fleet of servers at addresses of their own (PROTOCOL F5, F6)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from errata_protocol.errors import InvalidRequest
from errata_protocol.fleet import MAX_LIST, MAX_MEMBERS
from errata_protocol.shards import named
from errata_server.app import create_fastapi_app
from errata_server.cli import commands
from errata_server.runtime import listed_members
from errata_server.runtime.listed_members import ListedMembers
from errata_server.runtime.shard_name import write
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation

OWN, UP, LOST = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"
SECRET = "Zq3vK8s0T1u5Wb7Yc9Xd2A"
LISTED = [
    {"shard": OWN, "url": "http://host-a:8000", "state": "up"},
    {"shard": UP, "url": "http://host-b:8000", "state": "up"},
    {"shard": LOST, "url": "http://host-c:8000", "state": "lost"},
]
GIVE_UP_S = 60.0


def write_list(path: Path, members: list[dict[str, Any]]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"members": members}))
    draft.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_list(tmp_path / "fleet.json", LISTED)
    return tmp_path / "fleet.json"


@pytest.fixture
def client(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr(listed_members, "LOOK_S", 0.01)
    directory = tmp_path / "data"
    directory.mkdir()
    write(directory, OWN)
    settings = Settings(data_dir=directory, members=f"file://{path}")
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, env_name="Count", settings=settings)
    with TestClient(app) as made:
        yield made


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + GIVE_UP_S
    while not holds():
        if time.monotonic() >= end:
            pytest.fail("it did not come about")
        time.sleep(0.01)


def test_the_list_is_the_answer_whichever_member_is_asked(client: TestClient, path: Path) -> None:
    assert client.get("/fleet").json()["members"] == LISTED
    assert client.get("/capabilities").json()["extensions"]["fleet"] == 1
    version = client.get("/fleet").json()["version"]
    write_list(path, LISTED[:2])
    found = client.get("/fleet", params={"after": version, "wait": 30.0}).json()
    assert found["members"] == LISTED[:2] and found["version"] != version


def test_who_asks_for_anothers_episode_or_session_gets_its_address(client: TestClient, path: Path) -> None:
    def asked(shard: str) -> tuple[Any, Any, Any]:
        over_http = client.get(f"/episodes/ep_{named(shard, SECRET)}").json()
        with client.websocket_connect(f"/ws?session_id={named(shard, SECRET)}") as socket:
            attached = socket.receive_json()["data"]
        with client.websocket_connect("/ws", subprotocols=["openenv.mux.v1"]) as socket:
            resume = {"type": "resume", "data": [{"sid": named(shard, SECRET), "key": "k" * 22}]}
            socket.send_text(json.dumps(resume))
            resumed = json.loads(socket.receive_text())["data"]
        return over_http, attached, resumed

    for found in asked(UP):
        assert (found["code"], found["shard"], found["url"]) == ("MISDIRECTED", UP, "http://host-b:8000")
    assert [found["code"] for found in asked(LOST)] == ["UNKNOWN_EPISODE", "SESSION_LOST", "SESSION_LOST"]
    assert all(found["code"] == "MISDIRECTED" and "url" not in found for found in asked("unlistedabcd"))
    write_list(path, [*LISTED[:2], {**LISTED[2], "url": "http://host-d:8000", "state": "up"}])
    until(lambda: asked(LOST)[0]["code"] == "MISDIRECTED")
    assert {found["url"] for found in asked(LOST)} == {"http://host-d:8000"}


def test_its_own_sessions_are_served_whatever_the_list_says_of_it(client: TestClient, path: Path) -> None:
    write_list(path, [{**LISTED[0], "state": "lost"}, LISTED[1]])
    until(lambda: client.get("/fleet").json()["members"][0]["state"] == "lost")
    with connect(client) as socket:
        eid = socket.ask("reset")["eid"]
        assert socket.ask("step", {"n": 2})["data"]["observation"]["n"] == 2
    assert client.get(f"/episodes/{eid}").status_code == 200


def test_a_list_that_cannot_be_read_stays_as_it_was_and_ready_says_so(client: TestClient, path: Path) -> None:
    assert "unusable" not in client.get("/ready").json()
    for damage in (path.unlink, lambda: path.write_text("[]"), lambda: path.write_bytes(b"x" * (MAX_LIST + 1))):
        damage()
        until(lambda: "unusable" in client.get("/ready").json())
        ready = client.get("/ready")
        assert ready.status_code == 200 and "stays as it was" in ready.json()["unusable"]["members"][0]
        assert client.get("/fleet").json()["members"] == LISTED
        write_list(path, LISTED)
        until(lambda: "unusable" not in client.get("/ready").json())


def test_a_server_that_the_list_leaves_out_is_a_member_at_the_address_that_was_asked(path: Path) -> None:
    path.unlink()
    listed, alone = ListedMembers(f"file://{path}", OWN), {"shard": OWN, "url": None, "state": "up"}
    assert not listed.look() and [one.model_dump() for one in listed.members()] == [alone]
    assert "cannot be read" in listed.trouble()["list"]
    write_list(path, LISTED[1:])
    assert listed.look() and [one.model_dump() for one in listed.members()] == [*LISTED[1:], alone]
    assert not listed.look() and not listed.trouble(), "nothing has changed"


def test_a_full_list_without_this_server_is_refused(path: Path) -> None:
    write_list(path, [{**LISTED[1], "shard": f"{n:012}"} for n in range(MAX_MEMBERS)])
    listed = ListedMembers(f"file://{path}", OWN)
    assert not listed.look() and "none of them" in listed.trouble()["list"]


async def test_the_list_is_read_before_the_first_request_and_no_longer_after_the_last(path: Path) -> None:
    listed = ListedMembers(f"file://{path}", OWN)
    await listed.start(lambda: None)
    assert len(listed.members()) == 3
    await listed.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "errata-members"]


@pytest.mark.parametrize("address", ["/fleet.json", "file://host/fleet.json", "file:", "http://host"])
def test_an_address_that_names_no_file_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="file:///PATH"):
        create_fastapi_app(CountEnvironment, CountAction, CountObservation, settings=Settings(members=address))


def test_servers_of_several_workers_are_no_members(path: Path, tmp_path: Path) -> None:
    given = f"serve any --check --workers 2 --members file://{path} --data-dir {tmp_path / 'data'}"
    ended = CliRunner().invoke(commands.cli, given.split())
    assert isinstance(ended.exception, InvalidRequest) and "--workers" in ended.exception.message
