"""``errata episodes`` and ``errata replay``: read a journal, of a running server or on disk."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import httpx
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

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
from errata_protocol.payload import digest
from errata_protocol.replay import EpisodeDetail, EpisodePage, RewardPost, RewardRecord, observation_of

from .auth import principal_of
from .discovery import published
from .journal.base import RewardRow
from .runtime import Runtime, owner_url
from .settings import Settings

cli = typer.Typer(help="List, show and delete episodes.", invoke_without_command=True, rich_markup_mode=None)

T = TypeVar("T")
_RECORDS = TypeAdapter(list[RewardRecord])
_EID = re.compile(r"[A-Za-z0-9_-]{1,200}")


def directory(text: str) -> Path:
    """Read a directory option; an empty one is a variable that was not set, not the current directory."""
    if not text.strip():
        raise typer.BadParameter("the directory is empty: is a variable unset?")
    return Path(text)


def cursor_of(text: str) -> str:
    """Read a cursor that an earlier list printed."""
    if not text.isdecimal() or len(text) > 18:
        raise typer.BadParameter(f"{text!r} is no cursor that an earlier list printed")
    return text


_DEFAULT = "[default: ERRATA_DATA_DIR, else errata in XDG_DATA_HOME or ~/.local/share]"
DataDir = Annotated[Path | None, typer.Option(parser=directory, metavar="PATH", help=f"Journal to read. {_DEFAULT}")]
ServersDir = Annotated[
    Path | None,
    typer.Option(
        parser=directory, metavar="PATH", help=f"Journal and sandbox layers; one server per directory. {_DEFAULT}"
    ),
]
Url = Annotated[str | None, typer.Option(help="Server to ask instead of reading the disk.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def default_data_dir() -> Path:
    """Return where ``errata serve`` keeps its journal unless told otherwise."""
    configured = os.environ.get("ERRATA_DATA_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "errata"


@cli.callback()
def episodes(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most this many.")] = 20,
    cursor: Annotated[
        str | None, typer.Option(parser=cursor_of, metavar="N", help="Go on after an earlier list.")
    ] = None,
    environment: Annotated[str | None, typer.Option(help="Only of this environment.")] = None,
    error_kind: Annotated[str | None, typer.Option(help="Only with a turn marked so.")] = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List episodes, newest first."""
    if context.invoked_subcommand is not None:
        return
    query = {"limit": limit, "cursor": cursor, "environment": environment, "error_kind": error_kind}
    with _Source(data_dir, url) as source:
        page = source.page(query)
    if as_json:
        typer.echo(page.model_dump_json())
        return
    table = Table(Column("eid", no_wrap=True, min_width=27), box=None)
    for name in ("environment", "age", "turns", "reward", "done", "error kinds"):
        table.add_column(name)
    for e in page.episodes:
        kinds = " ".join(f"{kind}:{n}" for kind, n in e.error_kinds.items())
        table.add_row(
            e.eid, e.environment, _age(e.created), str(e.deliveries), f"{e.reward:g}", "yes" if e.done else "", kinds
        )
    Console().print(table)
    if page.next is not None:
        typer.echo(f"more: the same command with --cursor {page.next}")


