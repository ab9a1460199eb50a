"""The package index is read as pip is configured to, and lent to a sandbox over a socket."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from errata_protocol.errors import InvalidRequest
from swe_bench_lite_env.server.prepare import index as index_module
from swe_bench_lite_env.server.prepare.index import (
    SOCKET,
    IndexFailed,
    Link,
    PackageIndex,
    Sources,
    configured,
    lent,
)

from ...hostile_names import PIECES
from ...machine_speed import SLOWDOWN
from ...server.hostile_servers import REFUSED, STRANGE, WAITS, hostile_server
from .preparing import simple_index, wheel


def archive(directory: Path, name: str, content: str = "x") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "PKG-INFO").write_text(content, "utf-8")
    path = directory / name
    with tarfile.open(path, "w:gz") as opened:
        opened.add(directory / "PKG-INFO", f"{name.removesuffix('.tar.gz')}/PKG-INFO")
    return path


@pytest.fixture
def index(tmp_path: Path) -> PackageIndex:
    built = tmp_path / "built"
    paths = [archive(built, "Ledger-1.0.tar.gz"), wheel(built, "Ledger", "1.0", {"ledger.py": "x = 1\n"})]
    url = simple_index(
        tmp_path / "index", {"ledger": paths, "zope-interface": [archive(built, "zope.interface-5.0.tar.gz")]}
    )
    return PackageIndex(tmp_path / "cache", Sources((url,)))


class Pages:
    """An index over HTTP that answers what a test says."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, str, bytes]]] = {}
        self.asked: list[tuple[str, str | None]] = []
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pages.asked.append((self.path, self.headers.get("Authorization")))
                answers = pages.answers.get(self.path, [(404, "text/plain", b"")])
                status, kind, body = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.place = f"127.0.0.1:{self.server.server_port}"


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.server.shutdown()
    made.server.server_close()
    made.thread.join()


def test_a_source_archive_is_found_by_name_and_version(index: PackageIndex) -> None:
    path = index.source_archive("ledger", "1.0")
    assert path.name == "Ledger-1.0.tar.gz"
    assert index.source_archive("Zope.Interface", "5.0").name == "zope.interface-5.0.tar.gz"
    assert index.source_archive("ledger", "1") == path, "1 and 1.0 are one version"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert index.source_archive("ledger", "1.0", digest) == path
    with pytest.raises(IndexFailed, match=r"no source archive of ledger 2\.0: it has 1\.0"):
        index.source_archive("ledger", "2.0")
    with pytest.raises(IndexFailed, match="none of that project"):
        index.source_archive("unknown", "2.0")


def test_another_digest_is_refused(index: PackageIndex, tmp_path: Path) -> None:
    with pytest.raises(IndexFailed, match="the recipe has 0000"):
        index.source_archive("ledger", "1.0", "0" * 64)
    (tmp_path / "index/ledger/Ledger-1.0.tar.gz").write_bytes(b"another file under that name")
    with pytest.raises(IndexFailed, match="was expected"):
        index.source_archive("ledger", "1.0")
    assert not list(index.cache.glob(".new-*"))


def test_a_file_is_fetched_once(index: PackageIndex, tmp_path: Path) -> None:
    first = index.source_archive("ledger", "1.0")
    digest = first.parent.name
    (tmp_path / "index/ledger/Ledger-1.0.tar.gz").unlink()
    assert index.source_archive("ledger", "1.0") == first
    assert PackageIndex(index.cache, Sources(())).source_archive("ledger", "1.0", digest) == first, "no index is needed"


def test_pages_come_as_html_and_as_json_and_requests_are_repeated(pages: Pages, tmp_path: Path) -> None:
    body = b'{"files": [{"filename": "a-1.0.tar.gz", "url": "../f/a-1.0.tar.gz", "hashes": {}, "yanked": "bad"}]}'
    kind = "application/vnd.pypi.simple.v1+json"
    pages.answers["/simple/a/"] = [(503, "text/plain", b""), (200, kind, body)]
    pages.answers["/simple/f/a-1.0.tar.gz"] = [(200, "application/gzip", b"archive")]
    index = PackageIndex(tmp_path / "cache", Sources((f"http://user:pa%40ss@{pages.place}/simple/",)))
    (link,) = index.links("A")
    assert (link.filename, link.yanked) == ("a-1.0.tar.gz", "bad")
    assert index.source_archive("a", "1.0").read_bytes() == b"archive"
    assert {authorization for _, authorization in pages.asked[:2]} == {"Basic dXNlcjpwYUBzcw=="}
    pages.answers["/simple/b/"] = [(500, "text/plain", b"")]
    with pytest.raises(IndexFailed, match="answers 500") as caught:
        index.links("b")
    assert "pa@ss" not in str(caught.value) and "pa%40ss" not in str(caught.value)
    pages.answers["/simple/c/"] = [(200, kind, b'{"meta": {}}')]
    with pytest.raises(IndexFailed, match="PEP 691"):
        index.links("c")


def test_an_index_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/simple"
        with pytest.raises(IndexFailed, match=r"cannot be reached.*PIP_INDEX_URL"):
            PackageIndex(tmp_path, Sources((url,))).links("a")


