"""The viewer's files: served with every route below ``/episodes`` and nowhere else, and the command that shows them."""

from __future__ import annotations

import gzip
import http.client
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server import create_app as upstream_create_app
from typer.testing import CliRunner

from errata_protocol.errors import InvalidRequest
from errata_server import adopt
from errata_server.app import create_fastapi_app
from errata_server.cli import commands
from errata_server.cli.source import runtime_for_reading
from errata_server.process import ServerProcess
from errata_server.runtime.changes import Changes
from errata_server.serve.bundle_server import Archive, archive_app
from errata_server.serve.journal_server import journal_app
from errata_server.settings import Settings
from tests.hangs import HANGS_S

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation
from .local_server import LocalServer
from .test_bundle import made

COUNT = "tests.server.environments:CountEnvironment"
STATIC = Path(str(files("errata_server.viewer") / "static"))
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SERVED = sorted(str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.suffix in TYPES)
OTHERS = sorted(
    str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file() and path.suffix not in TYPES
)


def app(directory: Path | None = None, **more: object) -> FastAPI:
    settings = Settings(data_dir=directory)
    return create_fastapi_app(  # type: ignore[arg-type]
        CountEnvironment, CountAction, CountObservation, env_name="count", settings=settings, **more
    )


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(app()) as client:
        yield client


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalServer(COUNT, tmp_path_factory.mktemp("local")) as server:
        yield server.url


@pytest.mark.parametrize("path", SERVED)
def test_every_file_is_served_by_its_type(client: TestClient, path: str) -> None:
    content = (STATIC / path).read_bytes()
    answer = client.get(f"/viewer/{path}", headers={"Accept-Encoding": "identity"})
    assert (answer.status_code, answer.content) == (200, content)
    assert answer.headers["content-type"] == TYPES[Path(path).suffix]
    assert "content-encoding" not in answer.headers and answer.headers["vary"] == "Accept-Encoding"
    again = client.get(f"/viewer/{path}", headers={"If-None-Match": f'"another", W/{answer.headers["etag"]}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", answer.headers["etag"])
    assert client.get(f"/viewer/{path}", headers={"If-None-Match": '"another"'}).status_code == 200
    with client.stream("GET", f"/viewer/{path}", headers={"Accept-Encoding": "gzip"}) as zipped:
        assert zipped.headers["content-encoding"] == "gzip"
        assert gzip.decompress(b"".join(zipped.iter_raw())) == content
    head = client.head(f"/viewer/{path}", headers={"Accept-Encoding": "identity"})
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(content)))


