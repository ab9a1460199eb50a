"""``errata view``: opens the viewer on a data directory, bundles or a server."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from errata_protocol.errors import InvalidRequest

from . import data_dirs
from .source import Source, runtime_for_reading


def view(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA_DIR|BUNDLE...|URL]",
            help="Journal, or a directory of several; bundles; or a server. [default: as for errata episodes]",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Show episodes in the browser.

    A data directory is only read, also while a server runs on it. Its page is for this machine alone, and is gone when
    this command ends. A running server has the page itself, at /viewer/.
    """
    given = what or []
    if given and given[0].startswith(("http://", "https://")):
        if len(given) > 1:
            raise InvalidRequest("one server at a time: give one URL")
        _show(Source(None, given[0]).viewer(), browser)
        return
    from ..serve.bundle_server import serve_archive
    from ..serve.journal_server import serve_journals
    from ..serve.server import Bind

    bind = Bind("127.0.0.1", port, insecure=False)

    def ready(url: str) -> None:
        _show(f"{url.rstrip('/')}/viewer/", browser)

    paths = [Path(one) for one in given]
    if paths and all(path.is_file() for path in paths):
        serve_archive(paths, bind, ready)
        return
    if len(paths) > 1:
        raise InvalidRequest("give one data directory, one server, or any number of bundles")
    directories = data_dirs.for_reading(paths[0] if paths else None)
    serve_journals({directory: runtime_for_reading(directory) for directory in directories}, bind, ready)


def _show(address: str, browser: bool) -> None:
    typer.echo(address)
    if browser:
        webbrowser.open(address)
