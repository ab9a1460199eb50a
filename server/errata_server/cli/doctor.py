"""``errata doctor``: makes the checks of `diagnostics` and prints their results."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from . import data_dirs, source


def doctor(
    data_dir: source.ServersDir = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on which the server would listen.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check that this machine can run `errata serve terminal`.

    Exit status 0 if it can. Other environments need less: the last line says whether one that runs no commands in
    sandboxes would work.
    """
    from ..sandbox import registry
    from ..settings import Settings
    from .diagnostics.checks import examine, summary
    from .diagnostics.probes import Machine

    chosen = data_dir or data_dirs.of_targets(["terminal"])
    settings = Settings(data_dir=chosen)
    backend = registry.backend_type(settings.sandbox)
    found = []
    for finding in examine(Machine(settings), backend, registry.config_for(chosen, settings.base), port=port):
        found.append(finding)
        if not as_json:
            typer.echo(f"{finding.verdict:8}{finding.name:18}{finding.says}")
            for label, text in (("costs", finding.costs), ("fix", finding.fix)):
                if text:
                    typer.echo(f"{'':26}{label}: {text}")
    works = all(finding.verdict != "missing" for finding in found)
    if not as_json:
        typer.echo(summary(found))
    else:
        typer.echo(json.dumps({"works": works, "findings": [asdict(finding) for finding in found]}))
    raise typer.Exit(0 if works else 1)
