"""An eid is a name: without tokens an episode is read by its session, with its read key, or by the server's own user on
its machine (PROTOCOL F2)."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from errata_protocol.mux import hash_key
from errata_protocol.read_keys import read_key
from errata_server.app import create_fastapi_app
from errata_server.doors import readers
from errata_server.doors.local_peer import is_own_user, user_of
from errata_server.journal.base import Journal
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation

ANOTHER = ("10.0.0.7", 5)
SID, KEY = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "n4Jr6Lm8Po0Qs2Tu4Vw6Xy"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def app() -> FastAPI:
    return create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, max_concurrent_envs=8, settings=Settings(insecure=True)
    )


@pytest.fixture
def stranger(app: FastAPI) -> Iterator[TestClient]:
    """A client on another machine, of a server that serves everybody without a token."""
    with TestClient(app, client=ANOTHER, base_url="http://localhost:8000") as client:
        yield client


def played(client: TestClient, n: int = 1) -> tuple[str, str]:
    """Play an episode on a plain socket; return its eid and read key."""
    with connect(client) as session:
        eid = session.ask("reset", {})["eid"]
        for _ in range(n):
            session.ask("step", {"n": 1})
        return eid, session.ask("capabilities")["data"]["session"]["read_key"]


REQUESTS = [
    ("GET", "", None),
    ("GET", "/states/1", None),
    ("GET", "/rewards", None),
    ("GET", "/bundle", None),
    ("POST", "/rewards", {"t": 1, "value": 1.0, "source": "judge", "reward_id": "r"}),
    ("POST", "/fork", {"t": 1, "request_id": "r"}),
    ("DELETE", "", None),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_an_eid_alone_opens_nothing(stranger: TestClient, method: str, path: str, body: Any) -> None:
    eid, key = played(stranger)
    _, other = played(stranger)
    for headers in ({}, bearer(other), bearer(eid), bearer(""), {"Authorization": f"Basic {key}"}):
        refused = stranger.request(method, f"/episodes/{eid}{path}", json=body, headers=headers)
        unknown = stranger.request(method, f"/episodes/ep_none{path}", json=body, headers=headers)
        assert refused.status_code == unknown.status_code == 404
        assert refused.text.replace(eid, "ep_none") == unknown.text
    assert stranger.request(method, f"/episodes/{eid}{path}", json=body, headers=bearer(key)).status_code == 200


def test_a_list_is_for_the_servers_own_user(app: FastAPI, stranger: TestClient) -> None:
    eid, key = played(stranger)
    for headers in ({}, bearer(key)):
        refused = stranger.get("/episodes", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (401, "UNAUTHORIZED")
        assert "ERRATA_TOKEN" in refused.json()["message"] and eid not in refused.text
    assert [one["eid"] for one in TestClient(app).get("/episodes").json()["episodes"]] == [eid]
    proxied = TestClient(app).get("/episodes", headers={"X-Forwarded-For": "127.0.0.1"})
    assert proxied.status_code == 401, "whom a proxy speaks for is not known"


def test_several_episodes_are_deleted_as_far_as_the_key_opens_them(stranger: TestClient) -> None:
    mine, key = played(stranger)
    theirs, _ = played(stranger)
    asked = {"eids": [mine, theirs, "ep_none"]}
    told = stranger.post("/episodes/delete", json=asked, headers=bearer(key)).json()
    assert told == {"deleted": {mine: 2}, "unknown": [theirs, "ep_none"], "in_use": []}


def test_a_plain_socket_reads_its_own_episodes_and_those_of_its_key(stranger: TestClient) -> None:
    theirs, key = played(stranger)
    with connect(stranger) as session:
        first = session.ask("reset", {})["eid"]
        session.ask("reset", {})
        assert session.ask("state", {"t": 0, "eid": first})["eid"] == first
        for message in (
            ("state", {"t": 0, "eid": theirs}),
            ("reset", {"injected_state": {"episode_id": theirs, "t": 0}}),
        ):
            assert session.ask(*message)["data"]["code"] == "UNKNOWN_EPISODE"
        assert session.ask("reset", {"injected_state": {"episode_id": first, "t": 0}})["t"] == 0
    stranger.headers.update(bearer(key))
    with connect(stranger) as session:
        assert session.ask("state", {"t": 0, "eid": theirs})["eid"] == theirs


def test_a_child_is_opened_by_its_own_key_only(stranger: TestClient) -> None:
    eid, key = played(stranger, 2)
    child = stranger.post(f"/episodes/{eid}/fork", json={"t": 1, "request_id": "r"}, headers=bearer(key)).json()
    assert stranger.get(f"/episodes/{child['eid']}", headers=bearer(key)).status_code == 404
    assert stranger.get(f"/episodes/{eid}", headers=bearer(child["read_key"])).status_code == 404
    assert stranger.get(f"/episodes/{child['eid']}", headers=bearer(child["read_key"])).json()["origin"]["eid"] == eid
    lines = stranger.get(f"/episodes/{child['eid']}/bundle", headers=bearer(child["read_key"])).text
    assert lines.count('"record":"episode"') == 1, "the parent is another session's"


def test_a_multiplexed_session_reads_its_own_episodes_and_its_key_makes_their_read_key(stranger: TestClient) -> None:
    theirs, key = played(stranger)

    def ask(**envelope: Any) -> dict[str, Any]:
        ws.send_json({"sid": SID, **envelope})
        said: dict[str, Any] = ws.receive_json()
        return said

    with stranger.websocket_connect("/ws", subprotocols=["openenv.mux.v1"]) as ws:
        ask(type="open", data={"key": KEY})
        eid = ask(id=1, type="reset")["eid"]
        ask(id=2, type="reset")
        assert ask(q=1, type="state", data={"t": 0, "eid": eid})["eid"] == eid
        foreign = {"injected_state": {"episode_id": theirs, "t": 0}}
        for message in (
            {"q": 1, "type": "state", "data": {"t": 0, "eid": theirs}},
            {"q": 2, "type": "rewards", "data": {"eid": theirs}},
            {"id": 3, "type": "reset", "data": foreign},
            {"id": 4, "type": "fork", "data": {"t": 0, "eid": theirs, "child": {"sid": SID + "2", "key": KEY}}},
        ):
            assert ask(**message)["data"]["code"] == "UNKNOWN_EPISODE"
    with stranger.websocket_connect("/ws", subprotocols=["openenv.mux.v1"], headers=bearer(key)) as ws:
        ws.send_json({"type": "resume", "data": [{"sid": SID, "key": KEY, "last": 4}]})
        assert ws.receive_json()["type"] == "resumed"
        assert ask(q=1, type="state", data={"t": 0, "eid": theirs})["eid"] == theirs
        assert ask(id=5, type="reset", data=foreign)["t"] == 0
    assert stranger.get(f"/episodes/{eid}").status_code == 404
    own = bearer(read_key(hash_key(SID, KEY)))
    assert stranger.get(f"/episodes/{eid}", headers=own).json()["eid"] == eid


def test_no_key_is_told_where_there_are_tokens_or_no_reads() -> None:
    for settings, mode in ((Settings(token="s3cret-s3cret"), "simulation"), (Settings(), "production")):  # type: ignore[arg-type]
        made = create_fastapi_app(CountEnvironment, CountAction, CountObservation, settings=settings, mode=mode)
        with TestClient(made, headers=bearer("s3cret-s3cret")) as client, connect(client) as session:
            assert "read_key" not in session.ask("capabilities")["data"]["session"]


def test_what_does_not_exist_is_looked_for_as_long(
    app: FastAPI, stranger: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are counted: the journal is asked as often for a foreign episode as for none, and a key is compared."""
    eid, _ = played(stranger)
    journal: Journal = app.state.errata.runtime.store.journal
    asked: list[str] = []
    for name in ("episode", "session"):
        read = getattr(journal, name)
        monkeypatch.setattr(journal, name, lambda *given, name=name, read=read: (asked.append(name), read(*given))[1])
    stranger.get(f"/episodes/{eid}")
    foreign, asked[:] = list(asked), []
    stranger.get("/episodes/ep_none")
    assert foreign == asked == ["episode", "session"]


