"""`Source`: reads and changes episodes for a command, over HTTP or in a data directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer
from pydantic import BaseModel, TypeAdapter

from errata_protocol.bundle import MAX_HEADER_BYTES, check_header, parse_line
from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.episode_lists import EpisodeFilter, EpisodeOrder, Pages, merged, summed
from errata_protocol.errors import (
    ErrataError,
    InvalidRequest,
    JournalUnavailable,
    NotSupported,
    RemoteProtocolError,
    Unauthorized,
    UnknownEpisode,
    error_from_wire,
)
from errata_protocol.replay import (
    DeletedEpisodes,
    EpisodeAggregates,
    EpisodeDetail,
    EpisodePage,
    RewardPost,
    RewardRecord,
    episode_path,
)

from ..journal import ALL_OWNERS, Journal, journal_in
from ..journal.registry import type_in
from ..runtime.data_lock import EPOCHS, owner_url
from ..runtime.rewards import reward_record
from ..runtime.runtime import Runtime
from ..settings import Settings, tokens_in_environment
from . import answers, data_dirs

if TYPE_CHECKING:
    from ..episodes.episodes import Episodes

T = TypeVar("T")


class _DeletedEpisode(BaseModel):
    """Answer to ``DELETE /episodes/{eid}``."""

    deleted: int


def directory(text: str) -> Path:
    """Parse a directory option; empty text, as from an unset variable, is an error and not the current directory."""
    if not text.strip():
        raise typer.BadParameter("the directory is empty: is a variable unset?")
    return Path(text)


_PAGE = TypeAdapter(EpisodePage)
_AGGREGATES = TypeAdapter(EpisodeAggregates)
_DETAIL = TypeAdapter(EpisodeDetail)
_RECORD = TypeAdapter(RewardRecord)
_RECORDS = TypeAdapter(list[RewardRecord])
_DELETED = TypeAdapter(DeletedEpisodes)
_COUNT = TypeAdapter(_DeletedEpisode)

_NO_DIRECTORY = "this is read from a data directory on its machine: give --data-dir"

MAX_BUNDLE_BYTES = 64 * 1024**3
"""Largest bundle that is fetched from a server, bytes."""

DataDir = Annotated[
    Path | None,
    typer.Option(
        parser=directory,
        metavar="PATH",
        help="Journal to read, or a directory of several, whose episodes are listed together. "
        "[default: ERRATA_DATA_DIR, else what is below errata in XDG_DATA_HOME or ~/.local/share]",
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
Url = Annotated[str | None, typer.Option(help="Server to use instead of reading the disk.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an episode was found on disk.

    Args:
        directory: The data directory.
        principal: Owner of the episode: the hash of a token; None without authentication.
    """

    directory: Path
    principal: str | None

    @property
    def owner(self) -> str:
        """The owner as it is printed: the beginning of the hash; ``-`` without authentication."""
        return self.principal[:12] if self.principal is not None else "-"


