"""``errata base``: builds, imports and finds the read-only root file systems of sandboxes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..sandbox.base_trees.importer import import_base
from ..sandbox.base_trees.recipe import PACKAGES
from ..sandbox.base_trees.tree import build_base, find_base

cli = typer.Typer(help="Build and find base trees of sandboxes.", no_args_is_help=True, rich_markup_mode=None)


@cli.command("build")
def build(
    name: Annotated[str, typer.Argument(help="Name of the tree.")] = "default",
    directory: Annotated[Path | None, typer.Option(help="Directory of bases. [default: user cache]")] = None,
    mirror: Annotated[str | None, typer.Option(help="Package mirror. [default: this machine's]")] = None,
    suite: Annotated[str | None, typer.Option(help="Release. [default: this machine's]")] = None,
    system: Annotated[
        Path | None,
        typer.Option(help="Root directory of an installed system with `errata base packages`; it is moved."),
    ] = None,
) -> None:
    """Build a base tree, unless the recipe was built before."""
    made = build_base(
        name,
        directory=directory,
        mirror=mirror,
        suite=suite,
        system=system,
        progress=lambda line: print(line, file=sys.stderr),
    )
    typer.echo(made.root)


@cli.command("packages")
def packages() -> None:
    """List the Debian packages of a base tree, one a line."""
    typer.echo("\n".join(PACKAGES))


@cli.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="A base tree, a root directory, or a tar archive of one.")],
    name: Annotated[str, typer.Argument(help="Name of the tree.")] = "default",
    directory: Annotated[Path | None, typer.Option(help="Directory of bases. [default: user cache]")] = None,
) -> None:
    """Copy a base tree that was made elsewhere.

    A server without root needs a copy of its own.
    """
    made = import_base(source, name, directory=directory, progress=lambda line: print(line, file=sys.stderr))
    typer.echo(made.root)


@cli.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name or id of a tree.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Print the id and directory of a base tree."""
    found = find_base(name)
    typer.echo(
        json.dumps({"name": found.name, "id": found.id, "root": str(found.root)})
        if as_json
        else f"{found.id} {found.root}"
    )
