"""``errata episode``: exports episodes into a bundle file, verifies one, serves some read-only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from errata_protocol.bundle_check import Verification, verify_bundle
from errata_protocol.errors import JournalUnavailable

from .source import DataDir, Json, Source, Url

cli = typer.Typer(
    help="Export, verify and serve episodes as bundle files.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write; it appears when it is complete.")]


class Progress:
    """Says on standard error how far a long command is, every two seconds; nothing of a short one.

    Args:
        what: What is counted.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._next = time.monotonic() + 2
        self._began = self._next - 2

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 2
            print(f"errata: {count:,} {self._what}, {now - self._began:.0f} s", file=sys.stderr)


@contextmanager
def complete_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name only when all of it is written."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w+b") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@cli.command("export")
def export(
    eids: Annotated[list[str], typer.Argument(metavar="EID...", help="Episodes.")],
    output: Output,
    ancestors: Annotated[bool, typer.Option(help="With the episodes that they were forked from.")] = True,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Write episodes into a bundle file and verify it.

    A bundle has requests, exact payloads, digests, errors and late rewards.
    """
    progress, written = Progress("bytes"), 0

    with Source(data_dir, url, eids=eids) as source, complete_file(output) as file:

        def write(part: bytes) -> None:
            nonlocal written
            file.write(part)
            written += len(part)
            progress(written)

        source.bundle(eids, write, ancestors=ancestors)
        file.seek(0)
        found = verify_bundle(file, Progress("records verified"))
        if not found.ok:
            raise JournalUnavailable(
                f"what was exported does not verify, the first of {len(found.problems)} problems: "
                f"{_told(found)[0]}; the journal is damaged, or the answer was cut off"
            )
    told = {"file": str(output), "bytes": written, **found.model_dump(include={*_COUNTS, "notes"})}
    typer.echo(json.dumps(told) if as_json else f"{output}: {_counted(found)}, {written:,} bytes")
    if not as_json:
        for note in found.notes:
            print(f"errata: {note}", file=sys.stderr)


@cli.command("verify")
def verify(
    file: Annotated[Path, typer.Argument(help="Bundle.")],
    as_json: Json = False,
) -> None:
    """Check a bundle. Exit status 1 if it is damaged.

    Checked are each digest, that t has no gap, where forks come from, and the end.
    """
    with file.open("rb") as lines:
        found = verify_bundle(lines, Progress("records"))
    report(found, str(file), as_json)


def report(found: Verification, what: str, as_json: bool) -> None:
    """Print what a check found, and exit with status 1 if something is wrong."""
    if as_json:
        typer.echo(found.model_dump_json())
    else:
        for line in [*_told(found), *(f"note: {note}" for note in found.notes)]:
            typer.echo(line)
        typer.echo(f"{what}: {_counted(found)}, {'ok' if found.ok else f'{len(found.problems)} problems'}")
    if not found.ok:
        raise typer.Exit(1)


@cli.command("serve")
def serve(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Bundles.")],
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    insecure: Annotated[bool, typer.Option(help="Let other machines in without a token.")] = False,
) -> None:
    """Serve bundles read-only.

    /episodes, states and rewards answer as the server of the episodes did.
    """
    from ..serve.bundle_server import serve_archive
    from ..serve.server import Bind

    serve_archive(files, Bind(host, port, insecure))


_COUNTS = ("episodes", "deliveries", "errors", "rewards")


def _counted(found: Verification) -> str:
    return ", ".join(f"{getattr(found, name):,} {name}" for name in _COUNTS)


def _told(found: Verification) -> list[str]:
    return [
        ": ".join(
            filter(None, (f"line {p.line}" if p.line else "", p.eid or "", p.what)),
        )
        for p in found.problems
    ]
