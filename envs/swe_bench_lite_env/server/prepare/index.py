"""The package index of this machine: read as pip is configured to, and proxied to a sandbox that has no network.

Code of a repository runs while it is installed, so it runs in a sandbox. All that reaches it from outside is what this
module answers over a unix socket: the pages of projects, and files whose digest is checked where the index names one.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import html
import logging
import os
import re
import socketserver
import ssl
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit
from urllib.response import addinfourl

from errata_protocol.bounded_json import decode
from errata_protocol.errors import EnvironmentFailed, InvalidRequest
from errata_protocol.names import DIGEST_ID, PACKAGE_FILE, PROJECT, shown

from .timed_answers import Patience, opener

log = logging.getLogger("errata.swe")

DEFAULT_INDEX = "https://pypi.org/simple"
SOCKET = "index.sock"

_TRIES = 4
_TIMEOUT_S = 60.0
_TOTAL_S = 600.0
_MIN_BYTES_PER_S = 10_000
_MAX_PAGE_BYTES = 256 * 1024**2
_MAX_FILE_BYTES = 8 * 1024**3
_CHUNK = 1024**2
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.2, */*;q=0.1"
_ARCHIVES = (".whl", ".tar.gz", ".zip", ".tar.bz2", ".tgz", ".tar.xz", ".egg")


_NO_ANSWER = (OSError, HTTPException, UnicodeError)
"""Exceptions of a request without an answer, or with one that is not HTTP. UnicodeError comes from redirections to
addresses that cannot be encoded."""


class IndexFailed(EnvironmentFailed):
    """The package index did not answer, or a file is not what it was announced to be."""


@dataclass(frozen=True, slots=True)
class Link:
    """A file of a project.

    Args:
        filename: Name of the file.
        url: URL of the file.
        sha256: Digest of the file, hexadecimal; empty where the index does not say it.
        requires_python: Versions of Python that the file's metadata require.
        yanked: Reason why the file was withdrawn, which may be empty; None if it was not withdrawn.
        uploaded: Time of the upload, ISO 8601; empty where the index does not say it.
    """

    filename: str
    url: str
    sha256: str = ""
    requires_python: str = ""
    yanked: str | None = None
    uploaded: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where packages come from.

    Args:
        indexes: Roots of indexes (PEP 503), each with a directory for every project.
        find_links: Directories of files, or pages that link to them.
        certificate: File of certificates to trust; empty: the system's.
    """

    indexes: tuple[str, ...] = (DEFAULT_INDEX,)
    find_links: tuple[str, ...] = ()
    certificate: str = ""


def configured() -> Sources:
    """Return where pip looks for packages on this machine: its indexes, ``find-links`` and ``cert``.

    For each option a ``PIP_*`` variable has precedence over pip's configuration files. Without ``index-url`` the index
    is PyPI; with ``no-index`` there is none.

    Raises:
        InvalidRequest: A configuration file cannot be parsed.
    """
    values: dict[str, str] = {}
    for path in _configuration_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except configparser.Error as error:
            raise InvalidRequest(f"{path}: pip's configuration cannot be read: {error}") from error
        for section in ("global", "install", "download"):
            if parser.has_section(section):
                values.update({name.replace("_", "-"): value for name, value in parser.items(section)})
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            values[name[4:].lower().replace("_", "-")] = value
    indexes = [values.get("index-url", DEFAULT_INDEX)] if _is_off(values.get("no-index", "")) else []
    return Sources(
        indexes=(*indexes, *(values.get("extra-index-url", "").split() if indexes else ())),
        find_links=tuple(values.get("find-links", "").split()),
        certificate=values.get("cert", ""),
    )


def _is_off(value: str) -> bool:
    return value.strip().lower() in ("", "0", "no", "false", "off")


def _configuration_files() -> list[Path]:
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home, config = Path.home(), Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf", config / "pip/pip.conf"]
    return [*files, Path(sys.prefix) / "pip.conf", *([Path(named)] if named else [])]


