"""``errata journal``: disk use, verification, repair, deletion of old episodes, export as JSON lines or Parquet."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from errata_protocol.bundle_check import EpisodeCheck, Verification
from errata_protocol.errors import ErrataError, InvalidRequest
from errata_protocol.printable import printable

from ..journal import SalvageReport, journal_in
from ..journal import registry as journal_registry
from ..runtime import shard_name
from ..runtime.data_lock import lock
from ..runtime.epochs import current
from ..runtime.shard_dirs import unserved
from ..runtime.store import Store
from . import data_dirs
from .bundles import COUNTS, Output, Progress, complete_file
from .bundles import report as show_verification
from .source import DataDir, Json, Source, directory
from .tables import Column, Table
from .times import when

cli = typer.Typer(
    help="Size, check, export and prune a journal. Reads a directory, even while a server runs on it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_BATCH = 500


@cli.command("size")
def size(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show sizes: rows by environment, and files on disk."""
    with Source(data_dir, None) as source:
        by_environment = asyncio.run(_sizes(source))
        each = [_files(directory) for directory in source.runtimes]
    files = {name: sum(found[name] for found in each) for name in each[0]}
    total = {key: sum(sizes[key] for sizes in by_environment.values()) for key in _SIZES}
    if as_json:
        typer.echo(json.dumps({"environments": by_environment, "total": total, "files": files}))
        return
    table = Table("environment", *(Column(name, right=True, whole=True) for name in _SIZES))
    for name, sizes in [*sorted(by_environment.items()), ("total", total)]:
        table.add(name, *(f"{sizes[key]:,}" for key in _SIZES))
    table.end()
    typer.echo("files: " + ", ".join(f"{name} {count:,}" for name, count in files.items()) + " bytes")


