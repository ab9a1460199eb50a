"""``errata probe``: says which recovery class an environment can have, what differs, and how to serve it."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..recovery import recovery_class
from .source import DataDir, Json, Source, Url

IMPOSSIBLE, UNCLEAR = 3, 4
"""Exit statuses beside 0, the class was verified; 1 is an error and 2 a wrong option, as everywhere."""


def probe(
    target: Annotated[str, typer.Argument(metavar="ENVIRONMENT", help="As for errata serve.")],
    actions: Annotated[
        Path | None,
        typer.Option(help='Recorded actions, one JSON object a line; {"reset": {...}} is a reset with arguments.'),
    ] = None,
    episode: Annotated[
        str | None,
        typer.Option(metavar="EID", help="Take the requests of an episode instead, from --data-dir or --url."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="How many actions to draw where none are given.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn actions and of the resets.")] = 0,
    action: Annotated[str | None, typer.Option(help="Action class, module:Class, where hints do not say it.")] = None,
    observation: Annotated[str | None, typer.Option(help="Observation class, likewise.")] = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Find out whether sessions can fork and survive a restart.

    Plays the same actions in fresh server processes, compares them, kills one with SIGKILL in the middle, and goes on.
    Exit status: 0 verified, 3 impossible as it is, 4 the actions show too little.
    """
    from ..probe import Outcome, Plan
    from ..probe import probe as run
    from ..probe.requests import of_bundle, recorded
    from ..targets.load import Stated

    if actions is not None and episode is not None:
        raise typer.BadParameter("give --actions or --episode, not both")
    requests = recorded(actions) if actions is not None else []
    if episode is not None:
        held = io.BytesIO()
        with Source(data_dir, url, eids=[episode]) as source:
            source.bundle([episode], held.write, ancestors=False)
        requests = of_bundle(held.getvalue().splitlines())

    def say(line: str) -> None:
        print(f"errata: {line}", file=sys.stderr, flush=True)

    verdict = run(Plan(target, requests, steps, seed, Stated(action, observation), say))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(verdict)))
    else:
        for line in lines(verdict):
            typer.echo(line)
    if verdict.outcome is not Outcome.VERIFIED:
        raise typer.Exit(IMPOSSIBLE if verdict.outcome is Outcome.IMPOSSIBLE else UNCLEAR)


def lines(verdict: object) -> list[str]:
    """Return a verdict for people."""
    from ..probe import Outcome, Verdict

    assert isinstance(verdict, Verdict)
    different, errors = verdict.answers
    told = [f"{verdict.environment}: {verdict.requests} requests, {different} different answers, {errors} errors"]
    if not verdict.differs:
        told.append("fresh processes gave the same answers, field by field")
    for found in verdict.differs:
        cause = f" ({found.cause})" if found.cause else ""
        told.append(f"  differs at {found.path}, first in request {found.request}{cause}: {found.how}")
    told += [
        f"  state() differs at {found.path}: {found.how}; no delivery shows it, so recovery does not compare it"
        for found in verdict.state_differs
    ]
    told.append(f"recovery as it is: {verdict.served}")
    command = shlex.join(["errata", "serve", verdict.target, *verdict.options])
    match verdict.outcome:
        case Outcome.VERIFIED:
            told.append(f"recovery it can have: {verdict.recovery}, verified after kill -9 and in a fork")
            told.append(f"  {command}")
            if recovery_class(verdict.recovery).repeats_requests:
                told.append(
                    "  or in its class: DETERMINISTIC = True"
                    + (
                        f"; VOLATILE_FIELDS of its observation: {verdict.options[-1]}"
                        if "--volatile" in verdict.options
                        else ""
                    )
                )
        case Outcome.IMPOSSIBLE:
            told.append("recovery it can have: none as it is")
            told += [f"  {why}" for why in verdict.why]
            told.append(
                "  with these lines in its class its sessions are kept and forked whatever its answers depend on:"
            )
            told += [f"    {line}".rstrip() for line in verdict.snapshot_lines]
        case Outcome.UNCLEAR:
            told.append("recovery it can have: unclear")
            told += [f"  {why}" for why in verdict.why]
    return told