def test_each_answer_limits_what_a_page_may_do(client: TestClient) -> None:
    for path, headers in (
        ("", {}),
        ("app.js", {}),
        ("none", {}),
        ("", {"If-None-Match": client.get("/viewer/").headers["etag"]}),
    ):
        found = client.get(f"/viewer/{path}", headers=headers).headers
        policy = dict(part.strip().split(" ", 1) for part in found["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            **dict.fromkeys(("script-src", "style-src", "img-src", "connect-src", "form-action"), "'self'"),
            **dict.fromkeys(("base-uri", "frame-ancestors"), "'none'"),
        }
        assert found["x-content-type-options"] == "nosniff" and found["referrer-policy"] == "no-referrer"
        assert found["cache-control"] == "no-cache"
        assert found["cross-origin-opener-policy"] == found["cross-origin-resource-policy"] == "same-origin"


def test_the_page_is_that_of_the_folder_and_the_folder_without_a_slash_leads_there(client: TestClient) -> None:
    assert client.get("/viewer/").content == (STATIC / "index.html").read_bytes()
    led = client.get("/viewer?text=a%26b", follow_redirects=False)
    assert (led.status_code, led.headers["location"]) == (307, "/viewer/?text=a%26b")


def test_the_page_loads_all_modules_at_once() -> None:
    page = (STATIC / "index.html").read_text()
    loaded = {*re.findall('modulepreload" href="(.*?)"', page), *re.findall('script type="module" src="(.*?)"', page)}
    assert loaded == {path for path in SERVED if path.endswith(".js")}


@pytest.mark.parametrize(
    "path",
    [
        *OTHERS,
        "none.js",
        "vendor",
        "vendor/",
        "../pages.py",
        "..%2fpages.py",
        "%2e%2e/pages.py",
        "vendor/..%2findex.html",
        "vendor%2f..%2f..%2fpages.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "app.js%00",
        "app.js/",
        "APP.JS",
        "%ff",
    ],
)
def test_nothing_else_is_a_file_of_it(local: str, path: str) -> None:
    connection = http.client.HTTPConnection(local.removeprefix("http://"))
    connection.request("GET", f"/viewer/{path}")  # as it is: httpx would resolve the dots
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 404
    assert b"import" not in content and b"root:" not in content


def test_it_only_answers_reads(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/viewer/").status_code == 405


def test_it_is_there_for_one_and_several_environments_and_below_their_names(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path / "one") as one:
        assert httpx.get(f"{one.url}/viewer/").status_code == 200
        assert httpx.get(f"{one.url}/CountEnvironment/viewer/app.js").status_code == 200
        led = httpx.get(f"{one.url}/CountEnvironment/viewer")
        assert led.headers["location"].endswith("/CountEnvironment/viewer/")
    with LocalServer([COUNT, "tests.server.repeatable:DiceEnvironment"], tmp_path / "two") as two:
        assert httpx.get(f"{two.url}/viewer/").status_code == 200
        assert httpx.get(f"{two.url}/DiceEnvironment/viewer/").status_code == 200


def test_it_is_there_on_an_adopted_application() -> None:
    adopted = adopt(upstream_create_app(CountEnvironment, CountAction, CountObservation, env_name="count"))
    with TestClient(adopted) as client:
        assert client.get("/viewer/").status_code == 200


def test_production_mode_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MODE", "production")
    with LocalServer(COUNT, tmp_path) as server:
        assert httpx.get(f"{server.url}/viewer/").status_code == 404
        assert httpx.get(f"{server.url}/viewer/app.js").status_code == 404


def test_a_server_of_bundles_has_it(tmp_path: Path) -> None:
    eid, _ = made(tmp_path)
    file = tmp_path / "one.jsonl"
    export = ["episodes", "export", eid, "-o", str(file), "--data-dir", str(tmp_path)]
    answer = CliRunner().invoke(commands.cli, export)
    assert answer.exit_code == 0, answer.output
    with TestClient(archive_app(Archive([file]), Settings())) as client:
        assert client.get("/viewer/").status_code == 200


# -- errata view -------------------------------------------------------------------------------------------------------


@contextmanager
def viewing(*arguments: str) -> Iterator[str]:
    """Run ``errata view``; yields the address that it prints."""
    command = [sys.executable, "-m", "errata_server.cli", "view", "--no-browser", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        address = process.stdout.readline().strip()
        assert address.endswith("/viewer/"), process.stderr.read()
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANGS_S) == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def listed(address: str) -> list[str]:
    episodes = httpx.get(f"{address.removesuffix('viewer/')}episodes").raise_for_status().json()["episodes"]
    return [one["eid"] for one in episodes]


def test_a_directory_is_viewed_while_a_server_runs_on_it_and_after_it_was_killed(tmp_path: Path) -> None:
    play = (
        "import sys; from errata_client import ErrataClient\n"
        "with ErrataClient(sys.argv[1]).sync() as env: env.reset(); env.step({'n': 3})\n"
    )
    with ServerProcess(COUNT, tmp_path) as server:
        subprocess.run([sys.executable, "-c", play, server.url], check=True, timeout=HANGS_S)
        (eid,) = listed(f"{server.url}/viewer/")
        with viewing(str(tmp_path)) as address:
            assert address.startswith("http://127.0.0.1:") and httpx.get(address).status_code == 200
            assert listed(address) == [eid]
            there = httpx.get(f"{address.removesuffix('viewer/')}episodes/{eid}/states/1")
            assert there.content == httpx.get(f"{server.url}/episodes/{eid}/states/1").content
            assert httpx.post(f"{address.removesuffix('viewer/')}episodes/{eid}/fork", json={}).status_code in (
                404,
                405,
            )
            subprocess.run([sys.executable, "-c", play, server.url], check=True, timeout=HANGS_S)
            assert len(listed(address)) == 2  # also what came after the start
        server.kill()
    with viewing(str(tmp_path)) as address:
        assert eid in listed(address) and len(listed(address)) == 2


def test_two_directories_are_one_list(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        with TestClient(app(tmp_path / name)) as client, connect(client) as socket:
            for _ in range(2):
                socket.ask("reset", {})
            socket.ask("step", {"n": 1})
    runtimes = {tmp_path / name: runtime_for_reading(tmp_path / name) for name in ("one", "other")}
    with TestClient(journal_app(runtimes, Settings(), changes=Changes())) as client:
        first = client.get("/episodes?limit=3").json()
        rest = client.get("/episodes", params={"limit": 3, "cursor": first["next"]}).json()
        found = first["episodes"] + rest["episodes"]
        assert len({one["eid"] for one in found}) == 4 and rest["next"] is None
        assert [one["created"] for one in found] == sorted((one["created"] for one in found), reverse=True)
        assert sum(one["episodes"] for one in client.get("/episodes/aggregates").json()["buckets"]) == 4
        for one in found:
            assert len(client.get(f"/episodes/{one['eid']}/turns").json()["turns"]) == one["deliveries"]
            assert client.get(f"/episodes/{one['eid']}/states/0").headers["etag"].startswith('"sha256:')
            assert client.get(f"/episodes/{one['eid']}/rewards").status_code == 200
        assert list(client.get("/capabilities").json()["environments"]) == ["count"]
        unknown = client.get("/episodes/ep_AAAAAAAAAAAAAAAAAAAAAA")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "UNKNOWN_EPISODE")
        assert client.get("/viewer/").status_code == 200


def test_a_server_without_a_viewer_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalServer(COUNT, tmp_path / "a") as server:
        shown = CliRunner().invoke(commands.cli, ["view", "--no-browser", server.url])
        assert (shown.exit_code, shown.stdout.strip()) == (0, f"{server.url}/viewer/")
    monkeypatch.setenv("OPENENV_MODE", "production")
    with LocalServer(COUNT, tmp_path / "b") as server:
        refused = CliRunner().invoke(commands.cli, ["view", "--no-browser", server.url])
        assert isinstance(refused.exception, InvalidRequest) and "has no viewer" in str(refused.exception)


def test_the_browser_is_opened_unless_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    note: Callable[[str], None] = opened.append
    monkeypatch.setattr("webbrowser.open", note)
    with LocalServer(COUNT, tmp_path) as server:
        CliRunner().invoke(commands.cli, ["view", "--no-browser", server.url])
        assert opened == []
        CliRunner().invoke(commands.cli, ["view", server.url])
        assert opened == [f"{server.url}/viewer/"]