class Source:
    """Access to the episodes of a server over HTTP, or of data directories. Use it as a context manager.

    Who can read a data directory sees the episodes of all its owners; a server shows those of the token that is sent.
    A data directory can be read while a server runs on it. Changes are then made through that server.

    Args:
        data_dir: The data directory, or one that holds some; None for what `data_dirs.for_reading` returns.
        url: URL of a server to use instead of a data directory.
        eids: Episodes that the command is about; they select the data directory for a change.
        writes: Open the directory for changes, or use the server that runs on it.
        single: Read one data directory only.

    Raises:
        InvalidRequest: There is no journal, or one directory is needed and there are several; ``url`` is not an HTTP
            URL; or the environment has several tokens, of which a server could be sent one only.
        UnknownEpisode: ``writes`` is given, and no data directory has the first of ``eids``.
        JournalUnavailable: The directory is in use and its server cannot be found.
    """

    def __init__(
        self,
        data_dir: Path | None,
        url: str | None,
        *,
        eids: Sequence[str] = (),
        writes: bool = False,
        single: bool = False,
    ) -> None:
        self._url = _checked(url) if url is not None else None
        self._token: str | None = None
        self._runtimes: dict[Path, Runtime] = {}
        self._directories: list[Path] = []
        if self._url is not None:
            self._token = _only_token()
            return
        self._directories = [data_dirs.one(data_dir)] if single else data_dirs.for_reading(data_dir)
        if writes:
            self._directories = [self._one_of(eids)]
            self._open_for_writing(self._directories[0])

    def _one_of(self, eids: Sequence[str]) -> Path:
        """Return the only directory, or else the one that has the episodes."""
        if len(self._directories) == 1 or not eids:
            return data_dirs.only(self._directories)
        places: dict[str, Path] = {}
        for directory in self._directories:
            with _read_only(directory) as journal:
                places |= {eid: directory for eid in eids if eid not in places and journal.episode(eid) is not None}
        return _same_directory(eids, places)

    def _open_for_writing(self, directory: Path) -> None:
        """Open the directory, or use the server that has it open; raise JournalUnavailable if it cannot be found."""
        try:
            if directory.parent.name == EPOCHS:
                raise JournalUnavailable(
                    f"{directory} is shared by servers with leases, of which none runs: only a server changes it"
                )
            self._runtimes[directory] = Runtime(Settings(data_dir=directory, journal_store=None, lease=None))
        except JournalUnavailable:
            self._url = owner_url(directory)
            if self._url is None:
                raise
            self._token = _only_token()

    def __enter__(self) -> Source:
        if self._url is None:
            for directory in self._directories:
                if directory not in self._runtimes:
                    self._runtimes[directory] = runtime_for_reading(directory)
                    self._runtimes[directory].store.journal.blocking = False  # nothing else runs in a command meanwhile
        return self

    def __exit__(self, *_: object) -> None:
        for runtime in self._runtimes.values():
            asyncio.run(runtime.close())

    def page(self, query: Mapping[str, Any]) -> EpisodePage:
        """Return one page of episodes: of the server, or of all data directories together.

        Args:
            query: The parameters of ``GET /episodes``. ``limit`` and ``cursor`` have to be there; None stands for one
                that is not set.

        Raises:
            InvalidRequest: The cursor is one of another list.
        """
        if self._url is not None:
            params = {k: v for k, v in query.items() if v is not None}
            return self._http("GET", "/episodes", params=params).read(_PAGE)
        wanted = EpisodeFilter.of(query)
        order = EpisodeOrder.of_query(query)
        pages = [self._pages(directory, wanted, order) for directory in self._directories]
        return merged(pages, order, query["limit"], query["cursor"])

    def aggregates(self, bucket_s: int, wanted: Mapping[str, Any]) -> EpisodeAggregates:
        """Return what episodes add up to over time: of the server, or of all data directories together.

        Args:
            bucket_s: Length of a bucket, seconds.
            wanted: The filters of ``GET /episodes``; None stands for one that is not set.

        Raises:
            InvalidRequest: There are too many buckets or counts.
        """
        if self._url is not None:
            params = {"bucket_s": bucket_s, **{name: value for name, value in wanted.items() if value is not None}}
            return self._http("GET", "/episodes/aggregates", params=params).read(_AGGREGATES)
        return summed([self._sums(directory, bucket_s, EpisodeFilter.of(wanted)) for directory in self._directories])

    def _sums(self, directory: Path, bucket_s: int, wanted: EpisodeFilter) -> EpisodeAggregates:
        return self._local(
            directory,
            lambda episodes: episodes.reads.aggregates(bucket_s=bucket_s, wanted=wanted, principal=ALL_OWNERS),
        )

    def _pages(self, directory: Path, wanted: EpisodeFilter, order: EpisodeOrder) -> Pages:
        def page(limit: int, cursor: str | None) -> EpisodePage:
            return self._local(
                directory,
                lambda episodes: episodes.reads.page(
                    limit=limit, cursor=cursor, wanted=wanted, order=order, principal=ALL_OWNERS
                ),
            )

        return page

    def viewer(self) -> str:
        """Return the address of the server's viewer.

        Raises:
            InvalidRequest: It has none.
        """
        if self._ask("GET", "/viewer/").status == 404:
            raise InvalidRequest(
                f"{self._url} has no viewer: it is no Errata server, an earlier one, or in production mode"
            )
        return self._address("/viewer/")

    def places(self, eid: str) -> list[Place]:
        """Return where the data directories have an episode, and its owner; empty if a server is used."""
        found = []
        for directory, runtime in self._runtimes.items():
            if (row := runtime.store.journal.episode(eid)) is not None:
                found.append(Place(directory, row.principal))
        return found

    def owner(self, eid: str) -> str:
        """Return the owner of an episode as it is printed; empty if a server is used, which shows only own ones."""
        return next((place.owner for place in self.places(eid)), "")

    def detail(self, eid: str) -> EpisodeDetail:
        """Return an episode with its turns.

        Raises:
            UnknownEpisode: There is none, or it belongs to another token than the one that the server was sent.
        """
        if self._url is not None:
            return self._http("GET", episode_path(eid)).read(_DETAIL)
        return self._local(self._directory_of(eid), lambda episodes: episodes.reads.detail(eid, ALL_OWNERS))

    def state(self, eid: str, t: int) -> tuple[bytes, str, str]:
        """Return the payload of delivery ``t``, its recorded digest and its kind."""
        if self._url is not None:
            answer = self._http("GET", f"{episode_path(eid)}/states/{t}")
            return answer.content, answer.header("etag").strip('"'), answer.header("x-errata-kind")
        directory = self._directory_of(eid)
        found = self._local(directory, lambda episodes: episodes.reads.delivered(eid, t, ALL_OWNERS))
        return found.payload, found.digest, found.kind

    def action(self, eid: str, t: int) -> bytes:
        """Return the whole request that delivery ``t`` answered, as journaled."""
        if self._url is not None:
            return self._http("GET", f"{episode_path(eid)}/states/{t}/action").content
        return self._local(self._directory_of(eid), lambda episodes: episodes.reads.action(eid, t, ALL_OWNERS))

    def rewards(self, eid: str) -> list[RewardRecord]:
        """Return the late rewards of an episode."""
        if self._url is not None:
            return self._http("GET", f"{episode_path(eid)}/rewards").read(_RECORDS)
        return self._local(self._directory_of(eid), lambda episodes: episodes.reads.rewards(eid, ALL_OWNERS))

    def reward(self, eid: str, post: RewardPost) -> RewardRecord:
        """Add a late reward and return it as recorded."""
        if self._url is not None:
            return self._http("POST", f"{episode_path(eid)}/rewards", json=post.model_dump()).read(_RECORD)
        return reward_record(asyncio.run(self.runtime.rewards.post_all(eid, [post], ALL_OWNERS))[0])

    def bundle(
        self,
        eids: Sequence[str],
        write: Callable[[bytes], object],
        *,
        ancestors: bool,
        most_bytes: int = MAX_BUNDLE_BYTES,
    ) -> None:
        """Call ``write`` with the bytes of a bundle, part by part.

        Args:
            eids: The episodes; at least one.
            write: Called with each part.
            ancestors: Include the episodes that they were forked from.
            most_bytes: Largest bundle that is taken from a server, bytes.
        """
        if self._url is None:
            asyncio.run(self._write_bundle(eids, write, ancestors))
            return
        params: list[tuple[str, str]] = [("also", eid) for eid in eids[1:]]
        params.append(("ancestors", str(ancestors).lower()))
        address = self._address(f"{episode_path(eids[0])}/bundle")
        checked = _AfterHeader(write, address)
        self._checked_answer(answers.download(address, self._headers, params, checked, most_bytes))
        checked.finish()

    async def _write_bundle(self, eids: Sequence[str], write: Callable[[bytes], object], ancestors: bool) -> None:
        from ..episodes.bundles import bundle

        directory = _same_directory(eids, {eid: place.directory for eid in eids for place in self.places(eid)[:1]})
        runtime = self._runtimes[directory]
        async for line in bundle(runtime.store, runtime.clock, eids, ALL_OWNERS, ancestors=ancestors):
            write(line)

    @property
    def runtime(self) -> Runtime:
        """The runtime on the only data directory.

        Raises:
            InvalidRequest: A server is used, or there are several directories.
        """
        return self.runtimes[self.directory]

    @property
    def runtimes(self) -> Mapping[Path, Runtime]:
        """The runtime on each data directory.

        Raises:
            InvalidRequest: A server is used, so there is none.
        """
        if not self._runtimes:
            raise InvalidRequest(_NO_DIRECTORY)
        return self._runtimes

    @property
    def is_remote(self) -> bool:
        """Whether a server is used."""
        return self._url is not None

    @property
    def directory(self) -> Path:
        """The data directory.

        Raises:
            InvalidRequest: A URL was given instead of one, or there are several.
        """
        if not self._directories:
            raise InvalidRequest(_NO_DIRECTORY)
        return data_dirs.only(self._directories)

    @property
    def seen(self) -> str:
        """What is read, for messages: the data directories, or what the server shows to the token that it is sent."""
        if self._url is None:
            return ", ".join(map(str, self._directories))
        return f"what {self._url} shows {'to this token' if self._token else 'without a token'}"

    def delete_all(self, eids: Sequence[str], *, unused_only: bool = False) -> DeletedEpisodes:
        """Delete episodes, through the server if one is used.

        Args:
            eids: The episodes; a server takes at most 1000.
            unused_only: Keep episodes on which an open session stands, or from which another was forked.

        Returns:
            Of each deleted episode, the number of its deliveries; and the ids of those kept as in use, and of those
            that are unknown or belong to another token.
        """
        if self._url is not None:
            body = {"eids": list(eids), "unused_only": unused_only}
            return self._http("POST", "/episodes/delete", json=body).read(_DELETED)
        return self._local(
            self.directory, lambda episodes: episodes.deletion.delete_all(eids, ALL_OWNERS, unused_only=unused_only)
        )

    def delete(self, eid: str) -> int:
        """Delete an episode; return the number of its deliveries.

        Raises:
            UnknownEpisode: There is none, or it belongs to another token.
        """
        if self._url is not None:
            return self._http("DELETE", episode_path(eid)).read(_COUNT).deleted
        return self._local(self.directory, lambda episodes: episodes.deletion.delete(eid, ALL_OWNERS))

    def _directory_of(self, eid: str) -> Path:
        """Return the directory that has an episode; the first one if none has, which then says so."""
        return next((place.directory for place in self.places(eid)), self._directories[0])

    def _local(self, directory: Path, work: Callable[[Episodes], Awaitable[T]]) -> T:
        """Run a coroutine on the episodes of a data directory, in an event loop of its own."""
        from ..episodes.episodes import Episodes

        episodes = Episodes.of(self.runtimes[directory])

        async def call() -> T:
            return await work(episodes)

        return asyncio.run(call())

    def _http(self, method: str, path: str, **request: Any) -> answers.Answer:
        return self._checked_answer(self._ask(method, path, **request))

    def _ask(self, method: str, path: str, **request: Any) -> answers.Answer:
        return answers.ask(method, self._address(path), self._headers, **request)

    def _address(self, path: str) -> str:
        if self._url is None:
            raise RuntimeError("a data directory is not read over HTTP")
        return self._url.rstrip("/") + path

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _checked_answer(self, answer: answers.Answer) -> answers.Answer:
        """Return an answer of success; raise the error that its status or body means."""
        if answer.status == 401 and self._token is None:
            raise Unauthorized(f"{self._url} needs a token: set ERRATA_TOKEN or ERRATA_TOKEN_FILE")
        if answer.status == 401:
            raise Unauthorized(
                f"{self._url} refused the token in ERRATA_TOKEN or ERRATA_TOKEN_FILE: set one of the server's"
            )
        if answer.status == 404 and not _has_code(answer) and self._is_errata():
            raise NotSupported(
                f"{self._url} is in production mode, which serves no episodes: read its journal on its machine "
                "with --data-dir"
            )
        if not answer.is_success:
            raise _error_of(answer)
        return answer

    def _is_errata(self) -> bool:
        """Return whether the capabilities at the URL are those of an Errata server."""
        try:
            capabilities = self._ask("GET", "/capabilities").json()
        except RemoteProtocolError:
            return False
        if not isinstance(capabilities, dict):
            return False
        each = capabilities.get("environments", {"": capabilities})  # of several environments at the root
        return isinstance(each, dict) and any(
            isinstance(one, dict) and one.get("protocol") == PROTOCOL_NAME for one in each.values()
        )


