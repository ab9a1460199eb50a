"""`Source`: reads and changes episodes for a command, through a running server or in its data directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import httpx
import typer
from pydantic import TypeAdapter

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import (
    ErrataError,
    InvalidRequest,
    JournalUnavailable,
    NotSupported,
    Unauthorized,
    UnknownEpisode,
    error_from_wire,
)
from errata_protocol.replay import DeletedEpisodes, EpisodeDetail, EpisodePage, RewardPost, RewardRecord

from ..doors.auth import principal_of
from ..journal import ReadOnlyJournal, journal_in
from ..runtime.data_lock import owner_url
from ..runtime.rewards import reward_record
from ..runtime.runtime import Runtime
from ..settings import Settings
from . import data_dirs

if TYPE_CHECKING:
    from ..episodes.episodes import Episodes

T = TypeVar("T")
_EID = re.compile(r"[A-Za-z0-9_-]{1,200}")
_RECORDS = TypeAdapter(list[RewardRecord])


def directory(text: str) -> Path:
    """Read a directory option; an empty one is a variable that was not set, not the current directory."""
    if not text.strip():
        raise typer.BadParameter("the directory is empty: is a variable unset?")
    return Path(text)


DataDir = Annotated[
    Path | None,
    typer.Option(
        parser=directory,
        metavar="PATH",
        help="Journal to read. [default: ERRATA_DATA_DIR, else what is below errata in XDG_DATA_HOME or "
        "~/.local/share: the only journal, or the one with the episode]",
    ),
]
ServersDir = Annotated[
    Path | None,
    typer.Option(
        parser=directory,
        metavar="PATH",
        help="Journal and sandbox layers; one server per directory. "
        "[default: ERRATA_DATA_DIR, else errata/NAMES in XDG_DATA_HOME or ~/.local/share]",
    ),
]
Url = Annotated[str | None, typer.Option(help="Server to ask instead of reading the disk.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


class Source:
    """A journal to read: over HTTP, or straight from its directory.

    A directory is read in place also while a server runs on it; deleting goes through the server then.

    Args:
        data_dir: Data directory; None chooses as `data_dirs.for_reading` does.
        url: Server to ask instead.
        eids: Episodes that the command is about: they determine which journal is read.
        writes: Take the directory, or ask the server that holds it.
    """

    def __init__(
        self, data_dir: Path | None, url: str | None, *, eids: Sequence[str] = (), writes: bool = False
    ) -> None:
        self._token = os.environ.get("ERRATA_TOKEN")
        self._url = _checked(url) if url is not None else None
        self._runtime: Runtime | None = None
        self._directory = data_dir or (data_dirs.home() if url is not None else data_dirs.for_reading(eids, _holds))
        if url is None and not journal_in(self._directory).is_dir():
            raise InvalidRequest(f"no journal in {self._directory}: give --data-dir or --url")
        if url is None and writes:
            self._take_or_ask()

    def _take_or_ask(self) -> None:
        try:
            self._runtime = Runtime(Settings(data_dir=self._directory))
        except JournalUnavailable:
            self._url = owner_url(self._directory)
            if self._url is None:
                raise

    def __enter__(self) -> Source:
        if self._url is None and self._runtime is None:
            journal = ReadOnlyJournal(journal_in(self._directory))
            journal.blocking = False  # nothing else runs in a command while it reads
            self._runtime = Runtime(Settings(data_dir=None), journal=journal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._runtime is not None:
            asyncio.run(self._runtime.close())

    @property
    def _principal(self) -> str | None:
        return principal_of(self._token) if self._token else None

    def page(self, query: dict[str, Any]) -> EpisodePage:
        if self._url is not None:
            params = {k: v for k, v in query.items() if v is not None}
            return EpisodePage.model_validate_json(self._http("GET", "/episodes", params=params).content)
        return self._local(lambda episodes: episodes.reads.page(**query, principal=self._principal))

    def detail(self, eid: str) -> EpisodeDetail:
        if self._url is not None:
            return EpisodeDetail.model_validate_json(self._http("GET", _path(eid)).content)
        return self._local(lambda episodes: episodes.reads.detail(eid, self._principal))

    def state(self, eid: str, t: int) -> tuple[bytes, str, str]:
        if self._url is not None:
            answer = self._http("GET", f"{_path(eid)}/states/{t}")
            return answer.content, answer.headers["etag"].strip('"'), answer.headers["x-errata-kind"]
        found = self._local(lambda episodes: episodes.reads.delivered(eid, t, self._principal))
        return found.payload, found.digest, found.kind

    def rewards(self, eid: str) -> list[RewardRecord]:
        if self._url is not None:
            return _RECORDS.validate_json(self._http("GET", f"{_path(eid)}/rewards").content)
        return self._local(lambda episodes: episodes.reads.rewards(eid, self._principal))

    def reward(self, eid: str, post: RewardPost) -> RewardRecord:
        if self._url is not None:
            answer = self._http("POST", f"{_path(eid)}/rewards", json=post.model_dump())
            return RewardRecord.model_validate_json(answer.content)
        return reward_record(asyncio.run(self.runtime.rewards.post_all(eid, [post], self._principal))[0])

    def bundle(self, eids: Sequence[str], write: Callable[[bytes], object], *, ancestors: bool) -> None:
        """Hand the bytes of a bundle to ``write`` as they come."""
        if self._url is None:
            asyncio.run(self._write_bundle(eids, write, ancestors))
            return
        params: list[tuple[str, str]] = [("also", eid) for eid in eids[1:]]
        params.append(("ancestors", str(ancestors).lower()))
        with self._stream(f"{_path(eids[0])}/bundle", params) as answer:
            for part in answer.iter_raw():
                write(part)

    async def _write_bundle(self, eids: Sequence[str], write: Callable[[bytes], object], ancestors: bool) -> None:
        from ..episodes.bundles import bundle

        async for line in bundle(self.runtime.store, self.runtime.clock, eids, self._principal, ancestors=ancestors):
            write(line)

    @property
    def runtime(self) -> Runtime:
        """The runtime of a directory that is read in place, or held.

        Raises:
            InvalidRequest: A server is asked, which gives no such thing.
        """
        if self._runtime is None:
            raise InvalidRequest("this is read from a data directory on its machine: give --data-dir")
        return self._runtime

    @property
    def is_remote(self) -> bool:
        """A server is asked."""
        return self._url is not None

    @property
    def directory(self) -> Path:
        """The data directory."""
        return self._directory

    def delete_all(self, eids: Sequence[str], *, unused_only: bool = False) -> DeletedEpisodes:
        """Delete at most 1000 episodes of this principal, through the server where one holds the directory."""
        if self._url is not None:
            asked = {"eids": list(eids), "unused_only": unused_only}
            return DeletedEpisodes.model_validate_json(self._http("POST", "/episodes/delete", json=asked).content)
        return self._local(
            lambda episodes: episodes.deletion.delete_all(eids, self._principal, unused_only=unused_only)
        )

    def delete(self, eid: str) -> int:
        if self._url is not None:
            return int(self._http("DELETE", _path(eid)).json()["deleted"])
        return self._local(lambda episodes: episodes.deletion.delete(eid, self._principal))

    def _local(self, work: Callable[[Episodes], Awaitable[T]]) -> T:
        from ..episodes.episodes import Episodes

        episodes = Episodes.of(self.runtime)

        async def call() -> T:
            return await work(episodes)

        return asyncio.run(call())

    def _http(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return self._checked_answer(self._ask(method, path, **kwargs))

    @contextlib.contextmanager
    def _stream(self, path: str, params: Any) -> Iterator[httpx.Response]:
        try:
            with httpx.stream("GET", self._address(path), params=params, headers=self._headers, timeout=60) as answer:
                if answer.is_error:
                    answer.read()
                yield self._checked_answer(answer)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._no_answer(error) from error

    def _address(self, path: str) -> str:
        if self._url is None:
            raise RuntimeError("a data directory is read in place, not over HTTP")
        return self._url.rstrip("/") + path

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _no_answer(self, error: Exception) -> JournalUnavailable:
        return JournalUnavailable(f"no answer from {self._url}: {error}; is the server running?")

    def _checked_answer(self, answer: httpx.Response) -> httpx.Response:
        if answer.status_code == 401 and self._token is None:
            raise Unauthorized(f"{self._url} needs a token: set ERRATA_TOKEN")
        if answer.status_code == 401:
            raise Unauthorized(f"{self._url} refused the token in ERRATA_TOKEN: set one of the server's")
        if answer.status_code == 404 and not _has_code(answer) and self._is_ours():
            raise NotSupported(
                f"{self._url} is in production mode, which serves no episodes: read its journal on its machine "
                "with --data-dir"
            )
        if answer.is_error:
            raise _error_of(answer)
        return answer

    def _ask(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        try:
            return httpx.request(method, self._address(path), headers=self._headers, timeout=60, **kwargs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._no_answer(error) from error

    def _is_ours(self) -> bool:
        """Return whether the server is an Errata server: one without episodes is in production mode."""
        try:
            capabilities = self._ask("GET", "/capabilities").json()
        except ValueError:
            return False
        if not isinstance(capabilities, dict):
            return False
        each = capabilities.get("environments", {"": capabilities})  # of several environments at the root
        return isinstance(each, dict) and any(
            isinstance(one, dict) and one.get("protocol") == PROTOCOL_NAME for one in each.values()
        )


def _holds(directory: Path, eid: str) -> bool:
    with Source(directory, None) as source:
        try:
            source.detail(eid)
        except UnknownEpisode:
            return False
        return True


def _checked(url: str) -> str:
    """Return the address of a server.

    Raises:
        InvalidRequest: It is none of HTTP's.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidRequest(f"--url takes http://HOST:PORT or https://HOST, not {url!r}")
    return url


def _path(eid: str) -> str:
    """Return where an episode is served. A text that no server mints would lead to another address."""
    if not _EID.fullmatch(eid):
        raise UnknownEpisode(eid)
    return f"/episodes/{eid}"


def _has_code(answer: httpx.Response) -> bool:
    try:
        body = answer.json()
    except ValueError:
        return False
    return isinstance(body, dict) and "code" in body


def _error_of(answer: httpx.Response) -> ErrataError:
    if _has_code(answer):
        return error_from_wire(answer.json())
    return JournalUnavailable(f"{answer.request.url}: HTTP {answer.status_code}; is it an Errata server?")
