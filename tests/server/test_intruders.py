"""Who has no token, another's, or is a web page: what it is told, what it can reach, what logs say (PROTOCOL F2)."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from websockets.sync.client import connect as connect_websocket

from errata_server.app import create_app, create_fastapi_app
from errata_server.log import NoIds, hide_ids, redact
from errata_server.process import ServerProcess
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings
from tests.hangs import HANGS_S

from .asgi_peer import Peer
from .environments import CountAction, CountEnvironment, CountObservation

FIRST, SECOND = ({"Authorization": f"Bearer {token}"} for token in ("first-s3cret", "second-s3cret"))
CREATE = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}


def make_app(**settings: Any) -> FastAPI:
    return create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=8,
        settings=Settings(**settings),
    )  # fmt: skip


def app_for_two() -> FastAPI:
    return make_app(token=SecretStr("first-s3cret,second-s3cret"))


def ask(app: FastAPI, path: str = "/capabilities", client: tuple[str, int] = ("127.0.0.1", 5), **headers: str) -> int:
    """Return the status that a request gets; ``_`` stands for ``-`` in names of headers."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    with TestClient(app, client=client, base_url="http://localhost:8000") as http:
        return http.get(path, headers=given).status_code


# -- pages of other origins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", None, 200),
        ("LocalHost:8000", "http://localhost:8000", 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("[::1]", None, 200),
        ("localhost:8000", "http://evil.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "", 403),
        ("localhost:8000", "http://localhost:3000", 403),
        ("localhost:8000", "http://localhost:8000.evil.example", 403),
        ("localhost:8000", "http://evil.example/localhost:8000", 403),
        ("localhost:8000", "localhost:8000", 403),
        ("", "null", 403),
        ("evil.example:8000", None, 403),  # a name rebound to 127.0.0.1: a page's own GET has no Origin
        ("evil.example:8000", "http://evil.example:8000", 403),
        ("user@localhost:8000", None, 403),
        ("evil.example@localhost", None, 403),
        ("localhost:8000@evil.example", None, 403),
        ("localhost#evil.example", None, 403),
        ("localhost\\evil.example", None, 403),
        ("localhost.evil.example", None, 403),
        ("[::1].evil.example", None, 403),
        ("localhost:99999999", None, 403),
    ],
)
@pytest.mark.parametrize("hosts", [(), ("localhost", "127.0.0.1", "::1")])
async def test_only_a_page_of_this_server_itself_gets_in(
    hosts: tuple[str, ...], host: str, origin: str | None, status: int
) -> None:
    app = make_app(allowed_hosts=hosts)
    headers = {"host": host, **({} if origin is None else {"origin": origin})}
    with TestClient(app, base_url="http://localhost:8000", client=("127.0.0.1", 5)) as http:
        assert http.get("/capabilities", headers=headers).status_code == status
    opens = status == 200 or (origin is None and not hosts)  # a page's handshake has an origin
    for path in ("/ws", "/count/mcp"):
        async with Peer(app, path, headers=headers) as peer:
            assert peer.answer["type"] == ("websocket.accept" if opens else "websocket.http.response.start")