class _AfterHeader:
    """Passes a bundle on once its first line is there and is a header, so that nothing else is downloaded for long.

    Args:
        write: Called with each part.
        address: URL of the bundle, for errors.
    """

    def __init__(self, write: Callable[[bytes], object], address: str) -> None:
        self._write = write
        self._address = address
        self._held: bytearray | None = bytearray()

    def __call__(self, part: bytes) -> None:
        """Pass a part on, or keep it until the header is whole.

        Raises:
            RemoteProtocolError: There is another first line than a header.
        """
        if self._held is None:
            self._write(part)
            return
        self._held += part
        if b"\n" in part or not self._held.startswith(b"{") or len(self._held) > MAX_HEADER_BYTES:
            self._demand_header(bytes(self._held.partition(b"\n")[0]))
            self._write(bytes(self._held))
            self._held = None

    def finish(self) -> None:
        """Raise RemoteProtocolError if the answer ended before its first line."""
        if self._held is not None:
            self._demand_header(bytes(self._held))
            self._write(bytes(self._held))

    def _demand_header(self, line: bytes) -> None:
        try:
            check_header(parse_line(line))
        except (ValueError, InvalidRequest) as error:
            raise RemoteProtocolError(
                f"{self._address} did not answer with a bundle ({error}): check the URL"
            ) from error


