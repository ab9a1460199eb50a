"""``errata episodes export|verify|serve``: episodes as bundle files. ``errata episode`` is their earlier name."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from errata_os.input_files import open_regular
from errata_protocol.bundle import bundle_lines
from errata_protocol.bundle_check import Verification, verify_bundle
from errata_protocol.errors import JournalUnavailable
from errata_protocol.printable import printable

from .source import DataDir, Json, Source, Url

cli = typer.Typer(
    help="Export, verify and serve episodes as bundle files.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write; it appears when it is complete.")]


class Progress:
    """Prints the progress of a command to standard error every two seconds, the first time after two seconds.

    Args:
        what: Name of what is counted, in the plural.
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
    """Open a file for writing under a temporary name and rename it to ``path`` at the end; an exception deletes it."""
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
    ancestors: Annotated[bool, typer.Option(help="Include the episodes that they were forked from.")] = True,
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
        found = verify_bundle(bundle_lines(file), Progress("records verified"))
        if not found.ok:
            raise JournalUnavailable(
                f"the exported bundle does not verify, the first of {len(found.problems)} problems: "
                f"{_problems(found)[0]}; the journal is damaged, or the answer was cut off"
            )
    written_report = {"file": str(output), "bytes": written, **found.model_dump(include={*COUNTS, "notes"})}
    typer.echo(json.dumps(written_report) if as_json else f"{output}: {_counted(found)}, {written:,} bytes")
    if not as_json:
        for note in found.notes:
            print(f"errata: {printable(note)}", file=sys.stderr)


@cli.command("verify")
def verify(
    file: Annotated[Path, typer.Argument(help="Bundle.")],
    as_json: Json = False,
) -> None:
    """Check a bundle. Exit status 1 if it is damaged.

    Checks each digest, that t has no gap, the origins of forks, and the end of the file.
    """
    with open_regular(file) as lines:
        found = verify_bundle(bundle_lines(lines), Progress("records"))
    report(found, str(file), as_json)


def report(found: Verification, what: str, as_json: bool) -> None:
    """Print the result of a verification, and exit with status 1 if it found problems.

    Args:
        found: The result.
        what: Name of what was verified, for the output.
        as_json: Print JSON.
    """
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json")))
    else:
        for line in [*_problems(found), *(f"note: {note}" for note in found.notes)]:
            typer.echo(printable(line))
        typer.echo(f"{what}: {_counted(found)}, {'ok' if found.ok else f'{len(found.problems)} problems'}")
    if not found.ok:
        raise typer.Exit(1)


@cli.command("serve")
def serve(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Bundles.")],
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    insecure: Annotated[bool, typer.Option(help="Accept other machines without a token.")] = False,
) -> None:
    """Serve bundles read-only.

    /episodes, states and rewards answer as on the server that recorded the episodes.
    """
    from ..serve.bundle_server import serve_archive
    from ..serve.server import Bind

    serve_archive(files, Bind(host, port, insecure))


COUNTS = ("episodes", "deliveries", "errors", "rewards")


def _counted(found: Verification) -> str:
    return ", ".join(f"{getattr(found, name):,} {name}" for name in COUNTS)


def _problems(found: Verification) -> list[str]:
    """Return a line for each problem of a verification."""
    return [
        ": ".join(
            filter(None, (f"line {p.line}" if p.line else "", p.eid or "", p.what)),
        )
        for p in found.problems
    ]
