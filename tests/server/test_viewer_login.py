"""The login of the viewer over HTTP: what is open without a token, what a cookie opens, and to whom."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server import create_app as upstream_create_app
from pydantic import SecretStr

from errata_client import ErrataClient
from errata_protocol.errors import JournalUnavailable
from errata_server import adopt
from errata_server.doors.viewer_login import LOGIN_S, MAX_LOGINS, MAX_PEERS, MAX_WRONG, WRONG_S, Logins
from errata_server.fleet.logins import StoredLogins, empty
from errata_server.settings import Settings

from .environments import CountAction, CountEnvironment, CountObservation
from .local_server import LocalServer
from .test_viewer import COUNT, SERVED, app

ANN, BOB = "token-of-ann", "token-of-bob"
TOKENS = Settings(token=SecretStr(f"{ANN},{BOB}"))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def own(client: httpx.Client) -> dict[str, str]:
    """Headers that a browser adds to requests of a page of the server itself."""
    return {"Origin": str(client.base_url).rstrip("/")}


def login(client: httpx.Client, token: str, prefix: str = "") -> httpx.Response:
    return client.post(f"{prefix}/viewer/login", headers={**bearer(token), **own(client)})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalServer(COUNT, tmp_path_factory.mktemp("data"), TOKENS) as server:
        yield server.url


@pytest.fixture
def ann(served: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served) as client:
        assert login(client, ANN).status_code == 200
        yield client


def played(url: str, token: str) -> str:
    """Play an episode with a token; return its eid."""
    with ErrataClient(url, headers=bearer(token)).sync() as env:
        env.reset()
        env.step({"n": 1})
        eid = env.eid
    assert eid is not None
    return eid


def test_pages_are_open_and_nothing_else_is(served: str) -> None:
    for path in ("/viewer", "/viewer/", *(f"/viewer/{file}" for file in SERVED)):
        assert httpx.get(f"{served}{path}").status_code in (200, 307), path
    assert httpx.get(f"{served}/viewer/none.js").status_code == 404
    assert httpx.get(f"{served}/viewer/login").json() == {"tokens": True, "signed_in": False}
    for path in ("/episodes", "/episodes/aggregates", "/episodes/events", "/episodes/viewer", "/capabilities", "/docs"):
        assert httpx.get(f"{served}{path}").status_code == 401, path
    for path in ("/viewer/../episodes", "/viewer/%2e%2e/episodes", "//viewer/", "/x/viewer/app.js", "/viewer/login/x"):
        assert httpx.get(httpx.URL(f"{served}{path}")).status_code in (401, 404), path
    assert httpx.post(f"{served}/viewer/").status_code == 401


def test_the_cookie_holds_no_token_and_no_script_reads_it(served: str) -> None:
    with httpx.Client(base_url=served) as client:
        answer = login(client, ANN)
        assert answer.json() == {"tokens": True, "signed_in": True} and answer.headers["cache-control"] == "no-store"
        first, *attributes = answer.headers["set-cookie"].split("; ")
        assert attributes == ["Path=/", "HttpOnly", "SameSite=Strict", f"Max-Age={int(LOGIN_S)}"]
        name, _, value = first.partition("=")
        assert re.fullmatch("errata-[0-9a-f]{8}", name) and re.fullmatch("[A-Za-z0-9_-]{43}", value)
        again = login(client, ANN).headers["set-cookie"]
        assert again.startswith(f"{name}=") and value not in again
        secure = {**bearer(ANN), "Origin": served.replace("http:", "https:")}
        assert "; Secure" in client.post("/viewer/login", headers=secure).headers["set-cookie"]


def test_the_cookie_opens_what_the_viewer_reads(ann: httpx.Client, served: str) -> None:
    eid = played(served, ANN)
    assert ann.get("/viewer/login").json() == {"tokens": True, "signed_in": True}
    assert eid in [one["eid"] for one in ann.get("/episodes").json()["episodes"]]
    for path in ("", "/turns", "/states/1", "/states/1/action", "/states/1/agent_text", "/rewards", "/bundle"):
        assert ann.get(f"/episodes/{eid}{path}").status_code == 200, path
    for path in ("/capabilities", "/CountEnvironment/capabilities", f"/CountEnvironment/episodes/{eid}"):
        assert ann.get(path).status_code == 200, path
    with httpx.Client(base_url=served) as other:  # a cookie of the login below the environment's name counts, too
        login(other, ANN, "/CountEnvironment")
        assert other.get(f"/episodes/{eid}").status_code == 200


def test_the_cookie_opens_nothing_else(ann: httpx.Client, served: str) -> None:
    eid = played(served, ANN)
    reward = {"t": 1, "value": 1.0, "source": "me", "reward_id": "r"}
    for method, path, body in (
        ("POST", "/capabilities", None),
        ("GET", "/metrics", None),
        ("GET", "/docs", None),
        ("DELETE", f"/episodes/{eid}", None),
        ("POST", f"/episodes/{eid}/rewards", reward),
        ("POST", "/episodes/delete", {"eids": [eid]}),
        ("POST", "/mcp", {}),
        ("POST", "/reset", {}),
    ):
        assert ann.request(method, path, json=body, headers=own(ann)).status_code == 401, path
    assert ann.get("/episodes", headers=bearer("wrong")).status_code == 401  # a wrong token is not made good by it


def test_a_page_of_another_origin_cannot_use_the_cookie(ann: httpx.Client, served: str) -> None:
    eid = played(served, ANN)
    other = {"Origin": "http://127.0.0.1:1"}  # of the same site, so its requests carry the cookie
    fork = {"t": 1, "request_id": "one"}
    assert ann.get(f"/episodes/{eid}", headers=other).status_code == 403
    assert ann.post(f"/episodes/{eid}/fork", json=fork, headers=other).status_code == 403
    assert ann.post(f"/episodes/{eid}/fork", json=fork).status_code == 401  # without an origin it is no page's
    assert ann.post("/viewer/logout", headers=other).status_code == 403
    made = ann.post(f"/episodes/{eid}/fork", json=fork, headers=own(ann))
    assert made.status_code == 200 and made.json()["eid"] != eid


def test_an_allowed_origin_cannot_use_the_cookie_either(tmp_path: Path) -> None:
    allowed = TOKENS.model_copy(update={"allowed_origins": ("http://tool.example",)})
    with LocalServer(COUNT, tmp_path, allowed) as server, httpx.Client(base_url=server.url) as client:
        login(client, ANN)
        tool = {"Origin": "http://tool.example"}
        assert client.get("/episodes", headers=tool).status_code == 401
        assert client.get("/episodes", headers={**tool, **bearer(ANN)}).status_code == 200


def test_two_principals_never_see_each_others(served: str) -> None:
    eids = {token: played(served, token) for token in (ANN, BOB)}
    with httpx.Client(base_url=served) as client:
        for token, foreign in ((ANN, eids[BOB]), (BOB, eids[ANN])):
            login(client, token)
            listed = {one["eid"] for one in client.get("/episodes").json()["episodes"]}
            assert eids[token] in listed and foreign not in listed
            for path in ("", "/turns", "/states/1", "/states/1/action", "/states/1/agent_text", "/rewards", "/bundle"):
                assert client.get(f"/episodes/{foreign}{path}").status_code == 404, path
            fork = client.post(f"/episodes/{foreign}/fork", json={"t": 1, "request_id": "x"}, headers=own(client))
            assert fork.status_code == 404
            assert client.get("/episodes/events", params={"eid": foreign}).status_code == 404


def test_a_login_ends(ann: httpx.Client) -> None:
    kept = dict(ann.cookies)
    answer = ann.post("/viewer/logout", headers=own(ann))
    assert answer.json() == {"tokens": True, "signed_in": False} and "Max-Age=0" in answer.headers["set-cookie"]
    assert ann.get("/episodes").status_code == 401
    with httpx.Client(base_url=ann.base_url, cookies=kept) as thief:
        assert thief.get("/episodes").status_code == 401
        assert thief.get("/viewer/login").json()["signed_in"] is False
        assert thief.post("/viewer/logout", headers=own(ann)).status_code == 200  # once more ends nothing


def test_wrong_tokens_are_refused_and_then_all_of_their_address(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path, TOKENS) as server, httpx.Client(base_url=server.url) as client:
        for number in range(MAX_WRONG):
            answer = login(client, f"wrong-{number}")
            assert answer.status_code == 401 and "the token is not this server's" in answer.json()["message"]
            assert "set-cookie" not in answer.headers
        for token in ("wrong", ANN):
            answer = login(client, token)
            assert answer.status_code == 429 and "wait a minute" in answer.json()["message"]
        assert client.get("/episodes", headers=bearer(ANN)).status_code == 200  # clients are not bound by it


def stored(directory: Path, now: Callable[[], float], workers: int = 2) -> StoredLogins:
    empty(directory)
    return StoredLogins(directory, workers, now)


@pytest.mark.parametrize("of_a_fleet", [False, True])
def test_logins_are_bounded_in_number_and_time(of_a_fleet: bool, tmp_path: Path) -> None:
    now = [0.0]
    logins = stored(tmp_path / "logins", lambda: now[0]) if of_a_fleet else Logins(lambda: now[0])
    other = logins.begin("other")
    ids = [logins.begin("one") for _ in range(MAX_LOGINS)]
    assert all(logins.principal(each) == "one" for each in ids)
    more = logins.begin("one")
    assert [logins.principal(each) for each in (ids[0], ids[1], more, other)] == [None, "one", "one", "other"]
    now[0] = LOGIN_S
    assert [logins.principal(each) for each in (ids[1], more, other)] == [None] * 3
    assert len(logins._found) == 0 and len(list(tmp_path.rglob("logins/*/*"))) <= 2 * MAX_LOGINS


def test_workers_share_their_logins_and_a_server_that_starts_forgets_them(tmp_path: Path) -> None:
    one = stored(tmp_path / "logins", lambda: 1.0)
    other = StoredLogins(tmp_path / "logins", 2, lambda: 1.0)
    made, more = one.begin("ann"), other.begin("bob")
    assert [other.principal(made), one.principal(more)] == ["ann", "bob"]
    kept = [(str(place), place.read_text()) for place in tmp_path.rglob("logins/*/*")]
    assert len(kept) == 2 and not any(made[-43:] in text for one in kept for text in one), "only a hash is kept"
    other.end(made)
    assert one.principal(made) is None
    empty(tmp_path / "logins")
    assert one.principal(more) is None and one.principal(one.begin("bob")) == "bob"


@pytest.mark.parametrize(
    "sent", ["", "x", "../" * 20, "/etc/passwd", "\0", f"{'0' * 32}.{'0' * 16}.{'../' * 14}x", "é" * 76, "a" * 100_000]
)
def test_what_is_no_id_opens_and_ends_nothing(sent: str, tmp_path: Path) -> None:
    logins = stored(tmp_path / "logins", lambda: 1.0)
    kept = logins.begin("ann")
    assert logins.principal(sent) is None
    logins.end(sent)
    assert logins.principal(kept) == "ann"


def test_a_worker_refuses_an_address_after_its_part_of_the_wrong_tokens(tmp_path: Path) -> None:
    logins = stored(tmp_path / "logins", lambda: 1.0, workers=4)
    for _ in range(MAX_WRONG // 4):
        assert not logins.refuses("one")
        logins.note_wrong("one")
    assert logins.refuses("one")


def test_a_login_that_cannot_be_stored_is_an_error(tmp_path: Path) -> None:
    logins = stored(tmp_path / "logins", lambda: 1.0)
    (tmp_path / "logins").rmdir()
    (tmp_path / "logins").write_text("")
    with pytest.raises(JournalUnavailable, match="cannot store a login"):
        logins.begin("ann")
    with pytest.raises(JournalUnavailable, match="for logins"):
        empty(tmp_path / "logins")


def test_wrong_tokens_are_forgotten_after_a_while_and_their_addresses_are_bounded() -> None:
    now = [1000.0]
    logins = Logins(lambda: now[0])
    for _ in range(MAX_WRONG):
        assert not logins.refuses("one")
        logins.note_wrong("one")
    assert logins.refuses("one") and not logins.refuses("other")
    now[0] += WRONG_S
    assert not logins.refuses("one")
    for number in range(3 * MAX_PEERS):
        logins.note_wrong(str(number))
    assert len(logins._wrong) == MAX_PEERS


def test_without_tokens_there_is_no_login() -> None:
    with TestClient(app()) as client:
        everyone = {"tokens": False, "signed_in": True}
        answers = [client.get("/viewer/login"), client.post("/viewer/login"), client.post("/viewer/logout")]
        assert [answer.json() for answer in answers] == [everyone] * 3
        assert not any("set-cookie" in answer.headers for answer in answers)


def test_production_mode_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MODE", "production")
    with LocalServer(COUNT, tmp_path, TOKENS) as server, httpx.Client(base_url=server.url) as client:
        assert [client.get(path).status_code for path in ("/viewer/", "/viewer/app.js", "/viewer/login")] == [401] * 3
        assert login(client, ANN).status_code == 404
        assert client.get("/viewer/", headers=bearer(ANN)).status_code == 404


def test_it_is_there_for_several_environments_and_below_their_names(tmp_path: Path) -> None:
    targets = [COUNT, "tests.server.repeatable:DiceEnvironment"]
    with LocalServer(targets, tmp_path, TOKENS) as server, ExitStack() as stack:
        eid = played(f"{server.url}/CountEnvironment", ANN)
        for prefix in ("", "/CountEnvironment", "/DiceEnvironment"):
            client = stack.enter_context(httpx.Client(base_url=server.url))
            assert client.get(f"{prefix}/viewer/app.js").status_code == 200
            assert client.get(f"{prefix}/episodes").status_code == 401
            assert login(client, ANN, prefix).status_code == 200
            assert client.get(f"/episodes/{eid}").status_code == 200
            assert client.get(f"/CountEnvironment/episodes/{eid}").status_code == 200
            client.post(f"{prefix}/viewer/logout", headers=own(client))
            assert client.get(f"/episodes/{eid}").status_code == 401


def test_an_adopted_applications_own_pages_stay_closed() -> None:
    host: FastAPI = upstream_create_app(CountEnvironment, CountAction, CountObservation, env_name="count")
    private: dict[str, Any] = {"secret": True}
    own_paths = ("/admin/viewer/index.html", "/viewer/report", "/episodes-of-mine", "/admin/episodes")
    for path in own_paths:
        host.add_api_route(path, lambda: private)
    with TestClient(adopt(host, settings=TOKENS)) as client:
        assert client.get("/viewer/").status_code == 200
        for cookie in (False, True):
            if cookie:
                assert login(client, ANN).status_code == 200 and client.get("/episodes").status_code == 200
            for path in own_paths:
                answer = client.get(path)
                assert answer.status_code in (401, 404) and "secret" not in answer.text, path
