"""`Source`: reads and changes episodes for a command, over HTTP or in a data directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer
from pydantic import BaseModel, TypeAdapter

from errata_protocol.bundle import MAX_HEADER_BYTES, check_header, parse_line
from errata_protocol.capabilities import PROTOCOL_NAME
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
from errata_protocol.replay import DeletedEpisodes, EpisodeDetail, EpisodePage, RewardPost, RewardRecord, episode_path

from ..doors.auth import principal_of
from ..journal import ReadOnlyJournal, journal_in
from ..runtime.data_lock import owner_url
from ..runtime.rewards import reward_record
from ..runtime.runtime import Runtime
from ..settings import Settings, token_in_environment
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
Url = Annotated[str | None, typer.Option(help="Server to use instead of reading the disk.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


class Source:
    """Access to the episodes of a server over HTTP, or of a data directory. Use it as a context manager.

    A data directory can be read while a server runs on it. Changes are then made through that server.

    Args:
        data_dir: The data directory; None for the one that `data_dirs.for_reading` returns.
        url: URL of a server to use instead of a data directory.
        eids: Episodes that the command is about; they select the data directory if there are several.
        writes: Open the directory for changes, or use the server that runs on it.

    Raises:
        InvalidRequest: There is no journal, or ``url`` is not an HTTP URL.
        JournalUnavailable: The directory is in use and its server cannot be found.
    """

    def __init__(
        self, data_dir: Path | None, url: str | None, *, eids: Sequence[str] = (), writes: bool = False
    ) -> None:
        self._token = token_in_environment()
        self._url = _checked(url) if url is not None else None
        self._runtime: Runtime | None = None
        self._directory: Path | None = None
        if url is None:
            self._directory = data_dir or data_dirs.for_reading(eids, _holds)
            if not journal_in(self._directory).is_dir():
                raise InvalidRequest(f"no journal in {self._directory}: give --data-dir or --url")
            if writes:
                self._open_for_writing(self._directory)

    def _open_for_writing(self, directory: Path) -> None:
        """Open the directory, or use the server that has it open; raise JournalUnavailable if it cannot be found."""
        try:
            self._runtime = Runtime(Settings(data_dir=directory))
        except JournalUnavailable:
            self._url = owner_url(directory)
            if self._url is None:
                raise

    def __enter__(self) -> Source:
        if self._url is None and self._runtime is None:
            journal = ReadOnlyJournal(journal_in(self.directory))
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
        """Return one page of episodes, newest first, from the server or from the local journal.

        Args:
            query: The parameters of ``GET /episodes``. Each one has to be there; None stands for one that is not set.
        """
        if self._url is not None:
            params = {k: v for k, v in query.items() if v is not None}
            return self._http("GET", "/episodes", params=params).read(_PAGE)
        return self._local(lambda episodes: episodes.reads.page(**query, principal=self._principal))

    def detail(self, eid: str) -> EpisodeDetail:
        """Return an episode with its turns.

        Raises:
            UnknownEpisode: There is none, or it belongs to another token.
        """
        if self._url is not None:
            return self._http("GET", episode_path(eid)).read(_DETAIL)
        return self._local(lambda episodes: episodes.reads.detail(eid, self._principal))

    def state(self, eid: str, t: int) -> tuple[bytes, str, str]:
        """Return the payload of delivery ``t``, its recorded digest and its kind."""
        if self._url is not None:
            answer = self._http("GET", f"{episode_path(eid)}/states/{t}")
            return answer.content, answer.header("etag").strip('"'), answer.header("x-errata-kind")
        found = self._local(lambda episodes: episodes.reads.delivered(eid, t, self._principal))
        return found.payload, found.digest, found.kind

    def rewards(self, eid: str) -> list[RewardRecord]:
        """Return the late rewards of an episode."""
        if self._url is not None:
            return self._http("GET", f"{episode_path(eid)}/rewards").read(_RECORDS)
        return self._local(lambda episodes: episodes.reads.rewards(eid, self._principal))

    def reward(self, eid: str, post: RewardPost) -> RewardRecord:
        """Add a late reward and return it as recorded."""
        if self._url is not None:
            return self._http("POST", f"{episode_path(eid)}/rewards", json=post.model_dump()).read(_RECORD)
        return reward_record(asyncio.run(self.runtime.rewards.post_all(eid, [post], self._principal))[0])

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

        async for line in bundle(self.runtime.store, self.runtime.clock, eids, self._principal, ancestors=ancestors):
            write(line)

    @property
    def runtime(self) -> Runtime:
        """The runtime on the data directory.

        Raises:
            InvalidRequest: A server is used, so there is none.
        """
        if self._runtime is None:
            raise InvalidRequest(_NO_DIRECTORY)
        return self._runtime

    @property
    def is_remote(self) -> bool:
        """Whether a server is used."""
        return self._url is not None

    @property
    def directory(self) -> Path:
        """The data directory.

        Raises:
            InvalidRequest: A URL was given instead of one.
        """
        if self._directory is None:
            raise InvalidRequest(_NO_DIRECTORY)
        return self._directory

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
            lambda episodes: episodes.deletion.delete_all(eids, self._principal, unused_only=unused_only)
        )

    def delete(self, eid: str) -> int:
        """Delete an episode; return the number of its deliveries.

        Raises:
            UnknownEpisode: There is none, or it belongs to another token.
        """
        if self._url is not None:
            return self._http("DELETE", episode_path(eid)).read(_COUNT).deleted
        return self._local(lambda episodes: episodes.deletion.delete(eid, self._principal))

    def _local(self, work: Callable[[Episodes], Awaitable[T]]) -> T:
        """Run a coroutine on the episodes of the data directory, in an event loop of its own."""
        from ..episodes.episodes import Episodes

        episodes = Episodes.of(self.runtime)

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


def _holds(directory: Path, eid: str) -> bool:
    """Return whether a data directory has an episode."""
    with Source(directory, None) as source:
        try:
            source.detail(eid)
        except UnknownEpisode:
            return False
        return True


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
    return JournalUnavailable(f"{answer.url}: HTTP {answer.status}; is it an Errata server?")
