"""``errata probe``: finds out which recovery class an environment can have, what differs, and how to serve it."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from errata_protocol.printable import printable

from ..recovery import recovery_class
from . import answers
from .source import DataDir, Json, Source, Url

IMPOSSIBLE, UNCLEAR = 3, 4
"""Exit statuses for those outcomes. As for all commands, 0 is success, 1 an error and 2 a wrong option."""


ActionClass = Annotated[str | None, typer.Option(help="Action class, module:Class, if type hints do not name it.")]
ObservationClass = Annotated[
    str | None, typer.Option(help="Observation class, module:Class, if type hints do not name it.")
]


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
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Number of random actions, if none are given.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random actions and of the resets.")] = 0,
    action: ActionClass = None,
    observation: ObservationClass = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Find out whether sessions can fork and survive a restart.

    Runs the same actions in several new server processes, compares the answers, kills one with SIGKILL in the middle
    and continues. Exit status: 0 verified, 3 impossible as it is, 4 the actions show too little.
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
            source.bundle([episode], held.write, ancestors=False, most_bytes=answers.MAX_BYTES)
        requests = of_bundle(held.getvalue().splitlines())

    def say(line: str) -> None:
        print(f"errata: {printable(line)}", file=sys.stderr, flush=True)

    verdict = run(Plan(target, requests, steps, seed, Stated(action, observation), say))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(verdict)))
    else:
        for line in lines(verdict):
            typer.echo(printable(line))
    if verdict.outcome is not Outcome.VERIFIED:
        raise typer.Exit(IMPOSSIBLE if verdict.outcome is Outcome.IMPOSSIBLE else UNCLEAR)


def lines(verdict: object) -> list[str]:
    """Return the lines that describe a verdict in text output."""
    from ..probe import Outcome, Verdict

    assert isinstance(verdict, Verdict)
    different, errors = verdict.answers
    text = [f"{verdict.environment}: {verdict.requests} requests, {different} different answers, {errors} errors"]
    if not verdict.differs:
        text.append("fresh processes gave the same answers, field by field")
    for found in verdict.differs:
        cause = f" ({found.cause})" if found.cause else ""
        text.append(f"  differs at {found.path}, first in request {found.request}{cause}: {found.how}")
    text += [
        f"  state() differs at {found.path}: {found.how}; no delivery shows it, so recovery does not compare it"
        for found in verdict.state_differs
    ]
    text.append(f"recovery as it is: {verdict.served}")
    options = verdict.options
    if verdict.limit is not None:
        text.append(verdict.limit)
    command = shlex.join(["errata", "serve", verdict.target, *options])
    match verdict.outcome:
        case Outcome.VERIFIED:
            text.append(f"recovery it can have: {verdict.recovery}, verified after kill -9 and in a fork")
            text.append(f"  {command}")
            if recovery_class(verdict.recovery).repeats_requests:
                text.append(
                    "  or in its class: DETERMINISTIC = True"
                    + (
                        f"; VOLATILE_FIELDS of its observation: {options[options.index('--volatile') + 1]}"
                        if "--volatile" in options
                        else ""
                    )
                )
        case Outcome.IMPOSSIBLE:
            text.append("recovery it can have: none as it is")
            text += [f"  {why}" for why in verdict.why]
            text.append(
                "  with these lines in its class its sessions are kept and forked whatever its answers depend on:"
            )
            text += [f"    {line}".rstrip() for line in verdict.snapshot_lines]
        case Outcome.UNCLEAR:
            text.append("recovery it can have: unclear")
            text += [f"  {why}" for why in verdict.why]
    return text