@contextmanager
def _read_only(directory: Path) -> Iterator[Journal]:
    with closing(_opened(directory)) as journal:
        yield journal


def runtime_for_reading(directory: Path) -> Runtime:
    """Return a runtime on the journal of a data directory, opened for reading.

    Raises:
        JournalUnavailable: It cannot be read.
    """
    return Runtime(Settings(data_dir=None, lease=None), journal=_opened(directory))


def _opened(directory: Path) -> Journal:
    """Return the journal of a data directory, opened for reading."""
    journal = journal_in(directory)
    return type_in(directory).open_read_only(journal)


def _same_directory(eids: Sequence[str], places: Mapping[str, Path]) -> Path:
    """Return the data directory of episodes, by where each one is.

    Raises:
        UnknownEpisode: One is nowhere.
        InvalidRequest: They are in several.
    """
    for eid in eids:
        if eid not in places:
            raise UnknownEpisode(eid)
    directories = list(dict.fromkeys(places.values()))
    if len(directories) > 1:
        listed = " and ".join(map(str, directories))
        raise InvalidRequest(f"the episodes are in {listed}: name those of one directory at a time")
    return directories[0]


def _only_token() -> str | None:
    """Return the token that a server is sent; None without one.

    Raises:
        InvalidRequest: The environment has several, as that of a server has: each sees episodes of its own.
    """
    tokens = tokens_in_environment()
    if len(tokens) > 1:
        raise InvalidRequest(
            f"ERRATA_TOKEN or ERRATA_TOKEN_FILE has {len(tokens)} tokens, and a server shows each its own episodes: "
            "set ERRATA_TOKEN to one of them, or read all episodes on the server's machine with --data-dir"
        )
    return next(iter(tokens), None)


def _checked(url: str) -> str:
    """Return ``url`` if it is an HTTP or HTTPS URL with a host.

    Raises:
        InvalidRequest: It is not.
    """
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # of the host or of the port
        is_http = False
    if not is_http:
        raise InvalidRequest(f"--url takes http://HOST:PORT or https://HOST, not {url!r}")
    return url


def _has_code(answer: answers.Answer) -> bool:
    """Return whether the body of an answer is a JSON object with an error code."""
    try:
        body = answer.json()
    except RemoteProtocolError:
        return False
    return isinstance(body, dict) and "code" in body


def _error_of(answer: answers.Answer) -> ErrataError:
    if _has_code(answer):
        return error_from_wire(answer.json())
    return JournalUnavailable(f"{answer.url.partition('?')[0]}: HTTP {answer.status}; is it an Errata server?")