# -- who is at the other end -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        server.settimeout(60)
        with socket.create_connection(server.getsockname()[:2], timeout=60) as client:
            accepted, _ = server.accept()
            with accepted:
                yield accepted, client


@pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="sock_diag is Linux's; elsewhere nobody is known")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_tells_whose_the_other_end_is(host: str) -> None:
    with connected(host) as (accepted, client):
        peer, here = accepted.getpeername()[:2], accepted.getsockname()[:2]
        assert user_of(peer, here) == os.getuid() and is_own_user(peer, here)
        mapped = [("::ffff:" + one[0], one[1]) for one in (peer, here)] if host == "127.0.0.1" else [peer, here]
        assert user_of(*mapped) == os.getuid()
        client.close()
        assert user_of(peer, here) is None, "a socket that is closing has no user, and the kernel says 0, as for root"
    assert not is_own_user(("127.0.0.1", 1), ("127.0.0.1", 2)) and not is_own_user(("here", 1), ("there", 2))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as somebody else")
def test_another_user_of_the_machine_is_not_the_servers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        address = server.getsockname()
        if (child := os.fork()) == 0:
            try:
                os.setuid(65534)
                with socket.socket() as other:
                    other.connect(address)
                    other.recv(1)
            finally:
                os._exit(0)
        accepted, peer = server.accept()
        with accepted:
            assert user_of(peer, address) == 65534 and not is_own_user(peer, address)
        os.waitpid(child, 0)


def test_a_server_asks_the_kernel_for_loopback_peers_only(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(readers, "is_own_user", lambda *ends: asked.append(ends) or True)
    for peer, status in ((("127.0.0.1", 5), 200), (ANOTHER, 401)):
        with TestClient(app, client=peer, base_url="http://localhost:8000") as client:
            assert client.get("/episodes").status_code == status
    assert asked == [(("127.0.0.1", 5), ("localhost", 8000))]