class PackageIndex:
    """Pages and files of the configured indexes; files are kept by their digest.

    Args:
        cache: Directory of files that were fetched, ``<sha256>/<name>``.
        sources: Indexes and directories that packages come from; None uses those that pip is configured to use.
    """

    def __init__(self, cache: Path, sources: Sources | None = None) -> None:
        self.cache = cache
        self.sources = configured() if sources is None else sources
        self._links: dict[str, tuple[Link, ...]] = {}
        context = ssl.create_default_context(cafile=self.sources.certificate or None)
        self._opener = opener(context, Patience(2 * _TIMEOUT_S, _TOTAL_S, _MIN_BYTES_PER_S))

    def links(self, project: str) -> tuple[Link, ...]:
        """Return the files of a project in all indexes; none where it is in no index, or its name is no project's.

        Raises:
            IndexFailed: An index does not answer, or not as HTTP and PEP 503 or 691 ask.
        """
        if not PROJECT.matches(project):
            return ()
        name = normalized(project)
        if name not in self._links:
            found: list[Link] = []
            for index in self.sources.indexes:
                found += self._page(f"{index.rstrip('/')}/{name}/", needed=False)
            for place in self.sources.find_links:
                found += [link for link in self._place(place) if _is_of(link.filename, name)]
            self._links[name] = tuple(found)
        return self._links[name]

    def fetch(self, link: Link) -> Path:
        """Return the file of a link, fetched unless it is there already.

        Raises:
            IndexFailed: It cannot be had, or its digest is another one.
        """
        if link.sha256:
            known = self.cache / link.sha256 / link.filename
            if known.is_file():
                os.utime(known.parent)
                return known
        self.cache.mkdir(mode=0o755, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.cache, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file, self._open(link.url) as answer:
                digest = hashlib.sha256()
                for chunk in _parts(answer, _MAX_FILE_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
            if link.sha256 and digest.hexdigest() != link.sha256:
                raise IndexFailed(
                    f"{link.filename} has the sha256 {digest.hexdigest()}, and {link.sha256} was expected"
                )
            place = self.cache / digest.hexdigest() / link.filename
            place.parent.mkdir(mode=0o755, exist_ok=True)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(place)
            return place
        except _NO_ANSWER as error:
            raise IndexFailed(f"{link.filename} could not be fetched from {_shown(link.url)}: {error}") from error
        finally:
            Path(temporary).unlink(missing_ok=True)

    def source_archive(self, project: str, version: str, sha256: str = "") -> Path:
        """Return the source archive of a release.

        Args:
            project: Name of the project on the index.
            version: Version of the release.
            sha256: Expected digest, hexadecimal; empty takes the one that the index says, if any.

        Raises:
            IndexFailed: The index has no such archive, or its digest differs.
        """
        if sha256:
            kept = sorted((self.cache / sha256).glob("*")) if (self.cache / sha256).is_dir() else []
            if kept:
                return kept[0]
        there = [link for link in self.links(project) if _version_of(link.filename, project) is not None]
        matching = [link for link in there if _same_version(_version_of(link.filename, project) or "", version)]
        if not matching:
            known = sorted({_version_of(link.filename, project) or "" for link in there})
            raise IndexFailed(
                f"the package index has no source archive of {project} {version}: it has "
                f"{', '.join(known[-8:]) or 'none of that project'}"
            )
        same = [link for link in matching if link.sha256 == sha256] if sha256 else []
        link = (same or sorted(matching, key=lambda link: not link.filename.endswith(".tar.gz")))[0]
        if sha256 and link.sha256 not in ("", sha256):
            raise IndexFailed(f"{link.filename} of the index has the sha256 {link.sha256}, the recipe has {sha256}")
        return self.fetch(replace(link, sha256=sha256 or link.sha256))

    def _place(self, place: str) -> list[Link]:
        path = Path(place.removeprefix("file://"))
        if "://" not in place or place.startswith("file://"):
            if path.is_dir():
                return [Link(file.name, file.absolute().as_uri()) for file in sorted(path.iterdir()) if file.is_file()]
            if not path.is_file():
                return []
            place = path.absolute().as_uri()
        return self._page(place, needed=False)

    def _page(self, url: str, *, needed: bool) -> list[Link]:
        if url.startswith("file://"):
            path = Path(unquote(urlsplit(url).path))
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                return []
            return _html_links(path.read_text("utf-8", "replace"), url)
        try:
            with self._open(url) as answer:
                content = b"".join(_parts(answer, _MAX_PAGE_BYTES))
                kind, base = answer.headers.get_content_type(), answer.geturl()
        except urllib.error.HTTPError as error:
            if error.code in (403, 404, 410) and not needed:
                return []
            raise IndexFailed(f"the package index {_shown(url)} answers {error.code} {error.reason}") from error
        except _NO_ANSWER as error:
            raise IndexFailed(
                f"the package index {_shown(url)} cannot be reached ({error}): packages come from it while an instance "
                "is prepared; PIP_INDEX_URL names another"
            ) from error
        if kind.endswith("json"):
            return _json_links(content, base)
        return _html_links(content.decode("utf-8", "replace"), base)

    @contextmanager
    def _open(self, url: str) -> Iterator[addinfourl]:
        url, authorization = _without_password(url)
        request = urllib.request.Request(url, headers={"Accept": _ACCEPT, "User-Agent": "errata", **authorization})
        for attempt in range(1, _TRIES + 1):
            try:
                answer = self._opener.open(request, timeout=_TIMEOUT_S)
                break
            except urllib.error.HTTPError as error:
                if error.code < 500 or attempt == _TRIES:
                    raise
            except _NO_ANSWER:
                if attempt == _TRIES:
                    raise
            threading.Event().wait(2.0**attempt / 4)
        with answer:
            yield answer


def _parts(answer: addinfourl, most: int) -> Iterator[bytes]:
    """Yield the body of an answer, part by part as it comes.

    Raises:
        OSError: It is larger than ``most`` bytes, or comes too slowly.
    """
    size = 0
    while part := answer.read1(_CHUNK):  # `read1` returns what is there; `read` would wait for the whole chunk
        size += len(part)
        if size > most:
            raise OSError(f"it has more than {most:,} bytes")
        yield part


@contextmanager
def lent(index: PackageIndex, directory: Path) -> Iterator[None]:
    """Answer requests for the index on the socket `SOCKET` in a directory, which a sandbox may mount.

    The paths are ``/simple/<project>/`` (PEP 503) and the files that these pages link to; all else is refused.
    """
    directory.mkdir(mode=0o755, exist_ok=True)
    path = directory / SOCKET
    # The name of a socket has 107 bytes at most: it is bound by way of a descriptor of its directory.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server = _Server(f"/proc/self/fd/{descriptor}/{SOCKET}", index)
    finally:
        os.close(descriptor)
    path.chmod(0o777)
    thread = threading.Thread(target=server.serve_forever, name="errata-index", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, index: PackageIndex) -> None:
        self.index = index
        self.offered: dict[str, Link] = {}
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the sandbox closed its connection, or was silent for too long
            log.exception("a request for the package index")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 120.0

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        try:
            if len(parts) == 2 and parts[0] == "simple":
                self._give(200, self._page(parts[1]), "text/html; charset=utf-8", with_body=with_body)
            elif len(parts) == 3 and parts[0] == "files" and parts[1] in self.server.offered:
                self._file(self.server.index.fetch(self.server.offered[parts[1]]), with_body=with_body)
            else:
                self._give(404, b"not part of a package index\n", "text/plain", with_body=with_body)
        except IndexFailed as error:
            log.warning("%s", error.message)
            self._give(502, f"{error.message}\n".encode(), "text/plain", with_body=with_body)

    def _page(self, project: str) -> bytes:
        rows = []
        for link in self.server.index.links(project):
            token = hashlib.sha256(f"{link.url}\0{link.sha256}".encode()).hexdigest()[:32]
            self.server.offered[token] = link
            digest = f"#sha256={link.sha256}" if link.sha256 else ""
            asks = f' data-requires-python="{html.escape(link.requires_python)}"' if link.requires_python else ""
            gone = "" if link.yanked is None else f' data-yanked="{html.escape(link.yanked)}"'
            name = html.escape(link.filename)
            rows.append(f'<a href="/files/{token}/{urllib.request.pathname2url(name)}{digest}"{asks}{gone}>{name}</a>')
        head = '<!DOCTYPE html><html><head><meta name="pypi:repository-version" content="1.0"></head><body>'
        return "\n".join([head, *rows, "</body></html>\n"]).encode()

    def _file(self, path: Path, *, with_body: bool) -> None:
        self._head(200, path.stat().st_size, "application/octet-stream")
        if with_body:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    self.wfile.write(chunk)

    def _give(self, status: int, content: bytes, kind: str, *, with_body: bool) -> None:
        self._head(status, len(content), kind)
        if with_body:
            self.wfile.write(content)

    def _head(self, status: int, size: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def address_string(self) -> str:
        return "sandbox"

    def log_message(self, format: str, *arguments: object) -> None:
        log.debug(format, *arguments)


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.found.append(values)
        elif tag == "base" and not self.base:
            self.base = values.get("href") or ""


def _html_links(text: str, url: str) -> list[Link]:
    parser = _Anchors()
    parser.feed(text)
    base = urljoin(url if url.endswith((".html", "/")) else f"{url}/", parser.base)
    links = []
    for values in parser.found:
        target, fragment = urldefrag(urljoin(base, values["href"] or ""))
        name = unquote(urlsplit(target).path.rpartition("/")[2])
        if PACKAGE_FILE.matches(name) and name.endswith(_ARCHIVES) and _may_link(url, target):
            digest = re.search(r"(?:^|&)sha256=([0-9a-f]{64})", fragment)
            asks, yanked = values.get("data-requires-python") or "", "data-yanked" in values
            reason = (values.get("data-yanked") or "") if yanked else None
            links.append(Link(name, target, digest[1] if digest else "", asks, reason))
    return links


def _json_links(content: bytes, url: str) -> list[Link]:
    try:
        files = decode(content)["files"]
        links = []
        for file in files:
            if PACKAGE_FILE.matches(file["filename"]) and file["filename"].endswith(_ARCHIVES):
                yanked = file.get("yanked") or None
                reason = yanked if isinstance(yanked, str) else "" if yanked else None
                digest = (file.get("hashes") or {}).get("sha256", "")
                if digest and not DIGEST_ID.matches(digest):
                    raise ValueError(f"the sha256 of {file['filename']} is {shown(digest)}")
                asks = file.get("requires-python") or ""
                when = file.get("upload-time") or ""
                target = urljoin(url, file["url"])
                if _may_link(url, target):
                    links.append(Link(file["filename"], target, digest, asks, reason, when))
        return links
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IndexFailed(f"the package index {_shown(url)} answers JSON that is not PEP 691's: {error}") from error


def _may_link(page: str, target: str) -> bool:
    """Return whether a page may link to a file: one that came over HTTP must not name files of this machine."""
    allowed = ("http", "https", "file") if urlsplit(page).scheme == "file" else ("http", "https")
    return urlsplit(target).scheme in allowed


def normalized(project: str) -> str:
    """Return the name of a project as an index has it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", project).lower()


def _is_of(filename: str, project: str) -> bool:
    if filename.endswith(".whl"):
        return normalized(filename.partition("-")[0]) == project
    return _version_of(filename, project) is not None or normalized(filename).startswith(f"{project}-")


def _version_of(filename: str, project: str) -> str | None:
    """Return the version in the name of a source archive; None for other files."""
    stem = next((filename.removesuffix(end) for end in _ARCHIVES[1:-1] if filename.endswith(end)), None)
    if stem is None:
        return None
    name = normalized(project)
    for found in re.finditer("-", stem):
        if normalized(stem[: found.start()]) == name and stem[found.end() :][:1].isdigit():
            return stem[found.end() :]
    return None


def _same_version(one: str, other: str) -> bool:
    def key(version: str) -> str:
        return re.sub(r"(\.0)+(?=$|[a-z+])", "", version.lower().removeprefix("v"))

    return key(one) == key(other)


def _without_password(url: str) -> tuple[str, dict[str, str]]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not (parts.username or parts.password):
        return url, {}
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    place = parts.netloc.rpartition("@")[2]
    token = base64.b64encode(pair.encode()).decode()
    return urlunsplit(parts._replace(netloc=place)), {"Authorization": f"Basic {token}"}


def _shown(url: str) -> str:
    return _without_password(url)[0]