@cli.command("verify")
def verify(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Check all deliveries. Exit status 1 if one is wrong.

    Checks each digest, that t has no gap, and the origins of forks. A server may be running: if something is wrong,
    everything is read again, and what is wrong both times is reported.
    """
    with Source(data_dir, None) as source:
        found = asyncio.run(_all_verified(source))
        where = source.seen
    if found.problems:  # or a server deleted or forked an episode in the meantime
        with Source(data_dir, None) as source:
            again = asyncio.run(_all_verified(source))
        problems = [problem for problem in again.problems if problem in found.problems]
        found = again.model_copy(update={"ok": not problems, "problems": problems})
    show_verification(found, where, as_json)


@cli.command("salvage")
def salvage(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Repair a copy, a new data directory, instead."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Only report.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Repair a damaged journal; list the lost sessions.

    Intact rows stay. Open sessions with rows in damaged frames end as lost; their other deliveries stay readable.
    The server must not be running, unless --output or --dry-run is given. The damaged files are kept in
    journal/damaged. A copy has the journal only, without the layers of sandboxes. Exit status 1 if a session is lost.
    Of several workers each has a directory of its own, and this repairs one; the others are named.
    """
    directory = current(data_dir) if data_dir is not None else data_dirs.one(None)
    _name_further_workers(directory)
    journal = journal_in(directory)
    store = journal_registry.type_in(directory)
    if output is not None and output.exists():
        raise InvalidRequest(f"{output} exists already: give the name of a new directory")
    if output is not None or dry_run:
        copy = output / journal_registry.DIRECTORY if output is not None else None
        found = store.salvage(journal, output=copy, dry_run=dry_run)
        if output is not None and found.output is not None:
            journal_registry.write_name(output, journal_registry.name_in(directory))
            if (name := shard_name.shard_name(directory)) is not None:  # the ids in the copy name it
                shard_name.write(output, name)
    else:
        held = lock(directory) if journal.is_dir() else None
        try:
            found = store.salvage(journal)
        finally:
            if held is not None:
                os.close(held)
    if as_json:
        typer.echo(json.dumps({**found.as_json(), "dry_run": dry_run}))
    else:
        for line in _salvaged(found, dry_run):
            typer.echo(printable(line))
    if found.lost:
        raise typer.Exit(1)


def _name_further_workers(directory: Path) -> None:
    """Say on standard error which directories of further workers a command leaves out that works on one directory."""
    if further := unserved(directory, 1):
        listed = ", ".join(map(str, further))
        typer.echo(
            printable(f"only {directory}: give --data-dir with each of {listed} for the other workers"), err=True
        )


def _salvaged(found: SalvageReport, dry_run: bool) -> Iterator[str]:
    """Yield the lines of the report on a repair."""
    for damage in found.damaged:
        where = f"segment {damage.segment}, bytes {damage.begin:,} to {damage.end:,}"
        yield f"{where}: {damage.what}" + (f"; it held {damage.holds}" if damage.holds else "")
    for session in found.sessions:
        became = "lost" if session.status == "open" else session.status
        yield f"session {session.sid}: {became}; episodes {', '.join(session.episodes) or 'none'}"
    if found.unattributed_bytes:
        yield f"{found.unattributed_bytes:,} damaged bytes do not say whose rows they held"
    yield f"{len(found.sessions):,} sessions have rows in damaged frames, {len(found.lost):,} of them open: these " + (
        "would be lost" if dry_run else "are lost"
    )
    yield f"{found.rows:,} rows are whole"
    if not found.is_damaged:
        yield "nothing that was acknowledged is damaged"
    if found.output is not None:
        yield f"repaired: {found.output}" + (f"; as it was: {found.originals}" if found.originals else "")


@cli.command("shard")
def shard(
    data_dir: Annotated[
        Path | None,
        typer.Argument(parser=directory, metavar="[DATA_DIR]", help="Data directory; it need not exist yet."),
    ] = None,
) -> None:
    """Give a data directory a name, once, and print it.

    Ids of new sessions and episodes then have the name in them, and say among several servers whose they are. The
    directory's server must not be running; it reads the name when it starts. Without DATA_DIR: ERRATA_DATA_DIR, else
    the only one there is.
    """
    configured = os.environ.get("ERRATA_DATA_DIR")
    fresh = Path(configured) if configured and not data_dirs.journals(Path(configured)) else None
    chosen = data_dir or fresh or data_dirs.one(None)
    name = shard_name.shard_name(chosen)
    if name is None:
        held = lock(chosen)
        try:
            name = shard_name.shard_name(chosen) or shard_name.draw(chosen)
        finally:
            os.close(held)
    typer.echo(name)


@cli.command("retention")
def retention(
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Delete closed episodes without a request for this many days.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="N[k|M|G|T]", help="Delete the oldest until the rest is no larger.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Only report what would be deleted.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Delete whole closed episodes, oldest first.

    If a server runs on the directory, it deletes them. Episodes of open sessions, and those from which a kept episode
    was forked, are kept. A server deletes only episodes of the token in ERRATA_TOKEN; with ERRATA_RETENTION_DAYS and
    ERRATA_RETENTION_MAX_BYTES it prunes those of all tokens. Of several workers each has a directory of its own, and
    this prunes one; the others are named.
    """
    from ..episodes import retention as keeping

    if keep_days is None and max_bytes is None:
        raise InvalidRequest("give what to keep: --keep-days N, --max-bytes B, or both")
    bound = _bytes(max_bytes) if max_bytes is not None else None
    _name_further_workers(data_dirs.one(data_dir))
    with Source(data_dir, None, single=True) as source:
        chosen = asyncio.run(
            keeping.plan(
                source.runtime.store,
                keep_days=keep_days,
                max_bytes=bound,
                now=time.time(),
                progress=Progress("episodes"),
            )
        )
    report: dict[str, Any] = {
        "episodes": [held.row.eid for held in chosen.delete],
        "bytes": chosen.bytes,
        "kept": chosen.kept,
        "kept_bytes": chosen.kept_bytes,
        "held_back": chosen.held_back,
        "dry_run": dry_run,
    }
    if not dry_run and chosen.delete:
        report["deleted"], report["foreign"] = _delete(data_dir, chosen.delete)
    if as_json:
        typer.echo(json.dumps(report))
        return
    verb = "would be deleted" if dry_run else "chosen"
    typer.echo(f"{len(chosen.delete):,} episodes {verb}, {chosen.bytes:,} bytes")
    typer.echo(f"{chosen.kept:,} are kept, {chosen.kept_bytes:,} bytes")
    if chosen.held_back:
        typer.echo(f"{chosen.held_back:,} of these are kept for an open session or a fork")
    if "deleted" in report:
        typer.echo(f"{report['deleted']:,} deleted")
    if report.get("foreign"):
        typer.echo(
            f"{report['foreign']:,} belong to other tokens than the one in ERRATA_TOKEN or ERRATA_TOKEN_FILE: "
            "the server kept them"
        )


def _delete(data_dir: Path | None, chosen: Any) -> tuple[int, int]:
    """Delete the chosen episodes, through the server if one uses the directory.

    Returns:
        How many were deleted, and how many the server kept because they belong to other tokens.
    """
    from ..episodes import retention as keeping

    progress = Progress("deleted")
    with Source(data_dir, None, writes=True, single=True) as source:
        if not source.is_remote:
            return asyncio.run(keeping.apply(source.runtime.store, source.runtime.collect, chosen, progress)), 0
        deleted = foreign = 0
        for start in range(0, len(chosen), _BATCH):
            batch = [held.row.eid for held in chosen[start : start + _BATCH]]
            answer = source.delete_all(batch, unused_only=True)
            deleted += len(answer.deleted)
            foreign += len(answer.unknown)
            progress(deleted)
        return deleted, foreign


@cli.command("export")
def export(
    output: Output,
    format: Annotated[str, typer.Option(metavar="jsonl|parquet", help="Format of the file.")] = "jsonl",
    by: Annotated[str, typer.Option(metavar="turn|episode", help="What each row describes.")] = "turn",
    environment: Annotated[str | None, typer.Option(help="Only of this environment.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only episodes made since: 2026-05-01, an ISO time, or 12h, 7d ago."),
    ] = None,
    done: Annotated[bool, typer.Option("--done", help="Only episodes that ended.")] = False,
    state: Annotated[bool, typer.Option(help="Include state_t, the exact payloads.")] = True,
    agent_text: Annotated[bool, typer.Option(help="Include agent_text_t, what the agent read.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write rollouts as JSON lines or Parquet (docs/export.md).

    A row has state, action, rewards and error marker of a turn.
    """
    from ..episodes.rollout_files import JsonLines, Parquet
    from ..episodes.rollouts import Choice, episode_rows, turn_rows

    if format not in ("jsonl", "parquet") or by not in ("turn", "episode"):
        raise typer.BadParameter("--format takes jsonl or parquet, --by turn or episode")
    choice = Choice(environment, when(since) if since is not None else None, done, state, agent_text)
    with Source(data_dir, None) as source, complete_file(output) as file:
        rows = Parquet(file, by) if format == "parquet" else JsonLines(file)
        made: list[AsyncIterator[BaseModel]] = [
            (turn_rows if by == "turn" else episode_rows)(runtime.store, choice) for runtime in source.runtimes.values()
        ]

        async def write() -> int:
            progress, count = Progress(f"{by}s"), 0
            for of_a_journal in made:
                async for row in of_a_journal:
                    rows.write(row)
                    count += 1
                    progress(count)
            return count

        count = asyncio.run(write())
        rows.close()
    written = {"file": str(output), "format": format, "rows": count, "by": by, "bytes": output.stat().st_size}
    typer.echo(json.dumps(written) if as_json else f"{output}: {count:,} {by}s, {written['bytes']:,} bytes")


_SIZES = ("episodes", "deliveries", "payload_bytes", "request_bytes", "state_bytes")


async def _sizes(source: Source) -> dict[str, dict[str, int]]:
    """Return the sizes of the journal's rows by environment."""
    from ..episodes.rollouts import all_held

    found: dict[str, dict[str, int]] = {}
    progress, seen = Progress("episodes"), 0
    for runtime in source.runtimes.values():
        async for held in all_held(runtime.store):
            sizes = found.setdefault(held.row.environment, dict.fromkeys(_SIZES, 0))
            sizes["episodes"] += 1
            for key in _SIZES[1:]:
                sizes[key] += getattr(held, key)
            seen += 1
            progress(seen)
    return found


def _files(directory: Path) -> dict[str, int]:
    """Return the disk space used in a data directory, in bytes.

    ``sandboxes`` is the space of all sandboxes, ``journal`` that of all other files. Files that cannot be read count
    as 0.
    """
    from ..sandbox import registry
    from ..settings import Settings

    journal = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                inside = path.relative_to(directory).parts[0] != registry.DIRECTORY
                journal += path.stat().st_blocks * 512 if inside else 0
        except OSError:  # a running server deleted it, or its modes do not allow to look at it
            continue
    backend = registry.backend_type(Settings().sandbox)
    return {"journal": journal, "sandboxes": backend.size_bytes(directory / registry.DIRECTORY)}


async def _all_verified(source: Source) -> Verification:
    """Check each journal apart: an episode may be in two of them, as in a copy."""
    first, *rest = [await _verified(runtime.store) for runtime in source.runtimes.values()]
    for found in rest:
        counts = {name: getattr(first, name) + getattr(found, name) for name in COUNTS}
        both = {"problems": [*first.problems, *found.problems], "notes": [*first.notes, *found.notes]}
        first = first.model_copy(update={**counts, **both, "ok": first.ok and found.ok})
    return first


async def _verified(store: Store) -> Verification:
    """Check all episodes of a journal and print the progress to standard error.

    An episode whose deliveries cannot be read is a problem in the result, not an error of this function.
    """
    from ..episodes.bundles import contents, describe
    from ..episodes.rollouts import all_held

    check, progress, seen = EpisodeCheck(), Progress("deliveries"), 0
    async for held in all_held(store):
        if (origin := held.row.origin) is not None:
            check.expect(held.row.eid, origin)
    async for held in all_held(store):
        record = await describe(store, held.row)
        check.take(record)
        try:
            async for line in contents(store, record):
                check.take(line)
                seen += 1
                progress(seen)
        except (ErrataError, ValueError) as error:
            check.wrong(str(error), held.row.eid)
    return check.done()


def _bytes(text: str) -> int:
    """Parse a size such as 500M or 20G; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of bytes, such as 500M, 20G or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])