def test_pips_configuration_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://one/simple\nextra-index-url =\n  https://two/\n  https://three/\n", "utf-8"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    assert configured().indexes[-3:] == ("https://one/simple", "https://two/", "https://three/")
    monkeypatch.setenv("PIP_INDEX_URL", "https://four/simple")
    assert "https://four/simple" in configured().indexes
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path}/wheels https://five/page.html")
    assert (configured().indexes, configured().find_links) == ((), (f"{tmp_path}/wheels", "https://five/page.html"))
    file.write_text("no section", "utf-8")
    with pytest.raises(InvalidRequest, match=r"pip\.conf"):
        configured()


def test_a_directory_of_wheels_is_an_index(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    wheel(tmp_path / "wheels", "Ledger", "1.0", {"ledger.py": ""})
    index = PackageIndex(tmp_path / "cache", Sources((), (str(tmp_path / "wheels"),)))
    assert [link.filename for link in index.links("ledger")] == ["Ledger-1.0-py3-none-any.whl"]
    assert index.links("other") == ()


def ask(directory: Path, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(directory / SOCKET))
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_a_sandbox_gets_pages_and_the_files_they_link_to_and_nothing_else(index: PackageIndex, tmp_path: Path) -> None:
    with lent(index, tmp_path / "socket"):
        status, page = ask(tmp_path / "socket", "/simple/ledger/")
        assert status == 200 and b"Ledger-1.0.tar.gz</a>" in page and b"#sha256=" in page
        target = page.decode().split('href="')[1].split("#")[0]
        status, content = ask(tmp_path / "socket", target)
        assert status == 200 and hashlib.sha256(content).hexdigest() in page.decode()
        assert ask(tmp_path / "socket", "/simple/unknown/")[1].count(b"<a ") == 0
        for path in ("/", "/simple", "/files/abc/x", "/simple/ledger/../../etc/passwd", "//etc/passwd", "/etc/passwd"):
            assert ask(tmp_path / "socket", path)[0] == 404, path
        assert ask(tmp_path / "socket", "/simple/ledger/", "POST")[0] == 501
    assert not (tmp_path / "socket" / SOCKET).exists()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_TIMEOUT_S", 0.2 * SLOWDOWN)
    monkeypatch.setattr(index_module, "_TOTAL_S", 0.2)
    monkeypatch.setattr(index_module, "_TRIES", 1)
    monkeypatch.setattr(index_module, "_MAX_PAGE_BYTES", 1024**2)
    monkeypatch.setattr(index_module, "_MAX_FILE_BYTES", 1024**2)


@pytest.mark.usefixtures("quick")
def test_an_index_that_means_harm_gives_links_of_packages_or_fails_soon(tmp_path: Path) -> None:
    with hostile_server() as server:
        for answer in {**REFUSED, **STRANGE}:
            index = PackageIndex(tmp_path / "cache", Sources((server + answer,)))
            try:
                assert index.links("ledger") == (), answer
            except IndexFailed as error:
                assert len(error.message) < 10_000
            else:
                assert answer not in WAITS
            try:
                index.fetch(Link("ledger-1.0.tar.gz", server + answer))
            except IndexFailed as error:
                assert len(error.message) < 10_000
            else:
                assert answer not in WAITS
    assert not list((tmp_path / "cache").glob(".new-*"))


@pytest.mark.usefixtures("quick")
def test_what_is_too_large_is_not_kept(pages: Pages, tmp_path: Path) -> None:
    pages.answers["/simple/large/"] = pages.answers["/large.whl"] = [(200, "text/html", bytes(1024**2 + 1))]
    pages.answers["/whole.whl"] = [(200, "text/html", bytes(1024**2))]
    index = PackageIndex(tmp_path / "cache", Sources((f"http://{pages.place}/simple",)))
    with pytest.raises(IndexFailed, match="more than 1,048,576 bytes"):
        index.links("large")
    with pytest.raises(IndexFailed, match="more than 1,048,576 bytes"):
        index.fetch(Link("large.whl", f"http://{pages.place}/large.whl"))
    assert list((tmp_path / "cache").iterdir()) == []
    assert index.fetch(Link("whole.whl", f"http://{pages.place}/whole.whl")).stat().st_size == 1024**2


def test_the_name_of_no_project_is_asked_of_no_index(pages: Pages, tmp_path: Path) -> None:
    index = PackageIndex(tmp_path / "cache", Sources((f"http://{pages.place}/simple",)))
    with lent(index, tmp_path / "socket"):
        for name in ("a%2Fb", "..%2f..%2fadmin", "a%3Fb", "a%23", "a%00", "a%0d%0aX:%20y", "%c3%a9", "a" * 300):
            assert ask(tmp_path / "socket", f"/simple/{name}/")[1].count(b"<a ") == 0, name
    for piece in PIECES:
        assert index.links(f"{piece}a") == index.links(piece) == ()
    assert pages.asked == []


def test_a_page_of_a_server_links_to_no_file_of_this_machine(pages: Pages, tmp_path: Path) -> None:
    secret = archive(tmp_path, "ledger-1.0.tar.gz").as_uri()
    files = [{"filename": "ledger-1.0.tar.gz", "url": secret, "hashes": {}}]
    pages.answers["/simple/ledger/"] = [
        (200, "text/html", f'<a href="{secret}">ledger</a><a href="data:,x/ledger-1.0.tar.gz">y</a>'.encode()),
        (200, "text/html", f'<base href="{secret}"><a href="ledger-1.0.tar.gz">ledger</a>'.encode()),
        (200, "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()),
    ]
    for _ in range(3):
        assert PackageIndex(tmp_path / "cache", Sources((f"http://{pages.place}/simple",))).links("ledger") == ()
    assert len(pages.asked) == 3