def test_an_image_or_script_of_another_page_runs_nothing_here() -> None:
    app = make_app()
    made = CountEnvironment.made
    for site in ("cross-site", "same-site"):
        assert ask(app, "/state", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors") == 403
    assert CountEnvironment.made == made
    assert ask(app, "/capabilities", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate") == 200  # a link
    assert ask(app, "/capabilities", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors") == 200
    assert ask(app, "/capabilities", Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate") == 200


def test_an_allowed_page_gets_in_from_its_own_origin_only() -> None:
    app = make_app(allowed_origins=("https://lab.example",))
    assert ask(app, Origin="https://lab.example") == 200
    assert ask(app, Origin="https://lab.example.evil.example") == 403
    assert ask(app, Origin="http://lab.example") == 403


@pytest.mark.parametrize("headers", [{"X_Forwarded_For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}])
def test_an_address_that_a_proxy_or_anybody_wrote_is_not_this_machine(headers: dict[str, str]) -> None:
    assert ask(make_app(), **headers) == 403
    assert ask(make_app(insecure=True), **headers) == 200
    assert ask(make_app(token=SecretStr("t")), Authorization="Bearer t", **headers) == 200


def test_other_machines_need_a_token() -> None:
    for peer in ("10.0.0.7", "fe80::1", "::ffff:10.0.0.7"):
        assert ask(make_app(), client=(peer, 5)) == 403
    for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert ask(make_app(), client=(peer, 5)) == 200


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Basic first-s3cret", "Bearer first-s3cre", "Bearer first-s3cret,second-s3cret",
              "Bearer Bearer first-s3cret", "first-s3cret", "Bearer \xff"],
)  # fmt: skip
@pytest.mark.parametrize("door", ["", "/count"])
def test_without_its_token_every_door_is_closed(given: str, door: str) -> None:
    with TestClient(app_for_two()) as client:
        headers = [(b"authorization", given.encode("latin-1"))]
        for method, path in (
            ("GET", "/episodes"), ("GET", "/metrics"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/state"),
            ("GET", "/capabilities"), ("GET", "/metadata"), ("GET", "/schema"), ("POST", "/reset"), ("POST", "/mcp"),
            ("GET", "/health/"), ("GET", "//health"), ("GET", "/ready/x"), ("GET", "/nothing"),
        ):  # fmt: skip
            answer = client.request(method, door + path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED"), path


async def test_a_token_is_compared_as_bytes() -> None:
    app = make_app(token=SecretStr("schlüssel"))
    for encoding, answer in (("utf-8", "websocket.accept"), ("latin-1", "websocket.http.response.start")):
        token = "schlüssel".encode(encoding).decode("latin-1")  # the bytes on the wire, as Peer sends them
        async with Peer(app, headers={"authorization": f"Bearer {token}"}) as peer:
            assert peer.answer["type"] == answer


@pytest.mark.parametrize("order", [("first-s3cret", "x"), ("x", "first-s3cret"), ("first-s3cret", "first-s3cret")])
def test_a_request_with_two_authorization_headers_is_refused(order: tuple[str, str]) -> None:
    twice = [("Authorization", f"Bearer {order[0]}"), ("authorization", f"Bearer {order[1]}")]
    for path in ("/episodes", "/health", "/ready"):
        with TestClient(app_for_two(), base_url="http://localhost:8000") as http:
            answer = http.get(path, headers=twice)
        assert answer.status_code == 401 and "more than once" in answer.json()["message"]
    with (
        TestClient(app_for_two(), base_url="http://localhost:8000") as http,
        pytest.raises((WebSocketDisconnect, WebSocketDenialResponse)),
        http.websocket_connect("/ws", headers=httpx.Headers(twice)),
    ):
        pass


@pytest.mark.parametrize("name", ["Host", "Origin", "Sec-Fetch-Site", "Sec-Fetch-Mode"])
def test_a_request_with_two_headers_that_say_where_it_is_from_is_refused(name: str) -> None:
    value = "localhost:8000" if name == "Host" else "same-origin" if name.startswith("Sec") else "http://localhost:8000"
    with TestClient(make_app(), client=("127.0.0.1", 5), base_url="http://localhost:8000") as http:
        answer = http.get("/episodes", headers=[(name, value), (name, value)])
    assert answer.status_code == 403 and answer.json()["code"] == "FORBIDDEN"


def test_the_pages_are_of_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    settings = Settings(token=SecretStr("first-s3cret,second-s3cret"))
    app = create_app(CountEnvironment, CountAction, CountObservation, "count", 4, settings=settings)
    with TestClient(app) as client:
        assert client.post("/web/reset", headers=FIRST).status_code == 200
        for path in ("/web/reset", "/count/web/reset", "/web/step"):
            assert client.post(path, json={}, headers=SECOND).json()["code"] == "FORBIDDEN"
        for path in ("/web/state", "/web/", "/count/web/state", "/web/config", "/web/metadata"):
            assert client.get(path, headers=SECOND).json()["code"] == "FORBIDDEN"
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws/ui", headers=SECOND):
            pass


def test_the_pages_serve_no_file_and_no_other_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENABLE_WEB_INTERFACE", "true")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    app = create_app(CountEnvironment, CountAction, CountObservation, "count", 4, settings=Settings(max_frame=10_000))
    with TestClient(app) as client:
        for path in (
            "file=/etc/passwd", "file=https://example.com/", "file=../../etc/passwd", "proxy=http://169.254.169.254/",
            "proxy=https://x.hf.space/", "vibe-code/",
        ):  # fmt: skip
            answer = client.get(f"/web/gradio_api/{path}")
            assert 400 <= answer.status_code < 500 and "root:" not in answer.text
        assert client.get("/web/static/..%2f..%2f..%2f..%2fetc%2fpasswd").status_code in (403, 404)
        assert client.post("/web/gradio_api/upload", files={"files": ("x", b"x" * 20_000)}).status_code == 413
        (stored,) = client.post("/web/gradio_api/upload", files={"files": ("../../x", b"x")}).json()
        assert Path(stored).resolve().is_relative_to(tmp_path.resolve())


def test_what_belongs_to_somebody_else_answers_like_what_is_not_there() -> None:
    with TestClient(app_for_two()) as client:
        sid = client.post("/mcp", json=CREATE, headers=FIRST).json()["result"]["session_id"]
        with client.websocket_connect(f"/ws?session_id={sid}", headers=FIRST) as ws:
            ws.send_text('{"type":"capabilities"}')
            ws.receive_text()
            ws.send_text('{"type":"reset"}')
            eid = json.loads(ws.receive_text())["eid"]
            seen = {}
            no_sid, no_eid = sid[:-4] + "0000", eid[:-4] + "0000"
            for name, (one_sid, one_eid) in {"foreign": (sid, eid), "unknown": (no_sid, no_eid)}.items():
                with client.websocket_connect("/ws", headers=SECOND) as other:
                    other.send_text(json.dumps({"type": "state", "data": {"t": 0, "eid": one_eid}}))
                    answers = [other.receive_text()]
                with client.websocket_connect(f"/ws?session_id={one_sid}", headers=SECOND) as other:
                    answers.append(other.receive_text())
                for rpc in (
                    {**CREATE, "method": "openenv/session/close", "params": {"session_id": one_sid}},
                    {**CREATE, "method": "tools/list", "params": {"session_id": one_sid}},
                    {**CREATE, "method": "tools/call", "params": {"session_id": one_sid, "name": "x"}},
                ):
                    answers.append(client.post("/mcp", json=rpc, headers=SECOND).text)
                    with client.websocket_connect("/ws", headers=SECOND) as other:
                        other.send_text(json.dumps({"type": "mcp", "data": rpc}))
                        answers.append(other.receive_text())
                for method, rest, body in (
                    ("GET", "", None), ("DELETE", "", None), ("GET", "/states/0", None), ("GET", "/states/9", None),
                    ("GET", "/turns", None), ("GET", "/states/0/action", None), ("GET", "/states/0/agent_text", None),
                    ("POST", "/fork", {"t": 0, "request_id": "r"}), ("POST", "/fork", {"t": 9, "request_id": "r"}),
                ):  # fmt: skip
                    answer = client.request(method, f"/episodes/{one_eid}{rest}", json=body, headers=SECOND)
                    answers += [f"{answer.status_code} {sorted(answer.headers.items())} {answer.text}"]
                seen[name] = [text.replace(one_sid, "SID").replace(one_eid, "EID") for text in answers]
            assert seen["foreign"] == seen["unknown"]
            assert eid not in client.get("/episodes", headers=SECOND).text
            ws.send_text('{"type":"step","data":{"n":1}}')
            assert json.loads(ws.receive_text())["t"] == 1


class CountingReads(Runtime):
    """Counts reads of the journal, which is what a foreign id could cost more or less than an unknown one."""

    reads = 0

    async def read(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.reads += 1
        return await super().read(function, *args, **kwargs)


async def test_a_foreign_session_costs_as_many_reads_as_an_unknown_one_and_is_not_woken(tmp_path: Path) -> None:
    runtime = CountingReads(Settings(token=SecretStr("first-s3cret,second-s3cret"), data_dir=tmp_path))
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=8, runtime=runtime)
    transport = httpx.ASGITransport(app, client=("testclient", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        sid = (await client.post("/mcp", json=CREATE, headers=FIRST)).json()["result"]["session_id"]
        sessions = app.state.errata.sessions
        costs = []
        for one in (sid, sid[:-4] + "0000"):
            before = runtime.reads
            close = {**CREATE, "method": "openenv/session/close", "params": {"session_id": one}}
            assert "error" in (await client.post("/mcp", json=close, headers=SECOND)).json()
            costs.append(runtime.reads - before)
        assert costs[0] == costs[1]
        await sessions.close_all()  # as a restart leaves it: a row
        close = {**CREATE, "method": "openenv/session/close", "params": {"session_id": sid}}
        assert "error" in (await client.post("/mcp", json=close, headers=SECOND)).json()
        assert sessions.table.get(sid) is None
    await runtime.close()


def test_probes_tell_no_path_and_no_name(tmp_path: Path) -> None:
    with TestClient(make_app(token=SecretStr("t"), data_dir=tmp_path)) as client:
        runtime = client.app.state.errata.runtime  # type: ignore[attr-defined]
        runtime.store._disk = _Full()
        answer = client.get("/ready")
        assert answer.status_code == 503 and "0 KiB free" in answer.json()["reasons"][0]
        assert str(tmp_path) not in answer.text and "count" not in client.get("/health").text


class _Full:
    def free(self) -> tuple[int, int]:
        return 0, 2**40


# -- logs -------------------------------------------------------------------------------------------------------------

SID = "3b241101-e2bb-4255-8caf-4136c566a962"
EID = "ep_QmFzZTY0LXVybC1zYWZlLWlk"


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        (f"GET /ws?session_id={SID} HTTP/1.1", "GET /ws?session_id=#b3b3cd2b2a1d HTTP/1.1"),
        (f"/episodes/{EID}/states/3", None),
        ("/episodes/my-own-id", None),
        ("/x?a=1&token=s3cret&b=", None),
        (f"no episode '{EID}' here", None),
        ("Authorization: Bearer s3cret", "Authorization: Bearer ..."),
        ("nothing to hide: /episodes?limit", "nothing to hide: /episodes?limit"),
    ],
)
def test_a_line_names_ids_by_their_hashes(line: str, clean: str | None) -> None:
    found = redact(line)
    assert not re.search(r"3b241101|QmFz|s3cret|my-own-id", found)
    assert redact(found) == found, "a line that passes two filters is hashed once"
    if clean is not None and "#" not in clean:
        assert found == clean
    assert ("#" in found) == (clean is None or "#" in clean)


def test_filters_survive_a_later_configuration_of_logging() -> None:
    hide_ids()
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, "loggers": {"uvicorn.access": {}}})
    hide_ids()
    assert [type(there) for there in logging.getLogger("uvicorn.access").filters] == [NoIds]


def use_a_server(url: str) -> list[str]:
    """Use as the first token every door that takes an id; return the ids and tokens that must not be in the log."""
    headers = {"Authorization": "Bearer first-s3cret"}
    http = httpx.Client(base_url=url, headers=headers)
    sid = http.post("/mcp", json=CREATE).json()["result"]["session_id"]
    answers: list[dict[str, Any]] = []
    socket = url.replace("http", "ws") + "/ws?session_id="
    with connect_websocket(socket + sid, additional_headers=headers) as ws:
        for frame in ('{"type":"capabilities"}', '{"type":"reset"}', '{"type":"step","data":{"do":"raise"}}'):
            ws.send(frame)
            answers.append(json.loads(ws.recv()))
    eid = answers[1]["eid"]
    http.get(f"/episodes/{eid}/states/0")
    fork = http.post(f"/episodes/{eid}/fork", json={"t": 0, "request_id": "r"}).json()
    with connect_websocket(socket + fork["session_id"], additional_headers=headers):
        pass
    http.get("/episodes/guessed-id-of-mine")
    http.get("/health", headers={"Authorization": "Bearer wrong-s3cret"}, params={"token": "s3cret-in-query"})
    http.get("/nowhere", params={"session_id": "guessed-sid"})
    http.delete(f"/episodes/{eid}")
    return [sid, eid, fork["session_id"], fork["eid"], "s3cret", "guessed"]


def test_no_id_and_no_token_stands_in_the_log_of_errata_serve_at_its_loudest(tmp_path: Path) -> None:
    target = f"{CountEnvironment.__module__}:CountEnvironment"
    loud = ("--log-level", "debug", "--no-fsync")
    with ServerProcess(target, tmp_path, *loud, env={"ERRATA_TOKEN": "first-s3cret"}) as server:
        secrets = use_a_server(server.url)
    said = "".join(server.log)
    assert [secret for secret in secrets if secret in said] == []


@pytest.fixture
def plain_uvicorn(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URL and log of an application of ours under plain uvicorn, access log on, at its loudest."""
    written = tmp_path / "log"
    with written.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", f"{__name__}:app_of_uvicorn", "--factory", "--port", "0",
             "--log-level", "trace", "--access-log"],
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "ERRATA_TOKEN": "first-s3cret"},
        )  # fmt: skip
    try:
        while not (found := re.search(r"running on (http://\S+)", written.read_text())):
            assert process.poll() is None, written.read_text()
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass
        yield found[1], written
    finally:
        process.terminate()
        process.wait(HANGS_S)


def app_of_uvicorn() -> FastAPI:
    return create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=8)


def test_no_id_and_no_token_stands_in_the_log_of_plain_uvicorn(plain_uvicorn: tuple[str, Path]) -> None:
    url, written = plain_uvicorn
    secrets = use_a_server(url)
    said = written.read_text()
    assert "GET /episodes/#" in said, "the access log is there"
    assert [secret for secret in secrets if secret in said] == []