@cli.command("show")
def show(eid: str, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """Show the turns of one episode."""
    with _Source(data_dir, url) as source:
        _print_detail(source.detail(eid), as_json)


@cli.command("rewards")
def rewards(eid: str, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """List the rewards that came after their step."""
    with _Source(data_dir, url) as source:
        found = source.rewards(eid)
    if as_json:
        typer.echo(json.dumps([r.model_dump() for r in found]))
        return
    table = Table("t", "value", "source", "reward id", box=None)
    for r in found:
        table.add_row(str(r.t), f"{r.value:g}", escape(r.source), escape(r.reward_id))
    Console().print(table)


@cli.command("reward", context_settings={"ignore_unknown_options": True})  # a value may be negative
def reward(
    eid: str,
    t: Annotated[int, typer.Argument(min=0, max=2**53 - 1, help="Delivery.")],
    value: float,
    source: Annotated[str, typer.Option(help="Who says so.")],
    reward_id: Annotated[
        str | None, typer.Option("--id", help="Name of the reward: given again, nothing changes. [default: a new one]")
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Add a reward to a step; through the server where one runs on the directory."""
    try:
        post = RewardPost(t=t, value=value, source=source, reward_id=reward_id or f"cli-{secrets.token_hex(8)}")
    except ValidationError as error:
        raise InvalidRequest(f"not a reward: {error.errors(include_url=False)[0]['msg']}") from error
    with _Source(data_dir, url, writes=True) as opened:
        made = opened.reward(eid, post)
    told = f"{eid}: t={made.t} {made.value:g} from {made.source}, reward id {made.reward_id}"
    typer.echo(made.model_dump_json() if as_json else told)


@cli.command("delete")
def delete(eids: list[str], data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """Delete episodes and the sandbox layers that only they named."""
    deleted: dict[str, int] = {}
    missing: UnknownEpisode | None = None
    with _Source(data_dir, url, writes=True) as source:
        for eid in eids:
            try:
                deleted[eid] = source.delete(eid)
            except UnknownEpisode as error:
                missing = error
    lines = [f"{eid}: {n} deliveries deleted" for eid, n in deleted.items()]
    typer.echo(json.dumps(deleted) if as_json else "\n".join(lines))
    if missing is not None:
        raise missing


def replay(
    eid: Annotated[str, typer.Argument(help="Episode.")],
    t: Annotated[int | None, typer.Argument(min=0, max=2**53 - 1, help="Delivery; else all turns are listed.")] = None,
    agent_text: Annotated[bool, typer.Option(help="Print what the agent read instead of the payload.")] = False,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print the exact bytes the agent was sent at step T, their digest checked."""
    with _Source(data_dir, url) as source:
        if t is None:
            _print_detail(source.detail(eid), as_json)
            return
        payload, told, kind = source.state(eid, t)
        if digest(payload) != told:
            raise JournalUnavailable(f"t={t} of {eid} does not match its digest {told}: the journal is damaged")
        if agent_text:
            environment = source.detail(eid).environment
            if environment not in published():
                raise InvalidRequest(
                    f"the environment {environment!r} is not installed here: its agent_text is unknown"
                )
            spec = published()[environment].load()
            text = spec.agent_text(observation_of(json.loads(payload)))
            read = {"agent_text": text, "agent_text_version": spec.agent_text_version}
            typer.echo(json.dumps({"eid": eid, "t": t, "kind": kind, "digest": told, **read}) if as_json else text)
        elif as_json:
            typer.echo(json.dumps({"eid": eid, "t": t, "kind": kind, "digest": told, "data": json.loads(payload)}))
        else:
            sys.stdout.buffer.write(payload + (b"\n" if sys.stdout.isatty() else b""))
            sys.stdout.buffer.flush()


def _print_detail(detail: EpisodeDetail, as_json: bool) -> None:
    if as_json:
        typer.echo(detail.model_dump_json())
        return
    typer.echo(f"{detail.eid} of {detail.environment}, reward {detail.reward:g}{', done' if detail.done else ''}")
    if detail.origin is not None:
        typer.echo(f"forked from {detail.origin.eid} at t={detail.origin.t}")
    table = Table("t", "kind", "reward", "error kind", "hint", "digest", box=None)
    for turn in detail.turns:
        reward = "" if turn.reward is None else f"{turn.reward:g}"
        short = turn.digest.removeprefix("sha256:")[:16]
        table.add_row(str(turn.t), turn.kind, reward, turn.error_kind or "", turn.hint_template_key or "", short)
    Console().print(table)


def _age(created: float) -> str:
    seconds = max(0, int(time.time() - created))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


class _Source:
    """A journal to read: over HTTP, or straight from its directory.

    A directory is read in place also while a server runs on it; deleting goes through the server then.
    """

    def __init__(self, data_dir: Path | None, url: str | None, *, writes: bool = False) -> None:
        self._token = os.environ.get("ERRATA_TOKEN")
        self._url = _checked(url) if url is not None else None
        self._runtime: Runtime | None = None
        self._directory = data_dir or default_data_dir()
        if url is None and not (self._directory / "journal.db").exists():
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

    def __enter__(self) -> _Source:
        if self._url is None and self._runtime is None:
            from .journal import ReadOnlyJournal

            journal = ReadOnlyJournal(self._directory / "journal.db")
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
        return self._local(lambda r: r.page(**query, principal=self._principal))

    def detail(self, eid: str) -> EpisodeDetail:
        if self._url is not None:
            return EpisodeDetail.model_validate_json(self._http("GET", _path(eid)).content)
        return self._local(lambda r: r.detail(eid, self._principal))

    def state(self, eid: str, t: int) -> tuple[bytes, str, str]:
        if self._url is not None:
            found = self._http("GET", f"{_path(eid)}/states/{t}")
            return found.content, found.headers["etag"].strip('"'), found.headers["x-errata-kind"]
        row = self._local(lambda r: r.delivery(eid, t, self._principal))
        return row.payload, f"sha256:{row.digest.hex()}", row.wire_kind

    def rewards(self, eid: str) -> list[RewardRecord]:
        if self._url is not None:
            return _RECORDS.validate_json(self._http("GET", f"{_path(eid)}/rewards").content)
        assert self._runtime is not None
        return [_record(row) for row in asyncio.run(self._runtime.rewards.list(eid, self._principal))]

    def reward(self, eid: str, post: RewardPost) -> RewardRecord:
        if self._url is not None:
            answer = self._http("POST", f"{_path(eid)}/rewards", json=post.model_dump())
            return RewardRecord.model_validate_json(answer.content)
        assert self._runtime is not None
        return _record(asyncio.run(self._runtime.rewards.post_all(eid, [post], self._principal))[0])

    def delete(self, eid: str) -> int:
        if self._url is not None:
            return int(self._http("DELETE", _path(eid)).json()["deleted"])
        return self._local(lambda r: r.delete(eid, self._principal))

    def _local(self, read: Callable[[Any], Awaitable[T]]) -> T:
        from .replay import Replay

        assert self._runtime is not None
        replay_ = Replay(self._runtime)

        async def call() -> T:
            return await read(replay_)

        return asyncio.run(call())

    def _http(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        answer = self._ask(method, path, **kwargs)
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
        assert self._url is not None
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            return httpx.request(method, self._url.rstrip("/") + path, headers=headers, timeout=60, **kwargs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise JournalUnavailable(f"no answer from {self._url}: {error}; is the server running?") from error

    def _is_ours(self) -> bool:
        """Return whether the server is an Errata server: one without episodes is in production mode."""
        try:
            told = self._ask("GET", "/capabilities").json()
        except ValueError:
            return False
        if not isinstance(told, dict):
            return False
        each = told.get("environments", {"": told})  # of several environments at the root
        return isinstance(each, dict) and any(
            isinstance(one, dict) and one.get("protocol") == PROTOCOL_NAME for one in each.values()
        )


def _record(row: RewardRow) -> RewardRecord:
    return RewardRecord(t=row.t, value=row.value, source=row.source, reward_id=row.reward_id)


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
